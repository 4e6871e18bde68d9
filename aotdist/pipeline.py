"""The stages, in order: `_compile` reads from top to bottom."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from aotdist.capture.alone import alone, capturing
from aotdist.capture.capture import Captured, Returned, UserCall, capture
from aotdist.capture.constants import is_constant, same_constant
from aotdist.capture.fakes import fakes_of
from aotdist.capture.reassign import Reassignments
from aotdist.capture.source import Source
from aotdist.codegen.contract import Backend, BoxedCall, Decompositions
from aotdist.codegen.decompose import decompose
from aotdist.codegen.emit import Emitter
from aotdist.codegen.graph_copy import copied
from aotdist.convention import dedupe, synthetic_base
from aotdist.convention.sharing import Writes, plan_bases
from aotdist.convention.stack import Plans, lower_all
from aotdist.convention.synthetic_base import NO_BASES, BasePlan
from aotdist.errors import AotdistError, BadSettings
from aotdist.facts import Facts, NotATensor
from aotdist.joint.proxies import Recorder
from aotdist.joint.strided import LooksAround
from aotdist.joint.trace import Traced, trace
from aotdist.partition.again import Again, as_function, gradients, plan_again
from aotdist.partition.builder import collector_paused
from aotdist.partition.choices import without_choices
from aotdist.partition.gates import linked, plan_gates
from aotdist.partition.policy import partition
from aotdist.partition.reduced import without_tangents
from aotdist.passes.linear_losses import WHOLE
from aotdist.passes.run import PassRecord, run_passes
from aotdist.program import GRADIENT_ROLES, DistinctIdx, Graph, PrimalIdx, Program, Row, Slot, Split
from aotdist.report.logs import log_compiled, log_stage
from aotdist.report.progress import Progress, showing
from aotdist.runtime.artifact import Artifact, call_fitting, fit_of, load, refuse_overlap
from aotdist.runtime.backward import Part
from aotdist.runtime.compilation import Compilation, Inference, Training
from aotdist.runtime.derive import Derive
from aotdist.runtime.on_demand import OnDemand
from aotdist.runtime.plan import NodePlan, node_plan
from aotdist.runtime.print_call import MISS
from aotdist.runtime.proof import prove_guards
from aotdist.runtime.ranks import agree, failing_together
from aotdist.settings import Settings
from aotdist.subclasses.protocol import process_groups
from aotdist.torch_seam import (
    autocast_off,
    autocast_only,
    class_functions_off,
    hint,
    is_fake,
    pytree,
    quiet_fakes,
    users_modes_off,
)


@dataclass(slots=True)
class StageTimes:
    """Seconds of each stage, in the order in which they ran.

    Args:
        seconds: of each.
        progress: told which stage runs, for somebody who waits for it.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    progress: Progress | None = None

    def counting(self, num_nodes: Callable[[], int]) -> None:
        """Let the progress line count nodes by `num_nodes`."""
        if self.progress is not None:
            self.progress.num_nodes = num_nodes

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Add the time spent inside to stage `name`."""
        if self.progress is not None:
            self.progress.stage = name
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            if self.progress is not None:
                log_stage(self.progress.name, name, seconds, self.progress.num_nodes)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is compiled, and how; see `compile_call`."""

    call: UserCall
    backend: Backend
    settings: Settings
    symbolic: bool = True
    counts: tuple[Source, ...] = ()


def compile_call(
    call: UserCall,
    backend: Backend,
    settings: Settings,
    *,
    earlier: Sequence[Artifact] = (),
    symbolic: bool = True,
) -> Artifact:
    """Compile one call of the user's function.

    Args:
        call: the call.
        backend: turns graphs into callables.
        settings: how to compile.
        earlier: artifacts for other calls of the same function.
        symbolic: try symbolic sizes, if the call, settings or marks ask for them.

    Raises:
        UnsupportedProgram: the program cannot be compiled ahead of time.
        BadSettings: the backend lacks something, or a setting names nothing.
        RankDivergence: the ranks compiled different sequences of collectives.
        RankLost: another rank failed to compile, or did not come to compare.
    """
    with alone(), class_functions_off():
        job = _Job(call, backend, settings, symbolic)
        return loaded_together(call.name, settings, lambda: _compile(job), earlier)


