"""Programs lowered by hand, one step of the calling convention after the other, each with its plan.

The facts come from one trace of the program; nothing is compiled. What is lowered here is in a graph what the
trace records: a plan that leads back from one leads back from the other.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from aotdist.aliasing.overwrite import rewind
from aotdist.aliasing.view_log import ViewLog, look_inside
from aotdist.aliasing.view_mode import ViewMode
from aotdist.aliasing.views import Opened
from aotdist.convention.epilogue import plan_epilogue, replay
from aotdist.convention.mutation import plan_differentiable, plan_plain
from aotdist.convention.rng import SLOTS, RngPlan, Stream, draws_nothing, functional_draw
from aotdist.convention.subclass import plan_unwrap, rebuild_all
from aotdist.facts import (
    Facts,
    Fresh,
    FunctionView,
    Keep,
    Kept,
    MetadataWrite,
    OutputFact,
    Place,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
    ViewStep,
)
from aotdist.program import Call, NodeOutIdx, OutIdx, PlainIdx, PrimalIdx, Program, Row, Slot
from aotdist.subclasses.protocol import leaves, plain_tensors
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.modes import TorchDispatchMode
from aotdist.torch_seam.operators import OpOverload, is_operator
from aotdist.trace.context import TraceOptions
from aotdist.trace.recorder import Recorder, RecordOptions
from aotdist.trace.trace import trace

ATEN = torch.ops.aten


def program_of(fn: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Program[PrimalIdx]:
    """`fn`, which takes tensors and returns a list, as a program."""
    slots = Row[PrimalIdx, Slot](Slot("primal", f"args[{k}]") for k in range(len(tensors)))
    return Program(lambda *args: list(fn(*args)), slots, Row(tensors))


def facts_of(program: Program[PrimalIdx], *, training: bool = True) -> Facts:
    """What one trace of `program` shows.

    Raises:
        UnsupportedProgram: it cannot be traced.
    """

    def name_closed_over(real: torch.Tensor) -> Slot:
        raise AssertionError(f"the program closes over {real}")

    with torch.set_grad_enabled(training):
        options = TraceOptions(training=training)
        return trace(program, Recorder(RecordOptions()), options, name_closed_over=name_closed_over).facts


def call_of(program: Program[Any]) -> Call:
    """A program's function, taking its arguments as one sequence."""
    return lambda args: list(program.fn(*args))


class Plan(Protocol):
    """Undoes a lowering at run time."""

    def lift(self, call: Call) -> Call:
        """`call` speaks the inner convention; the result speaks the outer one."""
        ...


Lower: TypeAlias = Callable[[Program[Any], Facts], tuple[Program[Any], Plan]]
"""The simpler program, and the plan that leads back from it."""


def lower_epilogue(program: Program[PrimalIdx], facts: Facts) -> tuple[Program[PrimalIdx], Plan]:
    """The inner program returns one tensor for each fresh output and each base of a view.

    It writes the metadata of other names for the same tensors.
    """
    holders, changed = _holders(facts), facts.reshaped()

    def fn(*inputs: Any) -> list[Any]:
        primals = [p.view_as(p) if PrimalIdx(k) in changed else p for k, p in enumerate(inputs)]
        given = list(map(Opened.of, primals))
        log = ViewLog()
        with ViewMode(log):
            outs = program.fn(*primals)
        look_inside(log, outs, given)
        return [held(log, outs, primals) for held in holders]

    return Program(fn, program.ins, program.examples), plan_epilogue(facts)


def lower_differentiable(program: Program[PrimalIdx], facts: Facts) -> tuple[Program[PrimalIdx], Plan]:
    """The inner program leaves inputs written with history alone and returns their new values at the end.

    What it writes without history, it does not count, where the input has a history.
    """
    plan = plan_differentiable(program, facts)

    def fn(*primals: Any) -> list[Any]:
        own = list(primals)
        for idx, _, _ in plan.writes:
            own[idx] = primals[idx].clone()
        outs = program.fn(*own)
        for idx, bumps in plan.counted:
            rewind(primals[idx], bumps)
        return [*outs, *(own[idx] for idx, _, _ in plan.writes)]

    return Program(fn, program.ins, program.examples), plan


def lower_unwrap(program: Program[PrimalIdx], facts: Facts) -> tuple[Program[PlainIdx], Plan]:
    """The inner program takes and returns plain tensors."""

    def fn(*plains: Any) -> list[Any]:
        results = program.fn(*rebuild_all(facts.recipes, plains))
        return [plain for result in results for plain in plain_tensors(result)]

    slots = [
        Slot("primal", slot.path, inner)
        for slot, recipe in zip(program.ins, facts.recipes, strict=True)
        for inner, _ in leaves(recipe)
    ]
    examples = [plain for example in program.examples for plain in plain_tensors(example)]
    return Program(fn, Row(slots), Row(examples)), plan_unwrap(facts)


def lower_plain(outer: Program[PrimalIdx]) -> Lower:
    """The inner program writes none of its inputs and returns the new values after its results.

    Args:
        outer: the program whose wrappers are taken apart by now.
    """

    def lower(program: Program[PlainIdx], facts: Facts) -> tuple[Program[PlainIdx], Plan]:
        plan = plan_plain(outer, facts)

        def fn(*plains: Any) -> list[Any]:
            own = list(plains)
            for idx, _, _ in plan.writes:
                own[idx] = plains[idx].detach().clone()
            results = program.fn(*own)
            return [*results, *(own[idx] for idx, _, _ in plan.writes)]

        return Program(fn, program.ins, program.examples), plan

    return lower


