"""The stages, in order: `_run_stages` reads from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from aotdist.capture.alone import alone
from aotdist.capture.capture import UserCall
from aotdist.codegen.contract import Backend, BoxedCall
from aotdist.codegen.decompose import decompose
from aotdist.codegen.emit import EmittedHalves, Emitter
from aotdist.codegen.graph_copy import copied
from aotdist.convention.stack import Plans
from aotdist.joint.trace import Traced
from aotdist.partition.choices import without_choices
from aotdist.partition.collector import collector_paused
from aotdist.partition.double_backward import DoubleBackwardPlan, as_function, gradients, plan_double_backward
from aotdist.partition.gates import linked
from aotdist.partition.policy import partition
from aotdist.partition.reduced import without_tangents
from aotdist.passes.linear_losses import WHOLE
from aotdist.passes.run import PassRecord, run_passes
from aotdist.passes.verify import verify_split
from aotdist.program import GRADIENT_ROLES, Graph, Slot, TrainingGraphs
from aotdist.report.logs import log_compiled
from aotdist.report.progress import StageTimes, showing
from aotdist.runtime.artifact import Artifact, Artifacts, call_fitting, load
from aotdist.runtime.backward import Part
from aotdist.runtime.compilation import BackwardCompilers, Compilation, Inference, Training
from aotdist.runtime.double_backward_compiler import DoubleBackwardCompiler
from aotdist.runtime.fit import MISS, fit_of, refuse_overlap
from aotdist.runtime.on_demand import compiled_ahead
from aotdist.runtime.plan import NodePlan
from aotdist.runtime.proof import prove_guards
from aotdist.runtime.ranks import agree, failing_together
from aotdist.settings import Settings
from aotdist.subclasses.protocol import process_groups
from aotdist.torch_seam.modes import class_functions_off, users_modes_off
from aotdist.torch_seam.versions import warn_of_untested_torch
from aotdist.tracing import Job, trace_call


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
        symbolic: try symbolic sizes, if the call, settings or marks ask for them.
        undecided: its kind, if all ranks run such calls as they were written where one is refused.

    Raises:
        UnsupportedProgram: the program cannot be compiled ahead of time; or `undecided`, by a peer.
        BadSettings: the backend lacks something, or a setting names nothing.
        RankDivergence: the ranks compiled different sequences of collectives.
        RankLost: another rank failed to compile, or did not come to compare.
    """
    with class_functions_off():
        job = Job(call, backend, settings, symbolic)
        return loaded_together(call.name, settings, lambda: _printed(job), earlier, undecided)


@alone
def compilation_of(call: UserCall, backend: Backend, settings: Settings) -> Compilation:
    """Compile one call for others to load: other ranks are not asked, and nothing is loaded here.

    Raises:
        UnsupportedProgram: the program cannot be compiled ahead of time.
        BadSettings: the backend lacks something, or a setting names nothing.
    """
    with class_functions_off(), collector_paused():
        compilation = _compile(Job(call, backend, settings, finds_out=False))
        refuse_overlap(fit_of(compilation))
    return compilation


def _printed(job: Job) -> Artifact:
    """What is made of a call: without a guess of its dimensions, where no program can be made with it."""
    try:
        return printed(_compile(job))
    except Exception:  # a user's compiler raises what it likes
        if job.call.guess is None or not job.call.guess.opened:
            raise
        return printed(_compile(replace(job, call=replace(job.call, guess=None))))


def printed(compilation: Compilation) -> Artifact:
    """A compilation as something to call, for the calls that it fits."""
    fit, settings = fit_of(compilation), compilation.settings
    refuse_overlap(fit)
    if settings.validate_guards:
        prove_guards(fit.sizes, [count.name for count in fit.counts])
    return load(compilation, fit)


