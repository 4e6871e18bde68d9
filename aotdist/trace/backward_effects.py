"""What the backward of a program did, read off its trace, and the backwards of some results only.

A backward reads the tensors that it writes as they are when it runs, not as the forward left them: with
`retain_graph=True` it runs twice, and the second run reads what the first one wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Node

from aotdist.aliasing.metadata import Change
from aotdist.capture.in_backward import InBackward
from aotdist.capture.source import Source
from aotdist.facts import (
    BackwardFacts,
    Choice,
    DataWritten,
    Fresh,
    InputFact,
    IsInput,
    OutputFact,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
)
from aotdist.program import NodeOutIdx, OutIdx, PrimalIdx, Row, Slot
from aotdist.subclasses.protocol import Recipe, is_wrapper, leaves, plain_tensors, recipe_of, same_layout
from aotdist.torch_seam.autograd import nodes_behind, saves_tensors, sequence_nr
from aotdist.torch_seam.functional import FunctionalTensor, data_writes, functional_storage_id, memory_of
from aotdist.torch_seam.modes import TorchDispatchMode
from aotdist.torch_seam.operators import OpOverload, makes_views
from aotdist.trace.backward import (
    Backward,
    Chosen,
    End,
    Result,
    choice_results,
    grad_results,
    is_linear,
    kept_results,
)
from aotdist.trace.capture_mode import ReplayMode
from aotdist.trace.context import TraceContext
from aotdist.trace.failures import refusal, unsupported
from aotdist.trace.forward_effects import ForwardEffects
from aotdist.trace.later_backwards import LaterBackwards
from aotdist.trace.metadata import Metadata, refuse
from aotdist.trace.observed_grads import HeldTensor, ObservedGrads
from aotdist.trace.outputs import NodeOutputs
from aotdist.trace.recorder import Recorder
from aotdist.trace.stand_ins import Inputs, StandIn


class BackwardTrace:
    """Traces the backward of a program, and the backwards of some results that do not follow from it.

    Args:
        context: the context of the trace.
        forward: what the forward did.
    """

    def __init__(self, context: TraceContext, forward: ForwardEffects) -> None:
        options = context.options
        self._context, self._recorder, self._inputs = context, context.recorder, context.inputs
        self._forward, self._may_run_later = forward, options.may_run_later
        self._in_python = options.in_python or InBackward(None)
        self._ends = forward.ends()
        self._behind = _results_behind_nodes(self._ends)
        self._freed = frozenset(behind for node, behind in self._behind.items() if saves_tensors(node))
        cuts, row = context.options.cuts and not forward.is_rewritten, self._inputs.row()
        self._forward_end = _nodes_of_inputs(self._recorder, row) if cuts else None
        can_hold = cuts and is_linear(self._ends)
        held = held_tensors(forward.outs, forward.outputs, forward.writes) if can_hold else []
        self._waypoints = ObservedGrads(held, self._ends)
        self._backward = self._backward_of(forward)
        self._nonlinear = self._backward.choices() if context.options.cuts else []

    def effects(self) -> tuple[BackwardFacts, list[Result], LaterBackwards | None]:
        """Run the backward: what it did, gradients and what was written, and what traces others later.

        There is nothing to trace others with where they cannot run, or where the backward writes.
        """
        context, recorder, forward, backward = self._context, self._recorder, self._forward, self._backward
        metadata, tensors = forward.metadata, forward.outputs.tensors
        num_changes = len(context.log.changes)
        counters = [one.counts() for one in self._inputs.row()]
        counted = _counts_of_results(tensors, self._inputs.row())
        sums = LayoutSums()
        with self._waypoints.watched(recorder), sums if len(self._ends) > 1 else nullcontext():
            with recorder.noting_writers() as (writers, overwritten):
                whole = backward.run(retain_graph=self._may_run_later or len(self._ends) > 1)
        row = self._inputs.row()
        context.refuse_accumulation()
        grads = grad_results(recorder, row.map(lambda one: one.slot), whole.grads)
        grads += self._waypoints.results(recorder)
        writes, written = _backward_writes(recorder, row, counters, metadata)
        for out, before, after in zip(
            forward.node_outs, counted, _counts_of_results(tensors, row), strict=True
        ):
            if before != after:
                raise refusal(
                    f"the backward (a hook, an autograd function) writes `{out.slot}`, which the program "
                    "returns",
                    f"return a clone of `{out.slot}`, or write a clone in the backward",
                )
        written += kept_results(recorder, whole.kept)
        _refuse_replaced_inputs(recorder, self._inputs, self._in_python.replaced)
        once = self._writes_what_nobody_holds(overwritten)
        keeps = whole.kept and context.options.cuts and self._may_run_later
        choices = self._backward.some() if keeps else self._nonlinear
        chosen, of_choices = self._trace_alone([] if once or writes else choices)
        if self._in_python.whole and self._may_run_later and not (chosen or writes):
            self._find_changes_of_some()
        if self._forward_end is not None:
            _read_late(recorder, self._inputs.row(), writes, self._forward_end)
        _refuse_changes(self._inputs, context.log.changes[num_changes:])
        facts = BackwardFacts(
            grads=Row(
                recipe_of(whole.grads[idx]) if idx in whole.grads else None
                for idx in self._inputs.row().indices()
            ),
            writes=writes,
            writers=self._writers(writes, writers),
            waypoints=self._waypoints.facts(),
            levels=self._waypoints.levels(len(forward.node_outs)),
            once=once,
            choices=chosen,
            adds_layouts=sums.differ,
            freed=self._freed,
        )
        later = None if writes or not context.options.cuts else self._later(whole.grads)
        return facts, grads + of_choices + written, later

    def _later(self, grads: Collection[PrimalIdx]) -> LaterBackwards | None:
        if not self._may_run_later:
            return None
        self._inputs.forget_attributes()
        row = self._inputs.row()
        return LaterBackwards(
            backward=self._backward,
            replay_mode=ReplayMode({idx: one.tensor for idx, one in row.enumerate()}),
            ins=row.map(lambda one: one.slot),
            recipes=row.map(lambda one: one.recipe),
            grads=grads,
            waypoints=self._waypoints,
        )

    def _backward_of(self, forward: ForwardEffects) -> Backward:
        """What runs autograd from the differentiable results."""
        return Backward(
            recorder=self._recorder,
            node_outs=forward.node_outs,
            ends=self._ends,
            wanted=[(idx, one.leaf) for idx, one in forward.metadata.taking_grad(self._inputs.row())],
            mode=forward.capture_mode,
            in_python=self._in_python,
        )

    def _writes_what_nobody_holds(self, overwritten: Mapping[Node, int]) -> bool:
        """Whether it overwrites values of the forward that are neither inputs nor results.

        A second backward would need the new values, which are not kept.
        """
        held = [plain for one in self._inputs.row() for plain in one.plains]
        held += [plain for result in self._forward.outputs.tensors for plain in plain_tensors(result)]
        return not set(map(memory_of, held)).issuperset(overwritten.values())

    def _writers(
        self, writes: Collection[PrimalIdx], writers: Collection[tuple[int, int | None]]
    ) -> frozenset[frozenset[NodeOutIdx]]:
        """See `BackwardFacts.writers`; for a backward whose parts are not backwards, nothing is known."""
        if not writes:
            return frozenset()
        row = self._inputs.row()
        memory = {functional_storage_id(plain) for idx in writes for plain in row[idx].plains}
        behind: dict[int | None, frozenset[NodeOutIdx]] = {
            sequence_nr(node): results for node, results in self._behind.items()
        }
        numbers = {number for storage, number in writers if storage in memory}
        found = {behind.get(number, frozenset()) for number in numbers}
        return frozenset(found | ({frozenset()} if self._nonlinear else set()))

    def _trace_alone(self, choices: Sequence[Chosen]) -> tuple[tuple[Choice, ...], list[Result]]:
        """Run the backward of each choice of results: their facts, and graph results."""
        found: list[Choice] = []
        results: list[Result] = []
        for chosen in choices:
            some = self._backward.run(chosen, retain_graph=True)
            found.append(Choice(chosen, *some.recipes()))
            slots = found[-1].slots(self._inputs.row().map(lambda one: one.slot))
            results += choice_results(self._recorder, slots, some)
        return tuple(found), results

    def _find_changes_of_some(self) -> None:
        """Run the backward of each choice of results only to see what it changes in Python."""
        with self._recorder.on_trial():
            for chosen in self._backward.some():
                self._backward.run(chosen, retain_graph=True)


def _nodes_of_inputs(recorder: Recorder, row: Row[PrimalIdx, StandIn]) -> dict[PrimalIdx, list[Node]]:
    """The nodes of what each input holds now; none for inputs that have no memory of their own."""
    return {
        idx: [] if one.derived or one.spans else [recorder.value(plain) for plain in one.plains]
        for idx, one in row.enumerate()
    }


def _read_late(
    recorder: Recorder,
    row: Row[PrimalIdx, StandIn],
    writes: Collection[PrimalIdx],
    forward_end: Mapping[PrimalIdx, list[Node]],
) -> None:
    """Let the backward read what it writes from new arguments of the graph (role `buffer`).

    Args:
        recorder: recorded it.
        row: the inputs.
        writes: those that it writes.
        forward_end: `_nodes_of_inputs` when the forward was over; inputs that came later are missing.
    """
    for idx in writes:
        slot, recipe, before = row[idx].slot, row[idx].recipe, forward_end.get(idx)
        if before is None:
            names = (Slot("primal", slot.path, inner) for inner, _ in leaves(recipe))
            before = [recorder.placeholder(name) for name in names]
        if before:
            _read_from_buffers(recorder, slot.path, recipe, before)


def _read_from_buffers(recorder: Recorder, path: str, recipe: Recipe, before: Sequence[Node]) -> None:
    for node, (inner, leaf) in zip(before, leaves(recipe), strict=True):
        fake = recorder.fake_like(leaf, node.meta["val"].device)
        buffer = recorder.value(recorder.argument(Slot("buffer", path, inner), fake))
        first = next((n for n in node.graph.nodes if n.meta.get("phase") == "backward"), None)
        if first is not None:
            _read_instead(node, buffer, first)


def _read_instead(node: Node, buffer: Node, first: Node) -> None:
    """Let the backward (from `first` on) read `buffer` for `node`, and its views for those of `node`."""
    for user in list(node.users):
        if user.meta.get("phase") == "backward":
            user.replace_input_with(node, buffer)
        elif isinstance(user.target, OpOverload) and makes_views(user.target) and user.args[0] is node:
            with node.graph.inserting_before(first):
                view = node.graph.node_copy(user, lambda read: buffer if read is node else read)
            view.meta["phase"] = "backward"
            _read_instead(user, view, first)
            if not view.users:
                node.graph.erase_node(view)


def _backward_writes(
    recorder: Recorder,
    row: Row[PrimalIdx, StandIn],
    before: Sequence[tuple[tuple[int, ...], int]],
    metadata: Metadata,
) -> tuple[dict[PrimalIdx, int], list[Result]]:
    """Inputs that the backward wrote, and how often; their new values."""
    writes: dict[PrimalIdx, int] = {}
    results: list[Result] = []
    # An input that the backward was the first to touch has no count from before: nothing was written then.
    padded = [*before, *[((), 0)] * (len(row) - len(before))]
    for idx, stand_in in row.enumerate():
        counts, (counted, bumps) = stand_in.writes(), padded[idx]
        if stand_in.derived or counts == (counted or (0,) * len(counts)):
            continue
        writes[idx] = stand_in.bumps() - bumps
        plains = plain_tensors(metadata.as_before(idx, stand_in, history=False))
        for (inner, _), plain in zip(leaves(stand_in.recipe), plains, strict=True):
            results.append((Slot("backward_write", stand_in.slot.path, inner), recorder.value(plain)))
    return writes, results


def _counts_of_results(
    tensors: Sequence[torch.Tensor], row: Row[PrimalIdx, StandIn]
) -> list[tuple[int, ...]]:
    """How often each of the node's results was written; empty for those in memory of inputs."""
    of_inputs = {functional_storage_id(plain) for one in row for plain in one.plains}

    def counts(tensor: torch.Tensor) -> tuple[int, ...]:
        plains = [plain for plain in plain_tensors(tensor) if isinstance(plain, FunctionalTensor)]
        if any(functional_storage_id(plain) in of_inputs for plain in plains):
            return ()
        return tuple(map(data_writes, plains))

    return list(map(counts, tensors))