def compilation_of(call: UserCall, backend: Backend, settings: Settings) -> Compilation:
    """Compile one call for others to load: other ranks are not asked, and nothing is loaded here.

    Raises:
        UnsupportedProgram: the program cannot be compiled ahead of time.
        BadSettings: the backend lacks something, or a setting names nothing.
    """
    with alone(), class_functions_off(), collector_paused():
        compilation = _compile(_Job(call, backend, settings))
        refuse_overlap(fit_of(compilation))
    return compilation


def loaded_together(
    label: str, settings: Settings, made: Callable[[], Compilation], earlier: Sequence[Artifact] = ()
) -> Artifact:
    """Load what `made` makes on each rank, when all have made theirs and agree on it.

    Args:
        label: what is compiled, for messages.
        settings: how.
        made: compiles it, or reads what was compiled before.
        earlier: artifacts for other calls of the same function.

    Raises:
        RankDivergence: the ranks have different sequences of collectives.
        RankLost: another rank failed, or did not come to compare.
    """
    # A trace makes a million small objects and no garbage to speak of: looking for some doubles its time.
    with failing_together(label), collector_paused():
        compilation = made()
        fit = fit_of(compilation)
        refuse_overlap(fit)
        if settings.validate_guards:
            prove_guards(fit.sizes, fit.symbols())
    agree(
        compilation.collectives(),
        label=label,
        settings=settings,
        groups=process_groups(compilation.traced.facts.recipes),
        earlier=[artifact.compilation.collectives() for artifact in earlier],
    )
    artifact = load(compilation, fit)
    log_compiled(artifact)
    return artifact


def _compile(job: _Job) -> Compilation:
    with showing(job.call.name) as progress, users_modes_off():
        return _compile_timed(job, StageTimes(progress=progress))


def _compile_timed(job: _Job, times: StageTimes) -> Compilation:
    backend, settings = job.backend, job.settings
    backend.check()
    with capturing():
        captured, deduped, traced, bases = _trace_counting(job, times)
    with times.stage("convention"):
        _, plans = lower_all(traced.program, traced.facts, drawn_on=drawn_on(traced.graph))
    emitter = Emitter(backend, captured.static_slots(), traced.fake_mode, settings, captured.name)
    with times.stage("passes"):
        times.counting(lambda: len(traced.graph.gm.graph.nodes))
        joint, records = _joint_passes(traced.graph, backend, settings)
    if traced.has_backward():
        region, more = _compile_training(joint, traced, plans, emitter, times)
    else:
        region, more = _compile_inference(joint, emitter, times)
    return Compilation(
        captured=captured,
        deduped=deduped,
        bases=bases,
        traced=traced,
        plans=plans,
        returned=Returned.of(traced.facts),
        region=region,
        backend=backend.name,
        settings=settings,
        records=(*records, *more),
        seconds=times.seconds,
    )


_OverBases: TypeAlias = tuple[Captured, dedupe.DedupePlan, Traced, BasePlan]


def _trace_counting(job: _Job, times: StageTimes) -> _OverBases:
    """Trace the program; once more, with symbols for the numbers that it finds and changes, if it does.

    It would fit this call only. Where symbols cannot stand for numbers (in a key, in a text), it does.
    """
    found = _trace_over_bases(job, times)
    counts = Returned.of(found[2].facts).counts()
    if not counts or not job.symbolic:
        return found
    try:
        counting = _trace_over_bases(replace(job, counts=tuple(counts)), times)
    except (AotdistError, _FailsWithSymbols):
        return found
    _, _, traced, _ = counting
    fits = _says_the_same(traced.facts, found[2].facts)
    if job.backend.name == "inductor" and traced.symbols.computes_with_floats():
        fits = False  # its C++ takes sizes, and what is made of them
    return counting if fits else found


def _says_the_same(symbolic: Facts, facts: Facts) -> bool:
    """Whether results and assignments that are no tensors are the same, but for symbols."""
    pairs = zip(_said(symbolic), _said(facts), strict=True)
    return all(same_constant(hint(one), other) for one, other in pairs if is_constant(other))


def _said(facts: Facts) -> list[Any]:
    returned = Returned.of(facts)
    results = [fact.value for fact in facts.outputs if isinstance(fact, NotATensor)]
    return [*results, *pytree.tree_leaves([value for _, value in returned.constants])]


