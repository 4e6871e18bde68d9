"""What is done to results last: they are given `retain_grad`, or a history whose backward raises.

The program may itself have called `torch.autograd.grad`, which freed the graph of what it returns: eager
returns that all the same, and its backward raises. Or it may have called `retain_grad`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from aotdist.convention.changes import spend_history
from aotdist.convention.view_log import ViewLog
from aotdist.facts import Fresh, IsInput, MetadataWrite, NotATensor, OutputFact, Place, ViewOfOutput
from aotdist.joint.inputs import Inputs
from aotdist.program import OutIdx, PrimalIdx
from aotdist.torch_seam.autograd import retains_grad, spent_history


def spent_results(outs: Sequence[Any], inputs: Inputs, log: ViewLog) -> Mapping[int, str]:
    """Results whose graph was freed, by identity, each with the message of the error of its backward.

    Inputs, views, and bases of results are not among them: of those, the backward is traced, and refused.
    """
    tensors = [out for out in outs if isinstance(out, torch.Tensor)]
    viewed = {id(base) for out in tensors for base in log.views.bases(out)}
    alone = [
        out
        for out in tensors
        if inputs.index_of(out) is None
        and id(out) not in viewed
        and not any(True for _ in log.views.bases(out))
    ]
    found = ((id(out), spent_history(out)) for out in alone)
    return {key: said for key, said in found if said is not None}


def endings(
    outs: Sequence[Any],
    facts: Sequence[OutputFact],
    spent: Mapping[int, str],
    retained: Iterable[PrimalIdx],
) -> tuple[MetadataWrite, ...]:
    """The actions on results, and on inputs, once all results are made.

    Args:
        outs: what the program returned.
        facts: the fact of each of `outs`.
        spent: see `spent_results`.
        retained: inputs that retain their gradients.
    """
    made = [_retaining(IsInput(idx)) for idx in retained]
    for position, (out, fact) in enumerate(zip(outs, facts, strict=True)):
        place = ViewOfOutput(OutIdx(position), ())
        if isinstance(fact, Fresh) and id(out) in spent:
            made.append(MetadataWrite(place, spend_history, (spent[id(out)],), (), True, -1))
        is_made = not isinstance(fact, (NotATensor, IsInput))
        if is_made and retains_grad(out):
            made.append(_retaining(place))
    return tuple(made)


def _retaining(place: Place) -> MetadataWrite:
    return MetadataWrite(place, torch.Tensor.retain_grad, (), (), True, -1)
