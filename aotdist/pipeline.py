"""The pipeline: `_run_stages` has its stages, from top to bottom."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn

from aotdist.assumptions import trace_call
from aotdist.capture.captured import UserCall
from aotdist.capture.compile_lock import alone
from aotdist.codegen.contract import Backend
from aotdist.codegen.decompose import decompose
from aotdist.codegen.emit import EmittedHalves, Emitter
from aotdist.codegen.fused_steps import break_up_steps
from aotdist.codegen.rewritten_blocks import prepared_by_blocks
from aotdist.convention.stack import Plans
from aotdist.errors import PassesPrograms
from aotdist.job import Job
from aotdist.partition.builder import collector_paused
from aotdist.partition.gates import linked
from aotdist.partition.policy import Policy, partition, remade
from aotdist.passes.linear_losses import WHOLE
from aotdist.passes.run import PassRecord, run_passes
from aotdist.passes.verify import verify_split
from aotdist.program import Graph
from aotdist.report.progress import StageTimes, log_compiled, showing
from aotdist.retracing import with_traces
from aotdist.runtime.artifact import Artifact, Artifacts, load, nodes_of
from aotdist.runtime.backwards import DoubleBackwards, Training
from aotdist.runtime.compilation import Compilation, Inference
from aotdist.runtime.derive import Joint, compiled_ahead, derive, without_choices
from aotdist.runtime.double_backward import Nodes, double_backward
from aotdist.runtime.guards import fit_of, prove_guards, refuse_overlap
from aotdist.runtime.ranks import agree, failing_together
from aotdist.settings import Settings
from aotdist.subclasses.protocol import process_groups
from aotdist.torch_seam.modes import class_functions_off, users_modes_off
from aotdist.torch_seam.versions import warn_of_untested_torch
from aotdist.trace.failures import AccumulatesInside
from aotdist.trace.trace import Traced


@alone
def compile_call(
    call: UserCall,
    backend: Backend,
    settings: Settings,
    *,
    earlier: Artifacts | None = None,
    symbolic: bool = True,
    undecided: str | None = None,
) -> Artifact:
    """Compile one call of the user's function.

    Args:
        call: the call.
        backend: turns graphs into callables.
        settings: how to compile.
        earlier: artifacts for other calls of the same function.
        symbolic: try symbolic sizes, if the call, settings or marks request them.
        undecided: its kind, if all ranks are to run such calls eagerly where one rank's is refused.

    Raises:
        UnsupportedProgram: the program cannot be compiled ahead of time; or `undecided`, by a peer.
        BadSettings: the backend lacks something, or a setting names nothing.
        RankDivergence: the ranks compiled different sequences of collectives.
        RankLost: another rank failed to compile, or did not come to compare.
    """
    with class_functions_off():
        set_up = frozenset(spot for one in earlier or () for spot in one.compilation.captured.set_up)
        job = Job(call, backend, settings, symbolic, set_up=set_up)
        # A function that turns out to be a step is compiled as one: to peers that is no failure.
        passing = PassesPrograms if isinstance(call.target, nn.Module) else AccumulatesInside
        return loaded_together(call.name, settings, lambda: _printed(job), earlier, undecided, passing)


@alone
def compilation_of(call: UserCall, backend: Backend, settings: Settings) -> Compilation:
    """Compile one call for other processes, without loading it here, and without other ranks.

    Raises:
        UnsupportedProgram: the program cannot be compiled ahead of time.
        BadSettings: the backend lacks something, or a setting names nothing.
    """
    with class_functions_off(), collector_paused():
        compilation = _compile(Job(call, backend, settings, finds_out=False))
        refuse_overlap(fit_of(compilation))
    return compilation


def _printed(job: Job) -> Artifact:
    """The artifact for a call; if compiling with guessed dynamic sizes or numbers fails, without these."""
    try:
        return printed(_compile(job))
    except Exception:  # a user's compiler raises what it likes
        if not (job.call.guessed or job.call.varying):
            raise
        return printed(_compile(replace(job, call=replace(job.call, guessed={}, varying=()))))


def printed(compilation: Compilation) -> Artifact:
    """The artifact of a compilation."""
    fit, settings = fit_of(compilation), compilation.settings
    refuse_overlap(fit)
    if settings.validate_guards:
        prove_guards(fit.numbers.sizes, [count.name for count in fit.numbers.counts])
    return load(compilation, fit)


def loaded_together(
    label: str,
    settings: Settings,
    made: Callable[[], Artifact],
    earlier: Artifacts | None = None,
    undecided: str | None = None,
    passing: type[BaseException] = PassesPrograms,
) -> Artifact:
    """The artifact that `made` returns, once all ranks have made theirs and agree on them.

    Args:
        label: what is compiled, for messages.
        settings: how it is compiled.
        made: compiles the artifact, or reads it from a file.
        earlier: artifacts for other calls of the same function.
        undecided: see `compile_call`.
        passing: see `failing_together`.

    Raises:
        UnsupportedProgram: a peer's call was refused, and all run calls of this kind eagerly.
        RankDivergence: the ranks have different sequences of collectives.
        RankLost: another rank failed, or did not come to compare.
    """
    # A trace makes a million small objects and hardly any garbage: collecting it would double the time.
    with failing_together(label, undecided, passing), collector_paused():
        artifact = made()
    compilation = artifact.compilation
    agree(
        artifact.agreed,
        label=label,
        settings=settings,
        groups=process_groups(compilation.traced.facts.recipes),
        # All ranks come to decide about a kind of calls, whatever they agreed on before.
        earlier=() if earlier is None or undecided is not None else earlier.agreed(),
        check=artifact.check,
        undecided=undecided,
    )
    log_compiled(artifact)
    return artifact


def _compile(job: Job) -> Compilation:
    warn_of_untested_torch()
    with showing(job.call.name) as times, users_modes_off(), ExitStack() as on_failure:
        compilation = _run_stages(job, times, on_failure)
        on_failure.pop_all()  # nothing is undone
        return compilation


def _run_stages(job: Job, times: StageTimes, on_failure: ExitStack) -> Compilation:
    """From a call to its compilation.

    Args:
        job: what to compile, and how.
        times: records how long each stage takes.
        on_failure: undoes the program's changes in Python if a stage fails.
    """
    backend, settings = job.backend, job.settings
    backend.check()
    found = trace_call(job, times, on_failure)
    captured, traced = found.captured, with_traces(job, found)
    with times.stage("convention"):
        plans = Plans.of(traced.program, traced.facts, drawn_on(traced.graph))
    emitter = Emitter(backend, captured.static_slots(), traced.fake_mode, settings, captured.name)
    with times.stage("passes"):
        times.num_nodes = lambda: len(traced.graph.gm.graph.nodes)
        joint, records = _joint_passes(_to_prepare(traced, backend), backend, settings)
    if traced.has_backward():
        region, more = _compile_training(joint, traced, plans, emitter, times)
    else:
        region, more = _compile_inference(joint, emitter, times)
    return Compilation(
        captured=captured,
        deduped=found.deduped,
        bases=found.bases,
        traced=traced,
        plans=plans,
        region=region,
        backend=backend.name,
        settings=settings,
        records=(*records, *more),
        seconds=times.seconds,
    )


def drawn_on(graph: Graph) -> torch.device | None:
    """The device of the seed that a graph takes, if it takes one."""
    nodes = (node for slot, node in graph.named_placeholders().items() if slot.role == "rng")
    seed = next(nodes, None)
    return None if seed is None else seed.meta["val"].device


def _to_prepare(traced: Traced, backend: Backend) -> Graph:
    """The recorded graph that the backend prepares: not cut at waypoints, if the backend partitions."""
    if not backend.owns_cut:
        return traced.graph
    return without_choices(linked(traced.graph), traced.facts, traced.program.ins)


def _joint_passes(graph: Graph, backend: Backend, settings: Settings) -> tuple[Graph, tuple[PassRecord, ...]]:
    """A joint or inference graph after its passes, fully decomposed, with a record of each pass."""
    records = ()
    if settings.loss_chunk_bytes is not None:
        graph, records = run_passes(graph, "traced", settings)
        graph = graph.copied()
        decompose(graph.gm, backend.decompositions(), only=WHOLE)
    graph, more = run_passes(prepared_by_blocks(backend, graph), "joint", settings)
    return break_up_steps(graph, backend.decompositions), (*records, *more)


def _compile_training(
    prepared: Graph, traced: Traced, plans: Plans, emitter: Emitter, times: StageTimes
) -> tuple[Training, tuple[PassRecord, ...]]:
    """Partition a prepared joint graph, and compile both halves; other backwards are compiled on demand.

    Args:
        prepared: the graph after the joint passes; cut at its waypoints, unless the backend partitions.
        traced: the trace.
        plans: of the convention layers.
        emitter: compiles graphs.
        times: records how long each stage takes.
    """
    settings = emitter.settings
    with times.stage("partition"):
        cut, joint = (traced.graph, prepared) if emitter.backend.owns_cut else (prepared, linked(prepared))
        split = partition(joint, _policy(emitter))
        if settings.verify:
            verify_split(split)
    later = traced.later_backwards
    recorded = Joint.of(traced, cut, joint, split, is_cut_by_backend=emitter.backend.owns_cut)
    recorded = replace(recorded, any_strides=emitter.takes_any_strides(recorded.whole))
    ahead = compiled_ahead(recorded)
    with times.stage("passes"):
        forward, records = run_passes(split.forward, "forward", settings)
        backward, records_of_backward = run_passes(derive(recorded, ahead).graph, "backward", settings)
        split = replace(split, forward=forward, backward=backward)
    recorded = replace(recorded, split=split)
    with times.stage("codegen"):
        halves = emitter.halves(split, recorded.whole)
    has_other_kinds = later is not None and later.meets_other_kinds()
    doubles = _double_backwards(traced, halves, emitter)
    region = Training.of_halves(
        traced, plans, recorded, ahead, halves, emitter, doubles, has_other_kinds=has_other_kinds
    )
    return region, (*records, *records_of_backward)


def _policy(emitter: Emitter) -> Policy:
    """The policy by which the partition chooses what to save and what to recompute."""
    chosen = emitter.settings.partition
    return emitter.backend.partition if chosen == "auto" else chosen


def _double_backwards(traced: Traced, halves: EmittedHalves, emitter: Emitter) -> DoubleBackwards:
    """A function that compiles a backward as a program with a backward."""
    # They start from saved values, so a backend that partitions whole programs cannot take them.
    own = emitter.of_reference() if emitter.backend.owns_cut else emitter

    def compiled(program: Traced) -> Nodes:
        plans = Plans.of(program.program, program.facts)
        graph, _ = _joint_passes(program.graph, own.backend, own.settings)
        return nodes_of(_compile_training(graph, program, plans, own, StageTimes())[0])

    return functools.partial(
        double_backward,
        saved_strides=halves.saved_strides,
        symbols=traced.symbols,
        fake_mode=traced.fake_mode,
        compiled=compiled,
    )


def _compile_inference(
    joint: Graph, emitter: Emitter, times: StageTimes
) -> tuple[Inference, tuple[PassRecord, ...]]:
    with times.stage("partition"):
        joint = remade(joint) if _policy(emitter) == "min_cut" else joint
    with times.stage("passes"):
        graph, records = run_passes(joint, "forward", emitter.settings)
    with times.stage("codegen"):
        emitted = emitter.inference(graph)
    return Inference(graph, emitted), records