def lower_rng(program: Program[PlainIdx], device: torch.device) -> tuple[Program[PlainIdx], Plan]:
    """The inner program takes a seed and an offset after its other inputs, and draws from these."""

    def fn(*plains: Any) -> list[Any]:
        *inputs, seed, offset = plains
        with Drawing(Stream(lambda: (seed, offset))):
            return program.fn(*inputs)

    zero = torch.zeros((), dtype=torch.int64, device=device)
    slots, examples = Row([*program.ins, *SLOTS]), Row([*program.examples, zero, zero])
    return Program(fn, slots, examples), RngPlan(device)


OUTSIDE: tuple[Lower, ...] = (lower_epilogue, lower_differentiable)
"""The steps outside of the autograd node."""


ATEN = torch.ops.aten
IN_PLACE: Mapping[OpOverload, OpOverload] = {
    ATEN.bernoulli_.float: ATEN.bernoulli.p,
    ATEN.bernoulli_.Tensor: ATEN.bernoulli.Tensor,
    ATEN.cauchy_.default: ATEN.cauchy.default,
    ATEN.exponential_.default: ATEN.exponential.default,
    ATEN.geometric_.default: ATEN.geometric.default,
    ATEN.log_normal_.default: ATEN.log_normal.default,
    ATEN.normal_.default: ATEN.normal_functional.default,
    ATEN.random_.default: ATEN.random.default,
    getattr(ATEN.random_, "from"): getattr(ATEN.random, "from"),
    ATEN.random_.to: ATEN.random.to,
    ATEN.uniform_.default: ATEN.uniform.default,
}
"""Operators that fill a tensor; in a trace they are functional by then."""


class Drawing(TorchDispatchMode):
    """Random operators draw from a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not is_operator(func) or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        with FakeTensorMode(allow_non_fake_inputs=True):
            like = func(*args, **kwargs)
        if func not in IN_PLACE:
            return functional_draw(func, args, kwargs, self._stream, like)
        return args[0].copy_(functional_draw(IN_PLACE[func], args, kwargs, self._stream, like))


_Held: TypeAlias = Callable[[ViewLog, Sequence[Any], Sequence[Any]], Any]
"""Finds the tensor that the region returns as one of its values, given the outputs and the inputs."""


def _holders(facts: Facts) -> list[_Held]:
    """How to find each value: as an output, as the base of one, or as what a write of metadata speaks of."""
    found: dict[NodeOutIdx, _Held] = {}
    for idx, fact in facts.outputs.enumerate():
        _add_of_output(found, idx, fact)
    kept = {item.number: item.place for item in facts.order if isinstance(item, Keep)}
    for write in facts.metadata_writes():
        _add_of_write(found, write, kept)
    return [found[NodeOutIdx(position)] for position in range(len(found))]


def _add_of_output(found: dict[NodeOutIdx, _Held], idx: OutIdx, fact: OutputFact) -> None:
    if isinstance(fact, Fresh):
        found[fact.value] = functools.partial(_output, idx)
    if isinstance(fact, ViewOfIntermediate):
        found.setdefault(fact.base, functools.partial(_base_of_output, idx))
    if isinstance(fact, (ViewOfInput, ViewOfIntermediate, ViewOfOutput)):
        views: list[ViewStep] = []
        number = itertools.count()
        for step in fact.steps:
            views = [*views, *(step.steps if isinstance(step, FunctionView) else (step,))]
            if isinstance(step, FunctionView):
                found.setdefault(step.value, functools.partial(_from_function, idx, next(number), views))


def _add_of_write(found: dict[NodeOutIdx, _Held], write: MetadataWrite, kept: Mapping[int, Place]) -> None:
    for position, given in enumerate(write.args):
        arg = kept[given.number] if isinstance(given, Kept) else given
        if isinstance(arg, Fresh):
            found.setdefault(arg.value, functools.partial(_source, write.number, position))
        elif isinstance(arg, ViewOfIntermediate):
            found.setdefault(arg.base, functools.partial(_source, write.number, position))
    if write.data is not None:
        found.setdefault(write.data, functools.partial(_grown, write.number))


def _output(idx: OutIdx, log: ViewLog, outs: Sequence[Any], _: Sequence[Any]) -> torch.Tensor:
    return outs[idx]


def _base_of_output(idx: OutIdx, log: ViewLog, outs: Sequence[Any], _: Sequence[Any]) -> torch.Tensor:
    return log.root(outs[idx], set(map(id, outs))).base


def _from_function(
    idx: OutIdx, number: int, steps: Sequence[ViewStep], log: ViewLog, outs: Sequence[Any], _: Sequence[Any]
) -> torch.Tensor:
    root = log.root(outs[idx], set(map(id, outs)))
    # Where nothing has a history, nothing tells what a function made: the view is made again.
    value = root.made[number].tensor if root.made else replay(root.base, steps, (), {})
    return value.clone()  # the view that is made of it knows whose memory it shows; the value is the numbers


def _source(number: int, position: int, log: ViewLog, *_: Sequence[Any]) -> torch.Tensor:
    return log.root(log.changes[number].args[position], ()).base


def _grown(number: int, log: ViewLog, *_: Sequence[Any]) -> torch.Tensor:
    grown = log.changes[number].grown
    assert grown is not None, "it grew in the trace"
    return grown