def _results_behind_nodes(ends: Sequence[End]) -> dict[Any, frozenset[NodeOutIdx]]:
    """The autograd nodes, each with the results that follow from it."""
    found: dict[Any, frozenset[NodeOutIdx]] = {}
    for idx, tensor in ends:
        for node in nodes_behind([tensor]):
            found[node] = found.get(node, frozenset()) | {idx}
    return found


def _refuse_replaced_inputs(
    recorder: Recorder, inputs: Inputs, replaced: Sequence[tuple[Source, torch.Tensor]]
) -> None:
    """Refuse a backward that computes with a tensor and then assigns another in its place.

    The call reads the tensor when its forward begins; until its backward runs, that of another call may have
    replaced the tensor.
    """
    for place, tensor in replaced:
        stand_in = inputs.of_example(tensor)
        idx = inputs.index_of(tensor if stand_in is None else stand_in)
        if idx is None:
            continue
        slot, recipe = inputs.row()[idx].slot, inputs.row()[idx].recipe
        names = (Slot("primal", slot.path, inner) for inner, _ in leaves(recipe))
        users = [user for name in names for user in recorder.placeholder(name).users]
        if any(user.meta.get("phase") == "backward" for user in users):
            raise unsupported(
                f"the backward (a hook, an autograd function) computes with `{place.path}` and assigns it",
                "add to the tensor in place (`add_`)",
            )