def _trace_over_bases(job: _Job, times: StageTimes) -> _OverBases:
    """Trace the program over the bases that its inputs need.

    Only a trace tells which inputs are written, and around which the program looks in their storage. Where
    they share memory, the program runs once more, and again if what was written brings history to others.
    """
    bases, writes = NO_BASES, Writes()
    inputs: _Inputs | None = None
    while True:
        try:
            captured, deduped, traced, before = _trace_with_any_sizes(job, times, bases, inputs)
        except _LooksAround as found:
            before, inputs = found.before, found.inputs
            writes = writes.and_around(found.position)
            bases = plan_bases(Program(job.call.run, *inputs), writes)
        else:
            inputs = _distinct(traced, bases, inputs)
            program = Program(job.call.run, *inputs)
            writes = writes.and_of(program, traced.facts, bases)
            needed = plan_bases(program, writes)
            if needed == bases:
                return captured, deduped, traced, bases
            bases, job = needed, replace(job, symbolic=bool(tuple(traced.symbols)))
        before.roll_back()


def _trace_with_any_sizes(
    job: _Job, times: StageTimes, bases: BasePlan, inputs: _Inputs | None
) -> tuple[Captured, dedupe.DedupePlan, Traced, Reassignments]:
    """A trace: with symbolic sizes where they are asked for, if PyTorch's operators take them.

    Many of linear algebra, Fourier transforms and losses do not. A program that calls one is compiled for
    each of its sizes.
    """
    try:
        return _trace(job, times, bases, inputs)
    except _FailsWithSymbols as failure:
        failure.before.roll_back()
        if job.counts:
            raise
        traced = _trace(replace(job, symbolic=False), times, bases, inputs)
        reason = str(failure.__cause__).partition("\n")[0]
        warnings.warn(
            f"aotdist: `{traced[0].name}` is compiled for the sizes at hand: an operator of PyTorch's does "
            f"not take symbolic ones ({reason})",
            stacklevel=2,
        )
        return traced


class _FailsWithSymbols(Exception):
    """A trace with symbolic sizes failed, as a trace with numbers might not; the cause says how."""

    def __init__(self, before: Reassignments) -> None:
        super().__init__()
        self.before = before


_Inputs: TypeAlias = tuple[Row[DistinctIdx, Slot], Row[DistinctIdx, torch.Tensor]]


class _LooksAround(Exception):
    """The program looks around an input in its storage.

    Args:
        before: how to undo what the program assigned.
        inputs: the inputs that are known.
        example: the input; it may be one that only the trace meets.
        slot: its name.
    """

    def __init__(self, before: Reassignments, inputs: _Inputs, example: torch.Tensor, slot: Slot) -> None:
        super().__init__()
        self.before = before
        slots, examples = inputs
        known = [idx for idx, each in examples.enumerate() if each is example]
        self.inputs = inputs if known else (Row([*slots, slot]), Row([*examples, example]))
        self.position = known[0] if known else DistinctIdx(len(examples))


def _trace(
    job: _Job, times: StageTimes, bases: BasePlan, inputs: _Inputs | None
) -> tuple[Captured, dedupe.DedupePlan, Traced, Reassignments]:
    """Capture the call and trace it.

    Args:
        job: the call, and how to compile it.
        times: where to note how long it takes.
        bases: which of the inputs share memory.
        inputs: those of an earlier trace, with the closed-over tensors that it met.

    Returns:
        the captured call, its distinct tensors, the trace, and how to undo what the program assigned.
    """
    with ExitStack() as scope:
        with times.stage("capture"):
            captured = capture(job.call, job.settings, scope)
            before = captured.environment.reassignments()
            scope.enter_context(before.nothing_kept())
            distinct, deduped = dedupe.lower(captured.program)
            program = synthetic_base.lower(_with_inputs(distinct, inputs), bases)
        with times.stage("trace"):
            dims = captured.dims if job.symbolic else {}
            paths = (slot.path for slot in program.ins)
            fakes = fakes_of(zip(paths, program.examples, strict=True), captured.closed_over.keys())
            _refuse_fakes(program, job.backend)
            recorder = Recorder(
                _broken_up_in_trace(job.backend, job.settings),
                functional_rng=job.settings.functional_rng,
                backward_autocast=_backward_autocast(job.settings),
                symbolic=bool(dims or job.counts),
                fakes=fakes,
            )
            times.counting(recorder.num_nodes)
            recorder.draws.allow(captured.environment.reached.generators)
            try:
                with quiet_fakes() if dims or job.counts else nullcontext():
                    traced = trace(
                        program,
                        recorder,
                        training=not captured.ambient.inference,
                        name_closed_over=captured.name_closed_over,
                        bases=bases,
                        dims=dims,
                        counts=job.counts,
                        cuts=captured.ambient.grad and not job.backend.owns_cut,
                        again=not captured.environment.rules,
                    )
            except LooksAround as found:
                known = _with_inputs(distinct, inputs)
                slot = captured.name_closed_over(found.example)
                raise _LooksAround(before, (known.ins, known.examples), found.example, slot) from None
            except AotdistError:
                raise
            except Exception as error:
                if not (dims or job.counts):
                    raise
                raise _FailsWithSymbols(before) from error
    if traced.later_backwards is not None:
        traced.later_backwards.find_at(captured.sources(traced.program.examples))
    return captured, deduped, traced, before


