"""From a call to its trace: decides about synthetic bases, symbols, and what the program leaves in Python.

`trace_call` traces the user's program again for as long as a trace contradicts the assumptions it was made
under.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from aotdist.capture.arguments import fakes_of
from aotdist.capture.assignments import Assignments
from aotdist.capture.capture import capture
from aotdist.capture.captured import Captured, Returned
from aotdist.capture.source import Source, Spot
from aotdist.capture.watched import assign
from aotdist.convention import bases as synthetic_base
from aotdist.convention import dedupe
from aotdist.convention.bases import NO_BASES, BasePlan
from aotdist.convention.needed_bases import Writes, plan_bases
from aotdist.equivalence import is_same_program, is_same_with_symbols
from aotdist.errors import AotdistError, InternalError, UnsupportedProgram
from aotdist.job import Job, dims_of, record_options, refuse_fakes
from aotdist.origins import raised_at
from aotdist.program import DistinctIdx, Program, Row, Slot
from aotdist.report.progress import StageTimes
from aotdist.sizes import concrete, numbers_of_data
from aotdist.torch_seam.control_flow import fast_paths_on
from aotdist.torch_seam.functional import UnsupportedOperatorException
from aotdist.torch_seam.modes import class_functions_off, users_modes_off
from aotdist.torch_seam.modules import own_attributes
from aotdist.torch_seam.symbols import hint, symbols_in
from aotdist.trace.context import TraceOptions
from aotdist.trace.failures import asks_for_data, is_of_the_program
from aotdist.trace.recorder import Recorder
from aotdist.trace.trace import Traced, trace
from aotdist.trace.tracer import NotInstantiable

_Inputs: TypeAlias = tuple[Row[DistinctIdx, Slot], Row[DistinctIdx, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The assumptions of a trace. If it contradicts one, the program is traced again without that one.

    Args:
        symbolic: requested sizes can be symbols. Many of PyTorch's operators (linear algebra, Fourier
            transforms, losses) take none.
        bases: which inputs share memory, one of them written.
        writes: the writes that earlier traces showed, from which bases are planned.
        inputs: the distinct inputs, with the closed-over tensors that earlier traces used.
        of_data: the refusal because of which sizes and numbers may now depend on data; None while none may.
        of_libraries: whole numbers that libraries read off inputs can be symbols, where `of_data`.
        failure: the error of a trace with symbols because of which sizes are numbers; None if there was none.
        instances: equal blocks can be copied.
    """

    symbolic: bool
    bases: BasePlan = NO_BASES
    writes: Writes = Writes()
    inputs: _Inputs | None = None
    of_data: UnsupportedProgram | None = None
    of_libraries: bool = True
    failure: Exception | None = None
    instances: bool = True

    def after(self, job: Job, traced: Traced) -> Assumptions:
        """With the inputs and writes that a trace showed; if the bases differ, another trace is needed."""
        inputs = _distinct(traced, self.bases, self.inputs)
        program = Program(job.call.run, *inputs)
        writes = self.writes.and_of(program, traced.facts, self.bases)
        symbolic = bool(tuple(traced.symbols))
        return replace(
            self, symbolic=symbolic, inputs=inputs, writes=writes, bases=plan_bases(program, writes)
        )

    def without(self, error: Exception, *, has_symbols: bool) -> Assumptions | None:
        """Without the assumption that an error of a trace contradicts; None if it contradicts none."""
        if self.instances and _comes_of(error, NotInstantiable):
            return replace(self, instances=False)
        # Without symbols, PyTorch's fake tensors run an operator that has no fake on real tensors.
        lacks_fake = isinstance(error.__cause__, UnsupportedOperatorException)
        if has_symbols and (lacks_fake or not isinstance(error, AotdistError)):
            return replace(self, symbolic=False, failure=error, of_data=None)
        if isinstance(error, UnsupportedProgram) and self.of_data is None and asks_for_data(error):
            return replace(self, of_data=error)
        needs_number = isinstance(error, UnsupportedProgram) or not is_of_the_program(error)
        if self.of_data is not None and self.of_libraries and needs_number:
            return replace(self, of_libraries=False)
        return None


def _comes_of(error: BaseException | None, kind: type[Exception]) -> bool:
    """Whether an error, or one that led to it, is of this kind."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call, and its trace.

    Args:
        captured: the call as a program of flat tensors.
        deduped: which of these are the same.
        traced: the trace.
        bases: which of its inputs share memory.
        before: the assignments of the trace, which can be undone.
    """

    captured: Captured
    deduped: dedupe.DedupePlan
    traced: Traced
    bases: BasePlan
    before: Assignments

    def returned(self) -> Returned:
        """The structure of its result, and its effects in Python."""
        return Returned.of(self.traced.facts)


def trace_call(job: Job, times: StageTimes, on_failure: ExitStack) -> TracedCall:
    """Trace the program, and again if its changes in Python would make the trace fit this call only.

    The second trace has symbols for numbers that the program counts, or starts from the state after this
    call: flags that say that something was set up, objects that are made once. If that is another program,
    the first trace is kept, for calls in the same state; if the program stored an object, for this call
    only. Other threads see what it assigns to modules only afterwards.

    Args:
        job: what to trace.
        times: records how long it takes.
        on_failure: closed if a later stage fails; it then undoes assignments.
    """
    with own_attributes():
        return _trace_call(job, times, on_failure)


