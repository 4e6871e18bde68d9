"""What functions of PyTorch do otherwise in a trace than in eager, and what is called for them there.

Operators have corrections of their own: `aotdist.joint.functional` (how they write, how results lie),
`aotdist.joint.kernel_results` (what their fakes claim) and `aotdist.joint.unknown_sizes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.joint import (
    attention,
    checked,
    formulas,
    linear_algebra,
    packed_sequences,
    padded_encoders,
    resizing,
    sparse_embedding,
    unknown_sizes,
)
from aotdist.torch_seam.checks import gaussian_nll_loss
from aotdist.torch_seam.control_flow import IS_LEFT_ALIGNED, PACK


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction.

    Args:
        instead: what is called for which functions.
        why: what they do in a trace.
        release: the last release of PyTorch that was seen to need it.
        test: a file of tests, one of which fails without it.
        of_bits: whether it is needed only where results are to have eager's bits.
    """

    instead: Mapping[Any, Callable[..., Any]]
    why: str
    release: str
    test: str
    of_bits: bool = False


CORRECTIONS = (
    Correction(
        formulas.INSTEAD,
        "gradients are computed by formulas that ask for no data, and that round otherwise",
        "2.13",
        "tests/joint/test_formulas.py",
        of_bits=True,
    ),
    Correction(
        linear_algebra.INSTEAD,
        "vectors are computed along with the values that are asked for, by another algorithm",
        "2.13",
        "tests/op_db/test_op_db.py",
    ),
    Correction(
        {torch.nn.functional.embedding: sparse_embedding.embedding},
        "the sparse gradient beside a padding index asks how many indices are none",
        "2.13",
        "tests/semantics/test_sparse_gradients.py",
    ),
    Correction(
        checked.INSTEAD,
        "data are asked whether they are in order, in C++",
        "2.13",
        "tests/joint/test_checked.py",
    ),
    Correction(
        unknown_sizes.INSTEAD,
        "lengths that are Python numbers are written into a tensor that has no memory",
        "2.13",
        "tests/joint/test_unknown_sizes.py",
    ),
    Correction(
        packed_sequences.INSTEAD,
        "lengths that are Python numbers are read from a tensor that has no memory",
        "2.13",
        "tests/joint/test_packed_sequences.py",
    ),
    Correction(
        resizing.INSTEAD,
        "sizes that are symbols are asked for their numbers, in C++",
        "2.13",
        "tests/semantics/test_dynamic_sizes.py",
    ),
    Correction(
        {torch.nn.functional.gaussian_nll_loss: gaussian_nll_loss},
        "variances are asked whether they are negative",
        "2.13",
        "tests/op_db/test_op_db.py",
    ),
    Correction(
        {IS_LEFT_ALIGNED: padded_encoders.is_left_aligned, PACK: padded_encoders.pack},
        "a mask is asked where its padding is, and a batch becomes a nested tensor",
        "2.13",
        "tests/semantics/test_modules.py",
    ),
)


def instead(*, of_bits: bool, target: str | None) -> dict[Any, Callable[..., Any]]:
    """What is called for which functions.

    Args:
        of_bits: whether results are to have eager's bits.
        target: the generation of the GPUs that a trace on the CPU is for, if it is for any.
    """
    found: dict[Any, Callable[..., Any]] = {}
    for correction in CORRECTIONS:
        if of_bits or not correction.of_bits:
            found |= correction.instead
    return found if target is None else {**found, **attention.instead(target)}
