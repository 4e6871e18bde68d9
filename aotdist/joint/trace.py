"""One trace: forward, what it wrote, backward, what that wrote; a graph and its facts.

The program runs once on stand-ins of its inputs. Its results are read right after the forward, so
that a value which the backward writes later is not mistaken for the forward's; then tangents are
added as arguments, shaped like the differentiable results, and autograd runs the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge

from aotdist.capture.origins import raised_at
from aotdist.convention.changes import Change, resize_storage
from aotdist.convention.naming import NAMED
from aotdist.convention.synthetic_base import NO_BASES, BasePlan
from aotdist.convention.view_log import ViewLog
from aotdist.errors import UnsupportedProgram
from aotdist.facts import BackwardWrite, DataWritten, Facts, InputFact, NodeOut, Untouched
from aotdist.joint.classify import NodeOutputs, classify
from aotdist.joint.inputs import Inputs, StandIn
from aotdist.joint.lifting import Lifting
from aotdist.joint.metadata import Metadata, refuse
from aotdist.joint.proxies import Recorder
from aotdist.joint.storages import Storages
from aotdist.program import Graph, NodeOutIdx, PrimalIdx, Program, Row, Slot
from aotdist.subclasses.protocol import (
    is_real,
    leaves,
    plain_tensors,
    rebuild,
    recipe_of,
    tangent_recipe,
)
from aotdist.torch_seam import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    autocast_off,
    custom_functions,
    data_writes,
    functional_value,
    metadata_written,
    run_backward,
    storage_changes,
)

Result = tuple[Slot, torch.fx.Node | None]


@dataclass(frozen=True, slots=True)
class Traced:
    """What a trace leaves.

    Args:
        program: the program, with the closed-over tensors that it touched added to its inputs.
        graph: the joint graph; see `aotdist.program.Graph` for the order of its segments.
        facts: what the trace showed.
        fake_mode: the mode of the graph's `val`s.
    """

    program: Program[PrimalIdx]
    graph: Graph
    facts: Facts
    fake_mode: FakeTensorMode

    def has_backward(self) -> bool:
        """Whether a gradient can come back for any result."""
        return any(out.differentiable for out in self.facts.node_outs)

    def plain_ins(self) -> list[Slot]:
        """Names of the plain tensors that the graph takes, tangents left out."""
        return [slot for slot in self.graph.ins if slot.role == "primal"]


def trace(
    program: Program[PrimalIdx],
    recorder: Recorder,
    *,
    training: bool,
    name_closed_over: Callable[[torch.Tensor], Slot],
    bases: BasePlan = NO_BASES,
) -> Traced:
    """Trace `program` once.

    Args:
        program: what to trace; its `fn` may run more than autograd-visible code: hooks, subclasses.
        recorder: fresh, not entered.
        training: record a backward for the differentiable results.
        name_closed_over: names a real tensor that is none of the program's inputs.
        bases: which of the inputs share memory.

    Raises:
        UnsupportedProgram: the program needs data while it is traced, or writes metadata of an input.
    """
    inputs = Inputs(recorder, bases)

    def stand_in(real: torch.Tensor) -> torch.Tensor:
        known = inputs.of_example(real)
        return inputs.add(name_closed_over(real), real) if known is None else known

    log = ViewLog()
    storages = Storages(inputs, log)
    with ExitStack() as stack:
        stack.enter_context(recorder)
        tensors = [
            inputs.add(slot, example) for slot, example in zip(program.ins, program.examples, strict=True)
        ]
        stack.enter_context(log)
        lifting = Lifting(inputs, stand_in, log, storages)
        with lifting, _refusing_what_needs_data():
            outs = program.fn(*tensors)
        recorder.draws.check()
        outs = [stand_in(out) if isinstance(out, torch.Tensor) and is_real(out) else out for out in outs]
        metadata = Metadata.of(inputs, log, storages.passing())
        outputs = classify(outs, inputs, log, metadata.written)
        for idx, stand_in_ in inputs.row().enumerate():
            _refuse_write(stand_in_, reshaped=metadata.is_reshaped(idx))
        writes, rewinds = _forward_writes(inputs.row(), outputs, metadata, storages)
        node_tensors = outputs.tensors
        node_outs = Row[NodeOutIdx, NodeOut](
            NodeOut(slot, recipe_of(tensor), training and idx in outputs.with_history)
            for idx, (slot, tensor) in enumerate(zip(outputs.slots, node_tensors, strict=True))
        )
        for node_out, tensor in zip(node_outs, node_tensors, strict=True):
            if node_out.differentiable and tensor.is_leaf:
                raise _requires_grad_by_itself(node_out.slot)
        functions = custom_functions(
            [t for o, t in zip(node_outs, node_tensors, strict=True) if o.differentiable]
        )
        results = _value_results(recorder, node_outs, node_tensors)
        sizes, num_changes = storages.sizes(), len(log.changes)
        counters = [stand_in.writes() for stand_in in inputs.row()]
        grads: Mapping[PrimalIdx, torch.Tensor] = {}
        if training:
            row = inputs.row()
            wanted = [end for _, ends in metadata.gradient_ends(row) for end in ends]
            found = _backward(recorder, wanted, node_outs, node_tensors, lifting)
            grads = metadata.gradients(found, row)
        results += _grad_results(recorder, inputs.row(), grads)
        backward_writes, written = _backward_writes(recorder, inputs.row(), counters, metadata, storages)
        backward_storages = tuple(storages.resized_since(sizes))
        _refuse_changes_in_backward(inputs, log.changes[num_changes:])
    row = inputs.row()
    facts = Facts(
        inputs=writes,
        outputs=Row(outputs.facts),
        order=outputs.order,
        node_outs=node_outs,
        recipes=row.map(lambda stand_in: stand_in.recipe),
        grads=Row(recipe_of(grads[idx]) if idx in grads else None for idx in row.indices()),
        backward_writes=backward_writes,
        rewinds=rewinds,
        switched_on=metadata.switched_on,
        storages=tuple(sorted({*metadata.moved(inputs.row()), *storages.looked_at()})),
        backward_storages=backward_storages,
        functions=tuple(name for name in functions if name != NAMED),
    )
    seen = Program(program.fn, row.map(lambda s: s.slot), row.map(lambda s: s.example))
    return Traced(seen, recorder.graph(results + written), facts, recorder.fake_mode)


_ASKS_FOR_DATA = (
    "tracing tensor",
    "data is not allocated yet",
    ".numpy() is not supported",
    "FunctionalTensor.__format__",
)
"""How errors of PyTorch's say that a traced tensor has no data."""