def _refuse_fakes(program: Program[PrimalIdx], backend: Backend) -> None:
    """Refuse to make machine code for a call with fake tensors: it would read memory that is not there."""
    for slot, example in zip(program.ins, program.examples, strict=True):
        if is_fake(example) and backend.name in ("inductor", "triton"):
            raise BadSettings(
                f"`{slot}` is a fake tensor, and what `{backend.name}` emits reads memory",
                stage="capture",
                fix='compile with `backend="fx"`, or export the program: `aotdist.export`',
            )


def _backward_autocast(settings: Settings) -> Callable[[], AbstractContextManager[Any]]:
    match settings.backward_autocast:
        case "off":
            return autocast_off
        case "same_as_forward":
            return nullcontext
        case _:
            return functools.partial(autocast_only, settings.explicit_autocast())


def drawn_on(graph: Graph) -> torch.device | None:
    """Where the seed lies that a graph takes, if it does."""
    nodes = (node for slot, node in graph.named_placeholders().items() if slot.role == "rng")
    seed = next(nodes, None)
    return None if seed is None else seed.meta["val"].device


def _distinct(traced: Traced, bases: BasePlan, known: _Inputs | None) -> _Inputs:
    """The distinct tensors of the call: those that are known, and what the trace met besides."""
    slots, examples = (Row[DistinctIdx, Slot](), Row[DistinctIdx, torch.Tensor]()) if known is None else known
    seen = {id(example) for example in examples}
    program = traced.program
    more = [at for at, ex in program.examples.enumerate() if id(ex) not in seen and not bases.is_new(at)]
    return Row([*slots, *(program.ins[at] for at in more)]), Row(
        [*examples, *(program.examples[at] for at in more)]
    )


def _with_inputs(program: Program[DistinctIdx], inputs: _Inputs | None) -> Program[DistinctIdx]:
    """`program` with more inputs, which it reaches by itself."""
    if inputs is None:
        return program
    count = len(program.ins)
    return Program(lambda *distinct: program.fn(*distinct[:count]), *inputs)


def _broken_up_in_trace(backend: Backend, settings: Settings) -> Decompositions:
    """The operators that a trace breaks up; losses that a pass may look for, it leaves whole."""
    table = backend.decompositions()
    if settings.loss_chunk_bytes is None:
        return table
    return {op: made for op, made in table.items() if op not in WHOLE}


def _joint_passes(graph: Graph, backend: Backend, settings: Settings) -> tuple[Graph, tuple[PassRecord, ...]]:
    """A joint or an inference graph after its passes, with a record of each; nothing in it is left whole."""
    graph, records = run_passes(backend.prepare_joint(graph), "joint", settings)
    if settings.loss_chunk_bytes is not None:
        graph = Graph(copied(graph), graph.ins, graph.outs)
        decompose(graph.gm, backend.decompositions(), only=WHOLE)
    return graph, records


