"""What a program did, read off its trace: after the forward, and again after the backward."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.capture.in_backward import InBackward
from aotdist.capture.source import Source
from aotdist.convention.changes import INVERSES, Change, resize_storage
from aotdist.convention.naming import NAMED
from aotdist.convention.view_log import ViewLog
from aotdist.errors import UnsupportedProgram
from aotdist.facts import (
    Action,
    BackwardFacts,
    BackwardWrite,
    Choice,
    DataWritten,
    Facts,
    InputFact,
    IsInput,
    MetadataWrite,
    NodeOut,
    Untouched,
    ViewOfIntermediate,
)
from aotdist.joint.alike import Computed
from aotdist.joint.arrivals import Arrival, find_arrivals
from aotdist.joint.backward import (
    Backward,
    Chosen,
    End,
    Result,
    choice_results,
    grad_results,
    is_linear,
    kept_results,
    refuse_unfit,
    requires_grad_by_itself,
    value_results,
)
from aotdist.joint.classes import Classes
from aotdist.joint.classify import NodeOutputs, classify
from aotdist.joint.data_writes import backward_writes, counts_of_results, forward_writes, result_writes
from aotdist.joint.endings import endings, spent_results
from aotdist.joint.failures import accumulated_inside, written_without_others
from aotdist.joint.held import held_tensors
from aotdist.joint.inputs import Inputs, StandIn
from aotdist.joint.late import ForwardEnd, is_read_again
from aotdist.joint.layout_sums import LayoutSums
from aotdist.joint.lifting import Lifting
from aotdist.joint.metadata import Metadata, refuse
from aotdist.joint.own_leaves import refuse_uses_of_own_leaves
from aotdist.joint.recorder import Recorder, Writers
from aotdist.joint.storages import Storages
from aotdist.joint.swaps import Swaps
from aotdist.joint.waypoints import Waypoints
from aotdist.program import NodeOutIdx, PrimalIdx, Row, Slot
from aotdist.sizes import numbers_of_data
from aotdist.subclasses.protocol import (
    leaves,
    plain_tensors,
    recipe_of,
    refuse_unknown_subclass,
    same_layout,
)
from aotdist.torch_seam.autograd import (
    custom_functions,
    history_of,
    saves_tensors,
    sequence_nr,
    tensors_by_node,
)
from aotdist.torch_seam.functional import (
    data_writes,
    functional_storage_id,
    functional_value,
    memory_of,
    metadata_written,
    storage_changes,
)


@dataclass(frozen=True, slots=True)
class ForwardEffects:
    """What the forward did.

    Args:
        outs: what the program returned.
        outputs: what that is, and what the node returns for it.
        metadata: the writes to sizes, strides, storage and history that are repeated outside.
        writes: what happened to each input.
        rewinds: see `Facts.rewinds`.
        is_rewritten: whether inputs, or results once they are made, change shape or history or are swapped.
        node_outs: what the node returns.
        results: the values of that.
        lifting: the mode that it ran in: knows what the program asked, and told.
        numbers: see `Facts.numbers`.
    """

    outs: Sequence[Any]
    outputs: NodeOutputs
    metadata: Metadata
    writes: Row[PrimalIdx, InputFact]
    rewinds: tuple[tuple[PrimalIdx, int], ...]
    is_rewritten: bool
    node_outs: Row[NodeOutIdx, NodeOut]
    results: list[Result]
    lifting: Lifting
    numbers: tuple[tuple[str, NodeOutIdx], ...]

    def ends(self) -> list[End]:
        """The differentiable results."""
        tensors = self.outputs.tensors
        return [(idx, tensors[idx]) for idx, out in self.node_outs.enumerate() if out.differentiable]

    def views_of_ends(self) -> list[torch.Tensor]:
        """What is made of a result outside, where it may get a gradient."""
        pairs = zip(self.outs, self.outputs.facts, strict=True)
        return [out for out, fact in pairs if isinstance(fact, ViewOfIntermediate) and out.requires_grad]

    def heard(self) -> tuple[NodeOutIdx, ...]:
        """See `BackwardFacts.heard`: autograd takes the node that was made last first."""
        ends = sorted(self.ends(), key=lambda end: sequence_nr(end[1].grad_fn), reverse=True)
        return tuple(idx for idx, _ in ends)

    def can_be_followed(self) -> bool:
        """Whether gradients of what the caller holds can be: inputs at most show their elements otherwise."""
        return not self.is_rewritten or self._only_reshapes()

    def _only_reshapes(self) -> bool:
        written = {idx for idx, fact in self.writes.enumerate() if isinstance(fact, DataWritten)}

        def is_harmless(act: Action) -> bool:
            if not isinstance(act, MetadataWrite):
                return isinstance(act, int)
            is_ending = act.number < 0
            reshapes = act.op in INVERSES and act.grad
            return is_ending or (
                reshapes and isinstance(act.target, IsInput) and act.target.input not in written
            )

        return all(map(is_harmless, self.outputs.order))


@dataclass(frozen=True, slots=True)
class BackwardEffects:
    """What the backward did.

    Args:
        runs: runs the backward, again if need be.
        grads: the gradients that inputs get.
        facts: what the later stages know of it.
        results: gradients, and what was written.
    """

    runs: Backward
    grads: Mapping[PrimalIdx, torch.Tensor]
    facts: BackwardFacts
    results: list[Result]


@dataclass(frozen=True, slots=True)
class Effects:
    """Reads off what a program did, after its forward and after its backward.

    Args:
        recorder: records the program.
        inputs: the stand-ins.
        log: the program's views, and its writes to metadata.
        storages: what it knows of storages.
        swaps: tensors that became each other.
        classes: what the user's code sees of the tensors.
        training: see `trace`.
        cuts: see `trace`.
    """

    recorder: Recorder
    inputs: Inputs
    log: ViewLog
    storages: Storages
    swaps: Swaps
    classes: Classes
    training: bool
    cuts: bool

    def forward(self, outs: Sequence[Any], lifting: Lifting) -> ForwardEffects:
        """What the forward did; read before a backward writes anything.

        Args:
            outs: what it returned.
            lifting: the mode that it ran in.
        """
        outs = self.swaps.seen_outside(outs)
        passing = self.storages.passing()
        metadata = Metadata.of(self.inputs, self.log, passing)
        self._mark_reshaped(metadata)
        spent = spent_results(outs, self.inputs, self.log) if lifting.ran_backward else {}
        outputs = classify(outs, self.inputs, self.log, metadata.written, passing, spent)
        numbers = self._tell_numbers(outputs)
        row = self.inputs.row()
        _refuse_accumulation(row)
        for idx, one in row.enumerate():
            _refuse_write(one, reshaped=metadata.is_reshaped(idx))
        writes, rewinds = forward_writes(row, outputs, metadata, self.storages, self.recorder.strided)
        outputs.order = (*outputs.order, *self.swaps.actions(outs))
        node_outs = Row[NodeOutIdx, NodeOut](
            NodeOut(
                slot,
                recipe_of(tensor),
                self.training and idx in outputs.with_history,
                outputs.versions.get(NodeOutIdx(idx)),
            )
            for idx, (slot, tensor) in enumerate(zip(outputs.slots, outputs.tensors, strict=True))
        )
        for node_out, tensor in zip(node_outs, outputs.tensors, strict=True):
            refuse_unknown_subclass(tensor, node_out.slot.path)
            if node_out.differentiable and tensor.is_leaf:
                raise requires_grad_by_itself(node_out.slot)
        refuse_uses_of_own_leaves(outs, outputs, self.inputs, self.log)
        is_rewritten = bool(metadata.written) or any(not isinstance(act, int) for act in outputs.order)
        outputs.order = (*outputs.order, *endings(outs, outputs.facts, spent, lifting.retained))
        results = value_results(self.recorder, node_outs, outputs.tensors)
        return ForwardEffects(
            outs=outs,
            outputs=outputs,
            metadata=metadata,
            writes=writes,
            rewinds=rewinds,
            is_rewritten=is_rewritten,
            node_outs=node_outs,
            results=results,
            lifting=lifting,
            numbers=numbers,
        )

    def _tell_numbers(self, outputs: NodeOutputs) -> tuple[tuple[str, NodeOutIdx], ...]:
        """Let the graph return the numbers that depend on data and are needed outside of it.

        In training that is all of them: which of them the backward needs is not known yet.

        Raises:
            UnsupportedProgram: one is needed before the graph runs.
        """
        unbacked = self.recorder.unbacked
        if unbacked is None:
            return ()
        if numbers_of_data([outputs.facts[idx] for idx in outputs.early]):
            raise UnsupportedProgram(
                "a view of an input, at a place that depends on data, is made before the input is written",
                stage="joint",
                fix="make the view afterwards",
            )
        if self.training:
            numbers = unbacked.numbers
        else:
            recipes = [recipe_of(tensor) for tensor in outputs.tensors]
            numbers = numbers_of_data([outputs.facts, outputs.order, recipes])
        return tuple(
            (name, outputs.add(Slot("output", name), self.recorder.told(number), history=False))
            for name, number in sorted(numbers.items())
        )

    def _mark_reshaped(self, metadata: Metadata) -> None:
        """Mark arguments that are reshaped in place: no view of one may be saved, as its history changes."""
        for idx in metadata.changes:
            stand_in = self.inputs.row()[idx]
            for inner, _ in leaves(stand_in.recipe):
                self.recorder.placeholder(Slot("primal", stand_in.slot.path, inner)).meta["reshaped"] = True

    def backward(
        self, forward: ForwardEffects, in_python: InBackward, *, may_run_later: bool
    ) -> BackwardEffects:
        """Run the backward, and read off what it did.

        Args:
            forward: what the forward did.
            in_python: see `trace`.
            may_run_later: see `trace`.
        """
        recorder, inputs, metadata = self.recorder, self.inputs, forward.metadata
        ends, fits = forward.ends(), forward.can_be_followed()
        functions = custom_functions([tensor for _, tensor in ends])
        by_node = {
            node: frozenset(ends[position][0] for position in positions)
            for node, positions in tensors_by_node([tensor for _, tensor in ends]).items()
        }
        freed = frozenset(behind for node, behind in by_node.items() if saves_tensors(node))
        sizes, num_changes = self.storages.sizes(), len(self.log.changes)
        counters = [one.counts() for one in inputs.row()]
        tensors = forward.outputs.tensors
        of_results = counts_of_results(tensors, inputs.row())
        forward_end = ForwardEnd.of(recorder, inputs.row(), tensors) if self.cuts and fits else None
        can_hold = self.cuts and fits and is_linear(ends)
        held = held_tensors(forward.outs, forward.outputs, forward.writes, inputs.row()) if can_hold else []
        waypoints = Waypoints(held, ends)
        arrivals = find_arrivals(forward.outs, forward.outputs.facts, ends) if fits else {}
        backward = self._backward_from(forward, ends, arrivals, in_python)
        by_themselves = backward.choices() if self.cuts else []
        sums = LayoutSums()
        with waypoints.watched(recorder), sums if len(ends) > 1 else nullcontext():
            with backward.noting_arrivals() as arrived, recorder.noting_writers() as writers:
                whole = backward.run(retain_graph=may_run_later or len(ends) > 1)
        grads = whole.grads
        _refuse_accumulation(inputs.row())
        refuse_unfit(inputs.row(), grads, metadata.is_reshaped)
        slots = inputs.row().map(lambda one: one.slot)
        results = grad_results(recorder, slots, grads) + waypoints.results(recorder)
        writes, written = backward_writes(recorder, inputs.row(), counters, metadata, self.storages)
        made, made_results = result_writes(
            recorder, forward.node_outs, tensors, of_results, counts_of_results(tensors, inputs.row())
        )
        written += made_results + kept_results(recorder, whole.kept)
        _refuse_replaced_inputs(recorder, inputs, in_python.replaced)
        storages = tuple(self.storages.resized_since(sizes))
        if whole.kept and self.cuts and may_run_later:
            by_themselves = backward.some()
        of_nobody = self._written_of_nobody(writers, tensors)
        once = is_read_again(of_nobody, results + written)
        if made or once or (writes and (forward_end is None or storages)):
            by_themselves = []
        elif writes and not self._are_met_by_all(by_node, len(ends), writes, writers):
            by_themselves = backward.some()
        runs, choices, of_choices = self._trace_choices(forward, backward, by_themselves, writes, forward_end)
        results += of_choices
        if in_python.whole and may_run_later and not (writes or made):
            self._check_repeatable(backward, {None: whole, **runs}, in_python)
        if forward_end is not None:
            forward_end.read_late(recorder, inputs.row(), writes, forward.node_outs, made)
        _refuse_changes_in_backward(inputs, self.log.changes[num_changes:])
        self.swaps.refuse_with(writes or made or storages)
        facts = BackwardFacts(
            grads=Row(recipe_of(grads[idx]) if idx in grads else None for idx in inputs.row().indices()),
            writes=writes,
            result_writes=made,
            storages=storages,
            functions=tuple(name for name in functions if name != NAMED),
            hooked=forward.lifting.hooked,
            passages=waypoints.passages(len(forward.node_outs)),
            once=once,
            choices=choices,
            adds_layouts=sums.differ,
            arrived=tuple(dict.fromkeys(arrived)),
            freed=freed,
            heard=forward.heard(),
        )
        return BackwardEffects(backward, grads, facts, results + written)

    def _backward_from(
        self,
        forward: ForwardEffects,
        ends: Sequence[End],
        arrivals: Mapping[NodeOutIdx, Arrival],
        in_python: InBackward,
    ) -> Backward:
        """What runs autograd from the differentiable results."""
        wanted = forward.metadata.gradient_ends(self.inputs.row())
        asked = self.classes.are_asked_in_backward(self._starts(forward))
        shown = functools.partial(self.classes.shown, asked=asked)
        return Backward(
            recorder=self.recorder,
            node_outs=forward.node_outs,
            ends=ends,
            wanted=wanted,
            mode=forward.lifting,
            arrivals=arrivals,
            shown=shown,
            in_python=in_python,
            views=forward.views_of_ends(),
        )

    def _written_of_nobody(self, writers: Writers, results: Sequence[torch.Tensor]) -> list[torch.fx.Node]:
        """What the forward computed, that is in nobody's hands, and that the backward writes over."""
        held = [plain for one in self.inputs.row() for plain in one.plains]
        held += [plain for result in results for plain in plain_tensors(result)]
        storages = set(map(memory_of, held))
        return [node for node, storage in writers.of_forward.items() if storage not in storages]

    def _are_met_by_all(
        self,
        by_node: Mapping[Any, frozenset[NodeOutIdx]],
        num_ends: int,
        writes: Sequence[BackwardWrite],
        writers: Writers,
    ) -> bool:
        """Whether the backward writes the same, from whichever of the results it starts.

        Args:
            by_node: the autograd nodes, each with the results that it is behind.
            num_ends: the number of results.
            writes: the inputs that the backward writes.
            writers: see `Recorder.noting_writers`.
        """
        row = self.inputs.row()
        memory = {functional_storage_id(plain) for write in writes for plain in row[write.input].plains}
        numbers = {number for storage, number in writers.nodes if storage in memory}
        return numbers <= {sequence_nr(node) for node, behind in by_node.items() if len(behind) == num_ends}

    def _trace_choices(
        self,
        forward: ForwardEffects,
        backward: Backward,
        by_themselves: Sequence[Chosen],
        writes: Sequence[BackwardWrite],
        forward_end: ForwardEnd | None,
    ) -> tuple[dict[Chosen, Computed], tuple[Choice, ...], list[Result]]:
        """Run the backward of each choice of results: what each computes, its fact, and graph results.

        Each begins with what the inputs hold when the forward ends, if the whole backward has `writes`.
        """
        runs: dict[Chosen, Computed] = {}
        choices: list[Choice] = []
        results: list[Result] = []
        recorder, inputs = self.recorder, self.inputs
        known = {write.input for write in writes}
        for chosen in by_themselves:
            if writes and forward_end is not None:
                forward_end.restore(inputs.row())
            counters = [one.counts() for one in inputs.row()]
            runs[chosen] = some = backward.run(chosen, retain_graph=True)
            row = inputs.row()
            some_writes, written = backward_writes(recorder, row, counters, forward.metadata, self.storages)
            for write in some_writes:
                if write.input not in known:
                    raise written_without_others(row[write.input].slot)
            grads, kept = some.recipes()
            choices.append(Choice(chosen, grads, some_writes, kept))
            slots = choices[-1].slots(row.map(lambda one: one.slot), row.map(lambda one: one.recipe))
            results += choice_results(recorder, slots, some, written)
        return runs, tuple(choices), results

    def _check_repeatable(
        self, backward: Backward, runs: Mapping[Chosen | None, Computed], in_python: InBackward
    ) -> None:
        """Run the backward of each choice again, to see whether it changes the same in Python each time."""
        runs = dict(runs)
        with self.recorder.on_trial():
            if len(runs) == 1:
                runs |= {chosen: backward.run(chosen, retain_graph=True) for chosen in backward.some()}
            for chosen, first in runs.items():
                again_alike = functools.partial(_runs_alike, backward, self.recorder, chosen, first)
                in_python.try_again(chosen, first.kept, again_alike)

    def _starts(self, forward: ForwardEffects) -> list[torch.Tensor]:
        """Results, and written inputs, at which the caller may start a backward of the program."""
        row = self.inputs.row()
        tensors = [out for out in forward.outs if isinstance(out, torch.Tensor)]
        starts = [out for out in tensors if history_of(out) is not None and self.inputs.index_of(out) is None]
        for idx, fact in forward.writes.enumerate():
            if isinstance(fact, DataWritten) and fact.differentiable:
                starts.append(row[idx].tensor)
        return starts

    def facts(self, forward: ForwardEffects, backward: BackwardEffects) -> Facts:
        """All that the later stages know."""
        row, outputs, metadata = self.inputs.row(), forward.outputs, forward.metadata
        met_by_backward = (Untouched() for _ in range(len(row) - len(forward.writes)))
        return Facts(
            inputs=Row([*forward.writes, *met_by_backward]),
            outputs=Row(outputs.facts),
            order=outputs.order,
            node_outs=forward.node_outs,
            recipes=row.map(lambda one: one.recipe),
            backward=backward.facts,
            rewinds=forward.rewinds,
            switched_on=metadata.switched_on,
            storages=tuple(sorted({*metadata.moved(row), *self.storages.looked_at()})),
            early=outputs.early,
            asked=tuple((idx, name, answer) for (idx, name), answer in forward.lifting.asked.items()),
            answers=tuple(self.recorder.answers.given),
            numbers=forward.numbers,
        )


