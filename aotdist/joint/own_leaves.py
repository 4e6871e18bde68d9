"""Leaves that a program makes itself: tensors that begin to require grad inside of it.

`x.detach().requires_grad_()` is one, and so is what a class makes of data that requires grad. The autograd
node of the program is not their history: if the caller gets one, or a view of it, `requires_grad_` is called
outside, and gradients of views arrive at it as in eager. Gradients of other results would not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from aotdist.convention.view_log import ViewLog
from aotdist.facts import Fresh, ViewOfInput, ViewOfIntermediate, ViewOfOutput
from aotdist.joint.backward import requires_grad_by_itself
from aotdist.joint.classify import NodeOutputs
from aotdist.joint.inputs import Inputs
from aotdist.joint.metadata import forgotten
from aotdist.program import Slot
from aotdist.torch_seam.autograd import is_leaf_with_grad, nodes_behind


def refuse_uses_of_own_leaves(
    outs: Sequence[Any], outputs: NodeOutputs, inputs: Inputs, log: ViewLog
) -> None:
    """Refuse results that are functions of such leaves, if these, or views of them, are returned, too.

    Args:
        outs: what the program returned.
        outputs: the facts of `outs`.
        inputs: the stand-ins.
        log: the views.

    Raises:
        UnsupportedProgram: there is one; or a view of a leaf, itself a view, was made before a write.
    """
    leaves = {id(leaf): slot for slot, leaf in _own_leaves(outs, outputs, inputs, log)}
    used = nodes_behind(outputs.tensors[idx] for idx in outputs.with_history) if leaves else ()
    for leaf in (node.variable for node in used if hasattr(node, "variable")):
        if id(leaf) in leaves:
            raise requires_grad_by_itself(leaves[id(leaf)])


def _own_leaves(
    outs: Sequence[Any], outputs: NodeOutputs, inputs: Inputs, log: ViewLog
) -> Iterator[tuple[Slot, torch.Tensor]]:
    """The leaves among results and among bases of results, with the slot of the result."""
    for position, (out, fact) in enumerate(zip(outs, outputs.facts, strict=True)):
        if not isinstance(fact, (Fresh, ViewOfInput, ViewOfIntermediate, ViewOfOutput)):
            continue
        slot, is_outdated = Slot("output", f"out[{position}]"), False
        for tensor in (out, *log.views.bases_by_operators(out)):
            if is_leaf_with_grad(tensor) and inputs.index_of(tensor) is None:
                if is_outdated and tensor._is_view():
                    raise forgotten(slot)
                yield slot, tensor
            is_outdated = is_outdated or log.views.was_made_before_a_write(tensor)
