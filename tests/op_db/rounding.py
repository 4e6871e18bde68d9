"""Runs a case eagerly and by a backend that makes kernels, and says what differs beyond rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import aotdist
from aotdist.torch_seam.trees import pytree
from tests.op_db.comparison import tangent_for
from tests.op_db.samples import Case, Scene


def beyond_rounding(case: Case, backend: str | Callable[..., Any]) -> str:
    """What differs, or the error that only the backend raises; nothing if it refuses, or eager raises.

    Values are compared with the tolerances of `torch.testing`, and a NaN is equal to a NaN alone.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scene = case.build()
            expected = _seen(scene, scene.target)
        except Exception:
            return ""
        scene = case.build()
        try:
            actual = _seen(scene, aotdist.compile(scene.target, backend=backend))
            torch.testing.assert_close(actual, expected, equal_nan=True)
        except aotdist.UnsupportedProgram:
            return ""
        except Exception as error:
            return f"{case}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _seen(scene: Scene, call: Callable[..., Any]) -> list[Tensor]:
    """Results, gradients, what was written, and where the generator stands."""
    args, kwargs = scene.arguments()
    torch.manual_seed(1)
    outs = [leaf for leaf in pytree.tree_leaves(call(*args, **kwargs)) if isinstance(leaf, Tensor)]
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ends = [out for out in outs if out.grad_fn is not None]
    leaves = [leaf for leaf in scene.leaves if leaf.requires_grad]
    tangents = [tangent_for(end) for end in ends]
    grads = torch.autograd.grad(ends, leaves, tangents, allow_unused=True) if ends and leaves else ()
    tensors = [*outs, *given, *(grad for grad in grads if grad is not None)]
    return [*(tensor.detach().clone() for tensor in tensors), torch.get_rng_state()]