@contextmanager
def _refusing_what_needs_data() -> Generator[None]:
    """An error that says "no data here" becomes ours, with the user's line."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, RuntimeError, TypeError) as error:
        asks_for_data = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
        if not asks_for_data and not any(text in str(error) for text in _ASKS_FOR_DATA):
            raise
        raise UnsupportedProgram(
            _needs_data(error),
            where=raised_at(error.__traceback__),
            stage="joint",
            fix="keep it a tensor (`torch.where` for a branch, a mask for a shape), or move "
            "that part out of the compiled function",
        ) from error


def _needs_data(error: Exception) -> str:
    match error:
        case DynamicOutputShapeException():
            return f"the shape of the result of `{error.func}` depends on data"
        case DataDependentOutputException():
            return f"`{error.func}` reads a tensor's data, which does not exist while the program is captured"
        case _:
            return "a tensor's value is needed (`.item()`, `.numpy()`, `if`) while the program is captured"


def _forward_writes(
    row: Row[PrimalIdx, StandIn], outputs: NodeOutputs, metadata: Metadata, storages: Storages
) -> tuple[Row[PrimalIdx, InputFact], tuple[tuple[PrimalIdx, int], ...]]:
    """What the forward did to each input; the new values become node outputs, those with history first.

    Returns:
        the facts, and how many of the counted writes of each input will be repeated; see `Facts.rewinds`.
    """
    for idx, stand_in in row.enumerate():
        if metadata.late_history(idx, stand_in):
            outputs.add_history(idx, stand_in)
    facts: list[InputFact] = [
        Untouched(metadata.bumps(idx, stand_in, written=False)) for idx, stand_in in row.enumerate()
    ]
    repeated = Counter({idx: metadata.repeated_bumps(idx, s) for idx, s in row.enumerate()}) + outputs.bumps
    # Where there is no room for an input, before or after, nothing is written; see `Change.grown`.
    written = [(idx, s) for idx, s in _written_by_name(row) if all(map(storages.holds, s.plains))]
    for differentiable in (True, False):
        for idx, stand_in in written:
            # A leaf written under `no_grad` still requires grad, but its new value has no history.
            if metadata.has_new_history(idx, stand_in) is differentiable:
                slot = Slot("write", stand_in.slot.path)
                tensor = metadata.as_before(idx, stand_in, history=differentiable)
                value = outputs.add(slot, tensor, history=differentiable)
                bumps = metadata.bumps(idx, stand_in, written=True)
                if differentiable:  # it is counted where it is written, after the region
                    bumps -= repeated.pop(idx, 0)
                facts[idx] = DataWritten(value, differentiable, bumps)
    return Row(facts), tuple(sorted((idx, count) for idx, count in repeated.items() if count))


def _written_by_name(row: Row[PrimalIdx, StandIn]) -> list[tuple[PrimalIdx, StandIn]]:
    """The inputs to copy new values into.

    Of several that lie in a span, those that were written themselves: the others see it. If none was (all was
    done behind autograd's back, by `.data`), then all of them.
    """
    written = [(idx, s) for idx, s in row.enumerate() if any(s.writes()) and not s.derived]
    seen = {span for _, stand_in in written if stand_in.bumps() for span in stand_in.spans}
    return [(idx, s) for idx, s in written if s.bumps() or s.spans.isdisjoint(seen)]


def _refuse_write(stand_in: StandIn, *, reshaped: bool) -> None:
    if stand_in.leaf.is_leaf and stand_in.leaf.grad is not None:
        raise UnsupportedProgram(
            f"`{stand_in.slot}` gets its `.grad` inside of the compiled function",
            stage="joint",
            fix="call `backward()` outside, or use `torch.autograd.grad` inside",
        )
    for (_, leaf), plain in zip(leaves(stand_in.recipe), stand_in.plains, strict=True):
        # `out=` gives an empty tensor another size, and no counter tells.
        resized = data_writes(plain) and functional_value(plain).size() != leaf.size
        if storage_changes(plain) or (not reshaped and (resized or metadata_written(plain))):
            raise refuse(stand_in, "in a way that is not repeated outside")


def _value_results(
    recorder: Recorder, node_outs: Row[NodeOutIdx, NodeOut], tensors: Sequence[torch.Tensor]
) -> list[Result]:
    results: list[Result] = []
    for node_out, tensor in zip(node_outs, tensors, strict=True):
        slot = node_out.slot
        for (inner, _), plain in zip(leaves(node_out.recipe), plain_tensors(tensor), strict=True):
            results.append((Slot(slot.role, slot.path, inner), recorder.value(plain)))
    return results


def _backward(
    recorder: Recorder,
    wanted: Sequence[torch.Tensor | GradientEdge],
    node_outs: Row[NodeOutIdx, NodeOut],
    tensors: Sequence[torch.Tensor],
    lifting: Lifting,
) -> list[torch.Tensor | None]:
    """Run autograd; the gradients of the leaves that are `wanted`, in their order."""
    recorder.phase = "backward"
    differentiable = [(out, t) for out, t in zip(node_outs, tensors, strict=True) if out.differentiable]
    if not differentiable:
        return [None] * len(wanted)
    if not wanted:
        raise _requires_grad_by_itself(differentiable[0][0].slot)
    tangents = [_tangent(recorder, out, tensor) for out, tensor in differentiable]
    with autocast_off(), lifting, _refusing_what_needs_data():
        try:
            return list(run_backward([tensor for _, tensor in differentiable], wanted, tangents))
        except NotImplementedError as error:
            raise UnsupportedProgram(
                f"the program has no backward, in eager neither ({error})",
                stage="joint",
                fix="call it under `torch.no_grad()`, or on tensors that do not require grad",
            ) from error
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                raise _written_too_early(error) from error
            if "returned an invalid gradient" in str(error):
                raise _reshaped_unseen(error) from error
            raise


def _requires_grad_by_itself(slot: Slot) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"`{slot}` requires grad, and no input of the program that does leads to it",
        stage="joint",
        fix="call `requires_grad_()` on the result outside, or pass the tensor that is to get the gradient",
    )


def _written_too_early(error: RuntimeError) -> UnsupportedProgram:
    return UnsupportedProgram(
        "the backward of the program fails, as in eager: a tensor that it needs was written in place after "
        f"its use ({str(error).partition('Hint')[0].strip()})",
        stage="joint",
        fix="write a clone, or write before the use; call it under `torch.no_grad()` if it has no backward",
    )


def _reshaped_unseen(error: RuntimeError) -> UnsupportedProgram:
    return UnsupportedProgram(
        "a tensor with history has its sizes written in place under `no_grad`, so that the gradient does not "
        f"fit any more ({error})",
        stage="joint",
        fix="use the function that is not in place (`t` for `t_`), or write with grad mode on",
    )


def _tangent(recorder: Recorder, out: NodeOut, like: torch.Tensor) -> torch.Tensor:
    recipe = tangent_recipe(out.recipe)
    plains = [
        recorder.argument(Slot("tangent", out.slot.path, inner), recorder.fake_like(plain, device))
        for (inner, plain), device in zip(leaves(recipe), _devices(like), strict=True)
    ]
    return rebuild(recipe, plains)


def _devices(tensor: torch.Tensor) -> list[torch.device]:
    return [plain.device for plain in plain_tensors(tensor)]


def _grad_results(
    recorder: Recorder, row: Row[PrimalIdx, StandIn], grads: Mapping[PrimalIdx, torch.Tensor]
) -> list[Result]:
    results: list[Result] = []
    for idx, grad in grads.items():
        for (inner, _), plain in zip(leaves(recipe_of(grad)), plain_tensors(grad), strict=True):
            results.append((Slot("grad", row[idx].slot.path, inner), recorder.value(plain)))
    return results


def _backward_writes(
    recorder: Recorder,
    row: Row[PrimalIdx, StandIn],
    before: Sequence[tuple[int, ...]],
    metadata: Metadata,
    storages: Storages,
) -> tuple[tuple[BackwardWrite, ...], list[Result]]:
    """Inputs that the backward wrote, and their new values."""
    writes: list[BackwardWrite] = []
    results: list[Result] = []
    # An input that the backward was the first to touch has no count from before: nothing was written then.
    padded = [*before, *[()] * (len(row) - len(before))]
    for idx, stand_in in row.enumerate():
        counts = stand_in.writes()
        if stand_in.derived or counts == (padded[idx] or (0,) * len(counts)):
            continue
        if not all(map(storages.has_room, stand_in.plains)):
            continue
        writes.append(BackwardWrite(idx))
        plains = metadata.plains_as_before(idx, stand_in)
        for (inner, _), plain in zip(leaves(stand_in.recipe), plains, strict=True):
            results.append((Slot("backward_write", stand_in.slot.path, inner), recorder.value(plain)))
    return tuple(writes), results


def _refuse_changes_in_backward(inputs: Inputs, changes: Sequence[Change]) -> None:
    for change in changes:
        idx = inputs.index_of(change.tensor)
        if idx is not None and change.reshapes() and change.op is not resize_storage:
            raise refuse(inputs.row()[idx], "by the backward")