def _trace_call(job: Job, times: StageTimes, on_failure: ExitStack) -> TracedCall:
    traced_call = _trace(job, times)
    returned = traced_call.returned()
    counts = [*returned.counts(), *traced_call.captured.in_backward.counts_of_whole()]

    def tried(more: Job) -> bool:
        nonlocal job, traced_call
        before, traced_call = traced_call, _with_symbols(more, times, traced_call)
        job = job if traced_call is before else more
        return job is more

    if job.symbolic and (counts or returned.counted):
        tried(job.with_numbers([*counts, *returned.counted]))
    if job.symbolic and job.call.guessed:
        tried(replace(job, opens=True))
    varying = job.call.varying
    if job.symbolic and job.lacks(varying) and not tried(job.with_numbers(varying)):
        for number in varying if len(varying) > 1 else ():  # some of them
            tried(job.with_numbers([number]))
    leaves = traced_call.before.left()
    flags = {place.spot() for place, _ in _flags(job, traced_call)}
    if not returned.log.deleted() and job.set_up.isdisjoint(flags) and (leaves is not None or flags):
        later = _set_up(job, times, traced_call, on_failure)
        if later is not None:
            return later
    traced_call.before.roll_back()  # the call itself runs next, from the state before
    return replace(traced_call, captured=replace(traced_call.captured, leaves=leaves))


def _flags(job: Job, traced_call: TracedCall) -> list[tuple[Source, Any]]:
    """The constants that the program assigns, without those that are symbols or depend on data."""
    counts = {place.spot() for place in job.counts}
    constants = traced_call.returned().constants()
    return [(place, v) for place, v in constants if place.spot() not in counts and not numbers_of_data(v)]


def _with_symbols(job: Job, times: StageTimes, traced_call: TracedCall) -> TracedCall:
    """The trace with more symbols; `traced_call` if the program needs numbers (for keys, or in texts).

    Objects that the program makes once stay those of the first trace, which contain numbers.
    """
    bring_back = traced_call.before.left()
    traced_call.before.roll_back()
    chosen = traced_call
    try:
        symbolic = _trace(job, times)
        symbolic.before.roll_back()
        varying = {place.spot() for place in job.call.varying if isinstance(place, Source)}
        chosen = symbolic if _is_equivalent(symbolic, traced_call, varying) else traced_call
    except UnsupportedProgram:
        pass
    if bring_back is not None:
        bring_back()
    return chosen


def _is_equivalent(symbolic: TracedCall, traced_call: TracedCall, varying: Collection[Spot]) -> bool:
    """Whether a trace with symbols is of the same program, and computes as Python does with numbers.

    Args:
        symbolic: the trace with symbols.
        traced_call: the one without.
        varying: spots of numbers that have to stay symbols, besides those among the arguments.
    """
    counts = symbolic.traced.symbols.counts()
    open_ = (count for count in counts if count.is_given or count.place.spot() in varying)
    return (
        not _depends_on_other_backwards(symbolic)
        and all(symbols_in(count.symbol) for count in open_)
        and is_same_with_symbols(symbolic.traced, traced_call.traced)
    )


def _depends_on_other_backwards(call: TracedCall) -> bool:
    """Whether the backward computes with, or decides by, numbers that another backward may have changed."""
    traced, theirs = call.traced, call.captured.in_backward.symbols.keys()
    used = {name for size in traced.graph.named_sizes().values() for name in symbols_in(size.meta["val"])}
    return not theirs.isdisjoint(used) or traced.symbols.decides_by(theirs)


def _set_up(job: Job, times: StageTimes, traced_call: TracedCall, on_failure: ExitStack) -> TracedCall | None:
    """The trace from the state that this call leaves, if it is of the same program; None if not."""
    with ExitStack() as otherwise:
        symbols = traced_call.traced.symbols
        every = [*symbols, *(count.symbol for count in symbols.counts())]
        numbers = {name: hint(symbol) for symbol in every for name in symbols_in(symbol)}
        flags = [(place, concrete(value, numbers)) for place, value in _flags(job, traced_call)]
        otherwise.callback(assign(flags))
        try:
            later = _trace(job, times)
            moves = later.before.moves()
            later.before.roll_back()
            if moves or _flags(job, later) or not is_same_program(later.traced, traced_call.traced):
                return None
        except InternalError:
            raise
        except Exception:  # the program's own: it may refuse to be called twice
            return None
        on_failure.push(otherwise.pop_all())
        set_up = frozenset(place.spot() for place, _ in flags)
        return replace(later, captured=replace(later.captured, set_up=set_up))


def traced_by_itself(job: Job) -> TracedCall:
    """A trace for analysis only, whatever modes are on; its changes in Python are undone."""
    with class_functions_off(), users_modes_off(), own_attributes():
        traced_call = _trace(job, StageTimes())
        traced_call.before.roll_back()
        return traced_call