def _compile_training(
    cut: Graph, traced: Traced, plans: Plans, emitter: Emitter, times: StageTimes
) -> tuple[Training, tuple[PassRecord, ...]]:
    settings = emitter.settings
    with times.stage("partition"):
        policy = emitter.backend.partition if settings.partition == "auto" else settings.partition
        joint = linked(cut)
        split = partition(joint, policy)
        gates = plan_gates(cut, traced.facts)
    by_choice = split.backward
    whole = without_choices(by_choice, traced.facts, traced.program.ins)
    split = replace(split, backward=whole)
    with times.stage("passes"):
        forward, records = run_passes(split.forward, "forward", settings)
        backward, records_of_backward = run_passes(split.backward, "backward", settings)
        split = replace(split, forward=forward, backward=backward)
    with times.stage("codegen"):
        halves = emitter.halves(split)
    facts, ins = traced.facts, traced.program.ins
    more = OnDemand(cut, joint, by_choice, split, halves, facts, ins, traced.symbols, emitter)
    again = plan_again(linked(traced.graph), facts.functions, split.saved)
    node = node_plan(traced, plans, split, halves.tangent_strides, again)
    region = Training(
        cut=cut,
        joint=joint,
        by_choice=by_choice,
        split=split,
        halves=halves,
        node=node,
        backward=more.for_any_kind(backward, halves.backward.call),
        reduced=more.reduced,
        parts=more.parts,
        gates=gates,
        again=_Twice(traced.graph, again, emitter),
        others=more.of_other_kinds(traced.later_backwards, node.again_slots),
        derivatives=_derivatives(traced, joint, split, node, emitter),
    )
    return region, (*records, *records_of_backward)


def _derivatives(
    traced: Traced, joint: Graph, split: Split, node: NodePlan, emitter: Emitter
) -> Derive | None:
    """What compiles the backward as a program with a backward, where `_Twice` will not always do."""
    later = traced.later_backwards
    if later is None or not later.is_differentiable() or not node.again:
        return None
    if node.obstacle is None and not later.meets_other_kinds():
        return None

    def compiled(derivative: Traced) -> Training:
        _, plans = lower_all(derivative.program, derivative.facts)
        graph, _ = _joint_passes(derivative.graph, emitter.backend, emitter.settings)
        return _compile_training(graph, derivative, plans, emitter, StageTimes())[0]

    return Derive(later, joint, split, node, traced.symbols, traced.fake_mode, compiled)


class _Twice:
    """Gradients as compiled functions with a backward of their own; made when they are first asked for."""

    def __init__(self, cut: Graph, again: Again, emitter: Emitter) -> None:
        self._cut, self._again, self._emitter = cut, again, emitter
        self._made: dict[Any, Part] = {}

    def __call__(self, outs: tuple[Slot, ...], arrived: frozenset[Slot], *, in_parts: bool) -> Part:
        """What computes `outs` where only gradients `arrived` are there, see `backward.Parts`."""
        key = (outs, arrived, in_parts)
        if key not in self._made:
            with alone(), users_modes_off():
                joint = self._cut if in_parts else linked(self._cut, arrived)
                graph = gradients(joint, self._again, outs)
                missing = [slot for slot in graph.ins if slot.role in GRADIENT_ROLES and slot not in arrived]
                graph = without_tangents(graph, missing, any_strides=True)
                self._made[key] = Part(self._compiled(graph), graph.ins)
        return self._made[key]

    def _compiled(self, graph: Graph) -> BoxedCall:
        emitter, artifacts = self._emitter, list[Artifact]()
        settings = replace(emitter.settings, dynamic=False)  # its sizes are constants of the call
        run = as_function(graph)
        run.__name__ = f"gradients of {emitter.name}"

        def compiled(given: Sequence[Any]) -> list[Any]:
            result = call_fitting(artifacts, tuple(given), {})
            if result is MISS:
                call = UserCall(run, run, tuple(given), {})
                artifacts.append(compile_call(call, emitter.backend, settings, earlier=artifacts))
                result = artifacts[-1].call(tuple(given), {})
            return result

        return compiled


def _compile_inference(
    joint: Graph, emitter: Emitter, times: StageTimes
) -> tuple[Inference, tuple[PassRecord, ...]]:
    with times.stage("passes"):
        graph, records = run_passes(joint, "forward", emitter.settings)
    with times.stage("codegen"):
        emitted = emitter.inference(graph)
    return Inference(graph, emitted), records