def loaded_together(
    label: str,
    settings: Settings,
    made: Callable[[], Artifact],
    earlier: Artifacts | None = None,
    undecided: str | None = None,
) -> Artifact:
    """Load what `made` makes on each rank, when all have made theirs and agree on it.

    Args:
        label: what is compiled, for messages.
        settings: how it is compiled.
        made: compiles it, or reads what was compiled before, and prints it.
        earlier: artifacts for other calls of the same function.
        undecided: see `compile_call`.

    Raises:
        UnsupportedProgram: a peer's call was refused, and all run calls of this kind as they were written.
        RankDivergence: the ranks have different sequences of collectives.
        RankLost: another rank failed, or did not come to compare.
    """
    # A trace makes a million small objects and no garbage to speak of: looking for some doubles its time.
    with failing_together(label, undecided), collector_paused():
        artifact = made()
    compilation = artifact.compilation
    agree(
        artifact.agreed,
        label=label,
        settings=settings,
        groups=process_groups(compilation.traced.facts.recipes),
        # Ranks decide about a kind once, and all of them come for that.
        earlier=() if earlier is None or undecided is not None else earlier.agreed(),
        check=artifact.check,
        undecided=undecided,
    )
    log_compiled(artifact)
    return artifact


def _compile(job: Job) -> Compilation:
    warn_of_untested_torch()
    with showing(job.call.name) as progress, users_modes_off(), ExitStack() as on_failure:
        compilation = _run_stages(job, StageTimes(progress=progress), on_failure)
        on_failure.pop_all()  # nothing is undone
        return compilation


def _run_stages(job: Job, times: StageTimes, on_failure: ExitStack) -> Compilation:
    """From a call to its compilation.

    Args:
        job: what to compile, and how.
        times: where to note how long each stage takes.
        on_failure: what is undone if a stage fails.
    """
    backend, settings = job.backend, job.settings
    backend.check()
    found = trace_call(job, times, on_failure)
    captured, traced = found.captured, found.traced
    with times.stage("convention"):
        plans = Plans.of(traced.program, traced.facts, drawn_on(traced.graph))
    emitter = Emitter(backend, captured.static_slots(), traced.fake_mode, settings, captured.name)
    with times.stage("passes"):
        times.counting(lambda: len(traced.graph.gm.graph.nodes))
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
        returned=found.returned(),
        region=region,
        backend=backend.name,
        settings=settings,
        records=(*records, *more),
        seconds=times.seconds,
    )


def drawn_on(graph: Graph) -> torch.device | None:
    """Where the seed lies that a graph takes, if it does."""
    nodes = (node for slot, node in graph.named_placeholders().items() if slot.role == "rng")
    seed = next(nodes, None)
    return None if seed is None else seed.meta["val"].device


def _to_prepare(traced: Traced, backend: Backend) -> Graph:
    """The recorded graph as the backend prepares it: whole, for one that cuts it in two."""
    if not backend.owns_cut:
        return traced.graph
    return without_choices(linked(traced.graph), traced.facts, traced.program.ins)


def _joint_passes(graph: Graph, backend: Backend, settings: Settings) -> tuple[Graph, tuple[PassRecord, ...]]:
    """A joint or an inference graph after its passes, with a record of each; nothing in it is left whole."""
    graph, records = run_passes(backend.prepare_joint(graph), "joint", settings)
    if settings.loss_chunk_bytes is not None:
        graph = Graph(copied(graph), graph.ins, graph.outs)
        decompose(graph.gm, backend.decompositions(), only=WHOLE)
    return graph, records


def _compile_training(
    prepared: Graph, traced: Traced, plans: Plans, emitter: Emitter, times: StageTimes
) -> tuple[Training, tuple[PassRecord, ...]]:
    """From a prepared joint graph to its two halves, compiled, and what compiles other backwards on demand.

    Args:
        prepared: the graph after the joint passes; cut at its waypoints, unless the backend owns the cut.
        traced: what was traced.
        plans: of the convention layers.
        emitter: compiles graphs.
        times: where to note how long each stage takes.
    """
    settings = emitter.settings
    with times.stage("partition"):
        policy = emitter.backend.partition if settings.partition == "auto" else settings.partition
        cut, joint = (traced.graph, prepared) if emitter.backend.owns_cut else (prepared, linked(prepared))
        split = partition(joint, policy)
        if settings.verify:
            verify_split(split)
    facts, ins, by_choice = traced.facts, traced.program.ins, split.backward
    whole = without_choices(by_choice, facts, ins)
    ahead = compiled_ahead(whole, facts, emitter)
    with times.stage("passes"):
        forward, records = run_passes(split.forward, "forward", settings)
        backward, records_of_backward = run_passes(ahead, "backward", settings)
        split = replace(split, forward=forward, backward=backward)
    with times.stage("codegen"):
        halves = emitter.halves(split, whole)
    graphs = TrainingGraphs(cut, joint, by_choice, whole, split)
    plan = plan_double_backward(linked(traced.graph), split.saved, facts.backward.obstacle)
    traces = traced.later_backwards
    compilers = BackwardCompilers(
        double_backward=plan,
        differentiable_parts=_DifferentiableParts(traced.graph, plan, emitter),
        compiler_for=lambda node: _double_backward_compiler(traced, graphs, halves, node, plan, emitter),
        of_kinds=None if traces is None or not traces.meets_other_kinds() else traces.of_kinds,
    )
    region = Training.assembled(traced, plans, graphs, halves, emitter, compilers)
    return region, (*records, *records_of_backward)