def _trace(job: Job, times: StageTimes) -> TracedCall:
    """Trace the program, and again as long as a trace contradicts its assumptions.

    Raises:
        UnsupportedProgram: also if the job is of no use without symbols, and there can be none.
    """
    assumed = Assumptions(job.symbolic)
    while True:
        traced_call = _trace_once(job, times, assumed)
        if isinstance(traced_call, Assumptions):
            assumed = traced_call
            if job.needs_symbols() and assumed.failure is not None:
                raise UnsupportedProgram("no number can be a symbol", stage="joint") from assumed.failure
            continue
        needed = assumed.after(job, traced_call.traced)
        if needed.bases == assumed.bases:
            if assumed.failure is not None:
                _warn_of_numbers(traced_call.captured.name, assumed.failure)
            return traced_call
        traced_call.before.roll_back()
        assumed = needed


def _warn_of_numbers(name: str, failure: Exception) -> None:
    where = failure.where if isinstance(failure, AotdistError) else raised_at(failure.__traceback__)
    reason = str(failure).partition("\n")[0] + (f", at {where}" if where else "")
    warnings.warn(
        f"aotdist: `{name}` is compiled for the sizes at hand, and again for others: a trace with symbolic "
        f"ones fails ({reason}); move that out of what is compiled, or run calls of many sizes as they were "
        "written: `aotdist.disable()`",
        stacklevel=2,
    )


def _trace_once(job: Job, times: StageTimes, assumed: Assumptions) -> TracedCall | Assumptions:
    """Capture the call and trace it; if the trace contradicts an assumption, return those without it.

    Args:
        job: the call, and how to compile it.
        times: records how long it takes.
        assumed: the assumptions of the trace.
    """
    with ExitStack() as otherwise, ExitStack() as scope:
        with times.stage("capture"):
            captured = capture(job.call, job.settings, scope, job.counted)
            counts = (*job.counts, *captured.arguments.counts())
            captured.in_backward.counts = job.counts
            before = captured.environment.assignments()
            otherwise.callback(before.roll_back)
            distinct, deduped = dedupe.lower(captured.program)
            distinct = _with_inputs(distinct, assumed.inputs)
            program = synthetic_base.lower(distinct, assumed.bases)
        with times.stage("trace"):
            dims = dims_of(job, captured) if assumed.symbolic else {}
            paths = (slot.path for slot in program.ins)
            fakes = fakes_of(zip(paths, program.examples, strict=True), captured.all_closed_over)
            refuse_fakes(program, job.backend)
            recorder = Recorder(
                record_options(job.backend, job.settings),
                symbolic=bool(dims or counts),
                of_data=assumed.of_data is not None,
                fakes=fakes,
                finds_out=job.finds_out,
            )
            recorder.data_guards.takes_numbers = not assumed.of_libraries
            times.num_nodes = recorder.num_nodes
            recorder.draws.allow(captured.environment.reached.generators)
            if job.backend.name == "fx" and not dims:  # compilers fuse the other path's operators
                scope.enter_context(fast_paths_on())
            try:
                options = TraceOptions(
                    training=not captured.ambient.inference,
                    bases=assumed.bases,
                    dims=dims,
                    counts=counts,
                    cuts=captured.ambient.grad,
                    may_run_later=not captured.environment.rules,
                    in_python=captured.in_backward,
                    instantiate=job.settings.instantiate and assumed.instances,
                )
                traced = trace(program, recorder, options, name_closed_over=captured.name_closed_over)
            except Exception as error:
                instead = assumed.without(error, has_symbols=bool(dims or counts))
                if instead is not None:
                    scope.__exit__(type(error), error, error.__traceback__)  # what is dropped has failed
                    return instead
                if assumed.of_data is None or isinstance(error, AotdistError) or is_of_the_program(error):
                    raise
                raise assumed.of_data from None  # an error of PyTorch's, which needs a number
        otherwise.pop_all()  # nothing is undone
    captured.in_backward.close()
    if traced.later_backwards is not None:
        traced.later_backwards.find_at(captured.sources(traced.program.examples))
    return TracedCall(captured, deduped, traced, assumed.bases, before)


def _distinct(traced: Traced, bases: BasePlan, known: _Inputs | None) -> _Inputs:
    """The distinct tensors of the call: those known before, and closed-over ones that the trace used."""
    slots, examples = (Row[DistinctIdx, Slot](), Row[DistinctIdx, torch.Tensor]()) if known is None else known
    seen = {id(example) for example in examples}
    program = traced.program
    more = [at for at, ex in program.examples.enumerate() if id(ex) not in seen and not bases.is_new(at)]
    return Row([*slots, *(program.ins[at] for at in more)]), Row(
        [*examples, *(program.examples[at] for at in more)]
    )


def _with_inputs(program: Program[DistinctIdx], inputs: _Inputs | None) -> Program[DistinctIdx]:
    """`program` with further inputs, which it reads by itself."""
    if inputs is None:
        return program
    count = len(program.ins)
    return Program(lambda *distinct: program.fn(*distinct[:count]), *inputs)
