"""Says of each output what it is: fresh, an input, or a view of which tensor by which steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aotdist.convention.view_log import ViewLog
from aotdist.facts import (
    Fresh,
    FunctionView,
    IsInput,
    NotATensor,
    OutputFact,
    Step,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
)
from aotdist.joint.inputs import Inputs
from aotdist.program import NodeOutIdx, OutIdx, Slot
from aotdist.torch_seam import creation_meta


class NodeOutputs:
    """Collects the tensors that the autograd node has to return, each once."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.tensors: list[torch.Tensor] = []
        self.facts: list[OutputFact] = []
        self.order: tuple[OutIdx, ...] = ()
        self.with_history: set[NodeOutIdx] = set()
        self._known: dict[int, NodeOutIdx] = {}

    def add(self, slot: Slot, tensor: torch.Tensor, *, history: bool) -> NodeOutIdx:
        """The position of `tensor` among the node's outputs; a new one if it was not there.

        Args:
            slot: its name, if it is new.
            tensor: what to return.
            history: whether a gradient can come back through this use of it. The base of `y.detach()` has
                none, however much `y` requires grad.
        """
        idx = self._known.get(id(tensor))
        if idx is None:
            idx = self._known[id(tensor)] = NodeOutIdx(len(self.tensors))
            self.slots.append(slot)
            self.tensors.append(tensor)
        if history:
            self.with_history.add(idx)
        return idx


def classify(outs: Sequence[Any], inputs: Inputs, log: ViewLog) -> NodeOutputs:
    """The fact of every output, and the tensors that the node must return for them.

    Args:
        outs: flat results of the traced function.
        inputs: the stand-ins that it was given.
        log: the views that were made meanwhile.
    """
    node = NodeOutputs()
    first: dict[int, OutIdx] = {}
    for position, out in enumerate(outs):
        if isinstance(out, torch.Tensor):
            first.setdefault(id(out), OutIdx(position))
    for position, out in enumerate(outs):
        node.facts.append(_classify_one(OutIdx(position), out, first, inputs, log, node))
    made = [log.made(out) if isinstance(out, torch.Tensor) else -1 for out in outs]
    node.order = tuple(sorted(map(OutIdx, range(len(outs))), key=made.__getitem__))
    return node


def _classify_one(
    position: OutIdx, out: Any, first: dict[int, OutIdx], inputs: Inputs, log: ViewLog, node: NodeOutputs
) -> OutputFact:
    if not isinstance(out, torch.Tensor):
        return NotATensor(out)
    as_input = inputs.index_of(out)
    if as_input is not None:
        return IsInput(as_input)
    if first[id(out)] != position:
        return ViewOfOutput(first[id(out)], ())
    root = log.root(out, first)
    slot = Slot("output", f"out[{position}]")
    if root.base is out:
        return Fresh(node.add(slot, out, history=out.requires_grad))
    steps: tuple[Step, ...] = root.steps
    if root.function is not None:
        value = node.add(slot, root.function, history=True)
        steps = (FunctionView(root.steps, value, creation_meta(root.function)), *root.after)
    of_input = inputs.index_of(root.base)
    if of_input is not None:
        return ViewOfInput(of_input, steps)
    if id(root.base) in first:
        return ViewOfOutput(first[id(root.base)], steps)
    # The base of what a function returned gets its gradient through the function alone.
    history = out.requires_grad and root.function is None
    return ViewOfIntermediate(
        node.add(Slot("output", f"out[{position}].base"), root.base, history=history), steps
    )