def _refuse_accumulation(row: Row[PrimalIdx, StandIn]) -> None:
    """Refuse `backward()` inside of the program: in its forward, in a hook, in a function's backward."""
    for stand_in in row:
        if stand_in.leaf.is_leaf and stand_in.leaf.grad is not None:
            raise accumulated_inside(stand_in.slot)


def _refuse_write(stand_in: StandIn, *, reshaped: bool) -> None:
    if not reshaped and not same_layout(stand_in.recipe, recipe_of(stand_in.tensor)):
        raise refuse(stand_in, "by an operator that lays the result out otherwise")
    for (_, leaf), plain in zip(leaves(stand_in.recipe), stand_in.plains, strict=True):
        # `out=` gives an empty tensor another size, and no counter tells.
        resized = data_writes(plain) and functional_value(plain).size() != leaf.size
        if storage_changes(plain) or (not reshaped and (resized or metadata_written(plain))):
            raise refuse(stand_in, "in a way that is not repeated outside")


def _runs_alike(backward: Backward, recorder: Recorder, choice: Chosen | None, first: Computed) -> bool:
    """Whether the backward of a choice, run once more, computes what it computed first."""
    return first.is_like(recorder, backward.run(choice, retain_graph=True))


def _refuse_replaced_inputs(
    recorder: Recorder, inputs: Inputs, replaced: Sequence[tuple[Source, torch.Tensor]]
) -> None:
    """Refuse a backward that computes with a tensor and then puts another in its place.

    The tensor is read when the forward begins; by then, backwards of other calls may have replaced it.
    """
    for place, tensor in replaced:
        met = inputs.of_example(tensor)
        idx = inputs.index_of(tensor if met is None else met)
        if idx is None:
            continue
        slot, recipe = inputs.row()[idx].slot, inputs.row()[idx].recipe
        names = (Slot("primal", slot.path, inner) for inner, _ in leaves(recipe))
        users = [user for name in names for user in recorder.placeholder(name).users]
        if any(user.meta.get("phase") == "backward" for user in users):
            raise UnsupportedProgram(
                f"the backward (a hook, an autograd function) computes with `{place.path}` and assigns it",
                stage="joint",
                fix="add to the tensor in place (`add_`)",
            )


def _refuse_changes_in_backward(inputs: Inputs, changes: Sequence[Change]) -> None:
    for change in changes:
        idx = inputs.index_of(change.tensor)
        if idx is not None and change.reshapes() and change.op is not resize_storage:
            raise refuse(inputs.row()[idx], "by the backward")