def _double_backward_compiler(
    traced: Traced,
    graphs: TrainingGraphs,
    halves: EmittedHalves,
    node: NodePlan,
    plan: DoubleBackwardPlan,
    emitter: Emitter,
) -> DoubleBackwardCompiler | None:
    """What compiles the backward as a program with a backward; None where only `_DifferentiableParts` do."""
    later = traced.later_backwards
    if later is None or not later.is_differentiable() or not node.kept.primals:
        return None

    # It starts from saved values, so it is nothing for who cuts whole programs.
    own = emitter.of_reference() if emitter.backend.owns_cut else emitter

    def compiled(traced_backward: Traced) -> Training:
        plans = Plans.of(traced_backward.program, traced_backward.facts)
        graph, _ = _joint_passes(traced_backward.graph, own.backend, own.settings)
        return _compile_training(graph, traced_backward, plans, own, StageTimes())[0]

    return DoubleBackwardCompiler(
        later=later,
        joint=graphs.joint,
        split=graphs.split,
        saved_strides=halves.saved_strides,
        node=node,
        symbols=traced.symbols,
        fake_mode=traced.fake_mode,
        compiled=compiled,
        is_exact=plan.is_exact and node.obstacle is None,
        failure=plan.failure,
    )


class _DifferentiableParts:
    """Gradients as compiled functions with a backward of their own; made when they are first asked for."""

    def __init__(self, cut: Graph, plan: DoubleBackwardPlan, emitter: Emitter) -> None:
        self._cut, self._plan, self._emitter = cut, plan, emitter
        self._made: dict[Any, Part] = {}

    def __call__(self, outs: tuple[Slot, ...], arrived: frozenset[Slot], *, in_parts: bool) -> Part:
        """What computes `outs` where only gradients `arrived` are there, see `backward.Parts`."""
        key = (outs, arrived, in_parts)
        if key not in self._made:
            self._made[key] = self._make(outs, arrived, in_parts=in_parts)
        return self._made[key]

    @alone
    def _make(self, outs: tuple[Slot, ...], arrived: frozenset[Slot], *, in_parts: bool) -> Part:
        with users_modes_off():
            joint = self._cut if in_parts else linked(self._cut)
            graph = gradients(joint, self._plan, outs)
            missing = [slot for slot in graph.ins if slot.role in GRADIENT_ROLES and slot not in arrived]
            graph = without_tangents(graph, missing, any_strides=True)
            return Part(self._compiled(graph), graph.ins)

    def _compiled(self, graph: Graph) -> BoxedCall:
        emitter, artifacts = self._emitter, Artifacts()
        settings = replace(emitter.settings, dynamic=False)
        run = as_function(graph)
        run.__name__ = f"gradients of {emitter.name}"

        def compiled(given: Sequence[Any]) -> list[Any]:
            result = call_fitting(artifacts, tuple(given), {})
            if result is MISS:
                call = UserCall(run, run, tuple(given), {})
                # Its sizes are constants of the call, also those that an argument carries a mark for.
                made = compile_call(call, emitter.backend, settings, earlier=artifacts, symbolic=False)
                artifacts.put_first(made)
                result = made.call(tuple(given), {})
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
