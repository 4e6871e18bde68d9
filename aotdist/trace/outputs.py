"""What each output is: fresh, an input, or a view of which tensor by which steps.

Also where each write of metadata that shows outside is repeated, and with which arguments.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

import torch

from aotdist.aliasing.metadata import Change
from aotdist.aliasing.view_log import ViewLog, look_inside
from aotdist.aliasing.views import Root, share_storage
from aotdist.facts import (
    Action,
    Fresh,
    FunctionView,
    Inside,
    IsInput,
    Keep,
    Kept,
    MetadataWrite,
    NotATensor,
    OutputFact,
    Place,
    Step,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
    ViewStep,
)
from aotdist.program import NodeOutIdx, OutIdx, PrimalIdx, Slot
from aotdist.subclasses.protocol import is_wrapper, wrapper_rule
from aotdist.torch_seam.autograd import creation_meta, is_leaf_with_grad, released_history
from aotdist.torch_seam.jagged import is_ragged
from aotdist.trace.failures import unsupported
from aotdist.trace.stand_ins import Inputs


class NodeOutputs:
    """What each output of a program is, and the tensors that the autograd node returns for them, each once.

    Args:
        outs: flat results of the traced function.
        inputs: the stand-ins that it was given.
        log: the views that the program made, and its writes of metadata.
        written: numbers of the writes of metadata that are repeated on inputs outside.
        freed: identities of results whose saved tensors autograd has freed, so that they have no backward.
    """

    def __init__(
        self,
        outs: Sequence[Any],
        inputs: Inputs,
        log: ViewLog,
        written: Container[int],
        freed: Container[int],
    ) -> None:
        self.slots: list[Slot] = []
        self.tensors: list[torch.Tensor] = []
        self.with_history: set[NodeOutIdx] = set()
        self._known: dict[int, NodeOutIdx] = {}
        self._outs, self._inputs, self._log = outs, inputs, log
        self._written, self._freed = written, freed
        look_inside(log, outs, [stand_in.opened for stand_in in inputs.row()])
        self._first: dict[int, OutIdx] = {}
        for position, out in enumerate(outs):
            if isinstance(out, torch.Tensor):
                self._first.setdefault(id(out), OutIdx(position))
        self._kept: list[tuple[int, Keep]] = []
        self.facts = [self._output(OutIdx(position), out) for position, out in enumerate(outs)]
        self.order = self._in_order()

    def add(self, slot: Slot, tensor: torch.Tensor, *, history: bool) -> NodeOutIdx:
        """The position of `tensor` among the node's outputs; it is appended if it is not one of them yet.

        Args:
            slot: its name, if it is new.
            tensor: what to return.
            history: whether a gradient can come back through this use of it. Through `y.detach()` none comes
                back to its base `y`, although `y` may require grad.
        """
        idx = self._known.get(id(tensor))
        if idx is None:
            idx = self._known[id(tensor)] = NodeOutIdx(len(self.tensors))
            self.slots.append(slot)
            self.tensors.append(tensor)
        if history:
            self.with_history.add(idx)
        return idx

    def _in_order(self) -> tuple[Action, ...]:
        """What is done outside, in program order: outputs are made, and metadata is written."""
        made: list[tuple[int, Action]] = [
            (self._time(out), OutIdx(position)) for position, out in enumerate(self._outs)
        ]
        for number, change in enumerate(self._log.changes):
            idx = self._inputs.index_of(change.tensor)
            if idx is not None and number in self._written:
                made.append((change.serial, self._write(number, change, idx)))
        return tuple(item for _, item in sorted([*self._kept, *made], key=lambda pair: pair[0]))

    def _has_history(self, out: torch.Tensor) -> bool:
        """Whether gradients of an output may reach inputs: not if its saved tensors are freed."""
        return out.requires_grad and id(out) not in self._freed

    def _write(self, number: int, change: Change, idx: PrimalIdx) -> MetadataWrite:
        args = tuple(
            self._source(number, change.serial, arg) if isinstance(arg, torch.Tensor) else arg
            for arg in change.args
        )
        data = None
        if change.grown is not None:
            data = self.add(Slot("output", f"grown[{number}]"), change.grown, history=False)
        return MetadataWrite(IsInput(idx), change.op, args, change.kwargs, change.grad, number, data)

    def _source(self, number: int, now: int, tensor: torch.Tensor) -> Place:
        """Where to find, outside, a tensor whose storage another tensor takes over."""
        root, slot = self._log.root(tensor, ()), Slot("output", f"source[{number}]")
        self._refuse_changed(slot, tensor, root, now)
        steps, changes = root.all_steps(), self._log.changes_of(root.base)
        place = self._place(slot, root.base, steps)
        if not steps or all(not steps[0].serial < change.serial < now for change in changes):
            return place
        self._kept.append((steps[0].serial, Keep(len(self._kept), place)))
        return Kept(len(self._kept) - 1)

    def _place(self, slot: Slot, base: torch.Tensor, steps: tuple[ViewStep, ...]) -> Place:
        as_input = self._inputs.index_of(base)
        if as_input is not None:
            return ViewOfInput(as_input, steps) if steps else IsInput(as_input)
        value = self.add(slot, base, history=False)
        return ViewOfIntermediate(value, steps) if steps else Fresh(value)

    def _time(self, out: Any) -> int:
        """When to make an output: when the program did, or before a later change of its base."""
        if not isinstance(out, torch.Tensor):
            return -1
        made = self._log.made_at(out)
        root = self._log.root(out, ())
        steps = root.all_steps()
        changes = self._log.changes_of(root.base)
        since = [change.serial for change in changes if steps and steps[0].serial < change.serial < made]
        if not since:
            return made
        for step in steps:
            forbidden = step.pick is not None or (out.requires_grad and not step.grad)
            if forbidden and step.serial > since[0]:
                raise unsupported(
                    f"`{step.op}` is applied to a view whose base was reshaped in place after it was made",
                    "make the view afterwards, or reshape without writing (`t` for `t_`)",
                )
        return steps[0].serial

    def _output(self, position: OutIdx, out: Any) -> OutputFact:
        if not isinstance(out, torch.Tensor):
            _refuse_ragged_size(position, out)
            return NotATensor(out)
        as_input = self._inputs.index_of(out)
        if as_input is not None:
            return IsInput(as_input)
        if self._first[id(out)] != position:
            return ViewOfOutput(self._first[id(out)], ())
        root = self._log.root(out, self._first)
        slot = Slot("output", f"out[{position}]")
        self._refuse_changed(slot, out, root)
        if root.base is out:
            self._refuse_unknown_alias(slot, out)
            return Fresh(self.add(slot, out, history=self._has_history(out)))
        self._refuse_outdated_copy(slot, out, root.base)
        self._refuse_view_of_replaced(slot, out, root.base)
        return self._rebuilt_view(slot, out)

    def _rebuilt_view(self, slot: Slot, out: torch.Tensor) -> ViewOfInput | ViewOfIntermediate | ViewOfOutput:
        """How to make a view outside."""
        of_input = any(self._inputs.index_of(base) is not None for base in self._log.bases(out))
        root = self._log.root(out, self._first, through_node=not of_input)
        has_history = self._has_history(out)
        if not root.made:
            base = self._log.root(out, ()).base
            of_output = base is not root.base and self._inputs.index_of(base) is None
            if has_history and of_output and is_leaf_with_grad(out):
                # Made under `no_grad`, of a view that is an output: it requires grad if their base does.
                self.add(Slot(slot.role, f"{slot.path}.base"), base, history=True)
            return self._view(slot, root.base, root.steps, history=has_history)
        # What is taken out of an input is taken out of the input itself, outside of all functions.
        depths = [depth for depth, step in enumerate(root.steps, 1) if isinstance(step.op, Inside)]
        steps: tuple[Step, ...] = root.steps[: max(depths, default=0)]
        inside = root.steps[len(steps) :]
        for number, made in enumerate(root.made):
            own = slot if made.tensor is out else Slot("output", f"{slot.path}.made[{number}]")
            # Gradients of what is detached go nowhere; the step's own backward may have freed the graph.
            history = out.requires_grad or released_history(made.tensor) is None
            value = self.add(own, made.tensor, history=history)
            steps = (*steps, FunctionView(inside, value, creation_meta(made.tensor)))
            inside = made.after
        steps = (*steps, *inside)
        # The base of what a function returned gets its gradient through the function alone. But what is made
        # under `no_grad` has no gradient, and requires one if its base does.
        return self._view(slot, root.base, steps, history=has_history and out.is_leaf)

    def _refuse_changed(self, slot: Slot, tensor: torch.Tensor, root: Root, now: float = math.inf) -> None:
        """Refuse what was given other memory in place, or views an intermediate that was changed later.

        Outside, it would be made of what the program has left there. Changes of inputs are repeated outside,
        in order.
        """
        steps = root.all_steps()
        for one in (tensor, root.base, *(made.tensor for made in root.made)):
            if self._inputs.index_of(one) is not None:
                continue
            used = now if one is tensor else steps[0].serial
            for change in self._log.changes_of(one):
                if change.moves() or change.serial > used:
                    raise unsupported(
                        f"`{slot.path}` follows from a tensor that the program made, and then reshaped, "
                        "detached or gave other memory in place",
                        "change a clone of it, or reshape without writing (`t` for `t_`)",
                        change.where or None,
                    )

    def _refuse_unknown_alias(self, slot: Slot, out: torch.Tensor) -> None:
        """Refuse a wrapper around several tensors, some in memory of an input that is written.

        Neither it nor a view of it can be made again from one base. Without writes it is given the input's
        own memory; but a write is done only after the graph has run.
        """
        if not is_wrapper(out):
            return
        for stand_in in self._inputs.row():
            pairs = zip(stand_in.plains, stand_in.writes(), strict=True)
            if any(count and share_storage(plain, out) for plain, count in pairs):
                raise unsupported(
                    f"`{slot.path}` lies in the memory of `{stand_in.slot}`, which is written, and is "
                    "no view of it to autograd",
                    f"clone `{slot.path}`, or return `{stand_in.slot}` itself",
                )

    def _refuse_outdated_copy(self, slot: Slot, out: torch.Tensor, base: torch.Tensor) -> None:
        """Refuse a view of a DTensor along a sharded dimension, if it or its base was written since.

        Such a view is a copy that autograd takes for a view. It is made again outside, from its base, which
        must still hold what was copied.
        """
        if not is_wrapper(out) or not wrapper_rule(type(out)).views_may_be_copies:
            return
        if self._log.is_outdated(out) and not share_storage(base, out):
            raise unsupported(
                f"`{slot.path}` is a view of a {type(out).__name__} that was redistributed for it: a copy, "
                "and one of the two was written after it was made",
                "clone the view, or redistribute before taking it",
            )

    def _refuse_view_of_replaced(self, slot: Slot, out: torch.Tensor, base: torch.Tensor) -> None:
        """Refuse a view of a wrapper with a replaced tensor in it: the view is made again, with the first."""
        if any(map(self._log.holds_others, (out, *self._log.bases(out)))):
            raise unsupported(
                f"`{slot.path}` is a view of a {type(base).__name__}, and a tensor inside of it was replaced",
                f"replace it in a clone, and return that as `{slot.path}`",
            )

    def _view(
        self, slot: Slot, base: torch.Tensor, steps: tuple[Step, ...], *, history: bool
    ) -> ViewOfInput | ViewOfIntermediate | ViewOfOutput:
        of_input = self._inputs.index_of(base)
        if of_input is not None:
            return ViewOfInput(of_input, steps)
        if id(base) in self._first:
            return ViewOfOutput(self._first[id(base)], steps)
        self._refuse_unknown_alias(slot, base)
        of_base = Slot(slot.role, f"{slot.path}.base")
        return ViewOfIntermediate(self.add(of_base, base, history=history), steps)


def _refuse_ragged_size(position: OutIdx, out: Any) -> None:
    if any(map(is_ragged, out if isinstance(out, torch.Size) else (out,))):
        raise unsupported(
            f"`out[{position}]`, or what is assigned or printed, is the size of a ragged dimension, which "
            "equals itself alone and is of this call",
            "return, or keep, the jagged tensor: it has the size",
        )