def _refuse_changes(inputs: Inputs, changes: Sequence[Change]) -> None:
    for change in changes:
        idx = inputs.index_of(change.tensor)
        if idx is not None and change.reshapes():
            raise refuse(inputs.row()[idx], "by the backward")


_SUMS = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor})


class LayoutSums(TorchDispatchMode):
    """Notes whether autograd adds wrappers of different layouts while the mode is active."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.differ = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _SUMS and all(map(is_wrapper, args[:2])):
            self.differ |= not same_layout(*map(recipe_of, args[:2]))
        return func(*args, **(kwargs or {}))


def held_tensors(
    outs: Sequence[Any], outputs: NodeOutputs, writes: Row[PrimalIdx, InputFact]
) -> list[HeldTensor]:
    """The differentiable results of a program, which the caller may watch the gradients of.

    Args:
        outs: what the program returned.
        outputs: what that is.
        writes: what happened to each input.
    """
    held = [
        HeldTensor(str(outputs.slots[idx]), Fresh(idx), idx, outputs.tensors[idx])
        for idx in sorted(outputs.with_history)
        if outputs.slots[idx].role == "output"
    ]
    for position, (out, fact) in enumerate(zip(outs, outputs.facts, strict=True)):
        is_view = isinstance(fact, (ViewOfInput, ViewOfIntermediate, ViewOfOutput)) and fact.steps
        source = _viewed_input(outputs, fact)
        is_written = source is not None and isinstance(writes[source], DataWritten)
        if is_view and out.grad_fn is not None and not is_written:
            held.append(HeldTensor(f"out[{position}]", OutIdx(position), None, out))
    return held


def _viewed_input(outputs: NodeOutputs, fact: OutputFact) -> PrimalIdx | None:
    """The input that an output is, or is a view of; None for others."""
    match fact:
        case IsInput(input=source) | ViewOfInput(base=source):
            return source
        case ViewOfOutput(base=base):
            return _viewed_input(outputs, outputs.facts[base])
        case _:
            return None
