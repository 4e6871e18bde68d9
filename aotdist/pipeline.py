"""The stages, in order: `_compile` reads from top to bottom."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from aotdist.capture.capture import Captured, Returned, capture
from aotdist.capture.reassign import Reassignments
from aotdist.codegen.contract import Backend, BoxedCall
from aotdist.codegen.emit import Emitter
from aotdist.convention import dedupe, synthetic_base
from aotdist.convention.stack import Plans, lower_all
from aotdist.convention.synthetic_base import NO_BASES, BasePlan, plan_bases
from aotdist.joint.proxies import Recorder
from aotdist.joint.trace import Traced, trace
from aotdist.partition.again import Again, as_function, gradients, plan_again
from aotdist.partition.builder import collector_paused
from aotdist.partition.policy import partition
from aotdist.partition.reduced import without_tangents
from aotdist.passes.collectives import collectives
from aotdist.passes.run import PassRecord, run_passes
from aotdist.program import DistinctIdx, Graph, Program, Row, Slot
from aotdist.runtime.artifact import Artifact, call_fitting, fit_of, load, refuse_overlap
from aotdist.runtime.compilation import Compilation, Inference, Training
from aotdist.runtime.node import node_plan
from aotdist.runtime.print_call import MISS
from aotdist.runtime.ranks import agree, failing_together
from aotdist.settings import Settings
from aotdist.subclasses.protocol import process_groups
from aotdist.torch_seam import autocast_off, autocast_only


@dataclass(slots=True)
class StageTimes:
    """Seconds of each stage, in the order in which they ran."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Add the time spent inside to stage `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class _Call:
    """What is compiled; see `compile_call`."""

    target: Any
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    backend: Backend
    settings: Settings


def compile_call(
    target: Any,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    backend: Backend,
    settings: Settings,
) -> Artifact:
    """Compile one call of the user's function.

    Args:
        target: the module or callable, to look for state in.
        run: what to call for it.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        backend: turns graphs into callables.
        settings: how to compile.

    Raises:
        UnsupportedProgram: the program cannot be compiled ahead of time.
        BadSettings: the backend lacks something, or a setting names nothing.
        RankDivergence: the ranks compiled different sequences of collectives.
        RankLost: another rank failed to compile, or did not come to compare.
    """
    label = getattr(target, "__name__", type(target).__name__)
    # A trace makes a million small objects and no garbage to speak of: looking for some doubles its time.
    with failing_together(label), collector_paused():
        compilation = _compile(_Call(target, run, args, kwargs, backend, settings))
        fit = fit_of(compilation)
        refuse_overlap(fit)
    agree(
        compilation.collectives(),
        label=label,
        settings=settings,
        groups=process_groups(compilation.traced.facts.recipes),
    )
    return load(compilation, fit)


def _compile(call: _Call) -> Compilation:
    backend, settings = call.backend, call.settings
    times = StageTimes()
    backend.check()
    captured, deduped, traced, before = _trace(call, times)
    bases = plan_bases(Program(traced.program.fn, *_distinct(traced)), traced.facts)
    if len(bases.bases):
        # Only a trace tells which inputs are written; where those share memory, the program runs once more.
        before.roll_back()
        captured, deduped, traced, _ = _trace(call, times, bases, _distinct(traced))
    with times.stage("convention"):
        _, plans = lower_all(traced.program, traced.facts, functional_rng=_takes_seed(traced.graph))
    emitter = Emitter(backend, captured.static_slots(), traced.fake_mode, settings, captured.name)
    with times.stage("passes"):
        joint, records = run_passes(backend.prepare_joint(traced.graph), "joint", settings)
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


_Inputs: TypeAlias = tuple[Row[DistinctIdx, Slot], Row[DistinctIdx, torch.Tensor]]


def _trace(
    call: _Call, times: StageTimes, bases: BasePlan = NO_BASES, inputs: _Inputs | None = None
) -> tuple[Captured, dedupe.DedupePlan, Traced, Reassignments]:
    """Capture the call and trace it.

    Args:
        call: the call.
        times: where to note how long it takes.
        bases: which of the inputs share memory.
        inputs: those of an earlier trace, with the closed-over tensors that it met.

    Returns:
        the captured call, its distinct tensors, the trace, and how to undo what the program assigned.
    """
    with ExitStack() as scope:
        with times.stage("capture"):
            captured = capture(call.target, call.run, call.args, call.kwargs, call.settings, scope)
            before = Reassignments(captured.environment.modules, captured.environment.reached)
            distinct, deduped = dedupe.lower(captured.program)
            program = synthetic_base.lower(_with_inputs(distinct, inputs), bases)
        with times.stage("trace"):
            recorder = Recorder(
                call.backend.decompositions(),
                functional_rng=call.settings.functional_rng,
                backward_autocast=_backward_autocast(call.settings),
            )
            recorder.draws.allow(captured.environment.reached.generators)
            traced = trace(
                program,
                recorder,
                training=not captured.ambient.inference,
                name_closed_over=captured.name_closed_over,
                bases=bases,
            )
    return captured, deduped, traced, before


def _backward_autocast(settings: Settings) -> Callable[[], AbstractContextManager[Any]]:
    match settings.backward_autocast:
        case "off":
            return autocast_off
        case "same_as_forward":
            return nullcontext
        case _:
            return functools.partial(autocast_only, settings.explicit_autocast())


def _takes_seed(graph: Graph) -> bool:
    return any(slot.role == "rng" for slot in graph.ins)


def _distinct(traced: Traced) -> _Inputs:
    """The inputs of a trace without bases, which are the distinct tensors of the call."""
    return Row(traced.program.ins), Row(traced.program.examples)


def _with_inputs(program: Program[DistinctIdx], inputs: _Inputs | None) -> Program[DistinctIdx]:
    """`program` with more inputs, which it reaches by itself."""
    if inputs is None:
        return program
    count = len(program.ins)
    return Program(lambda *distinct: program.fn(*distinct[:count]), *inputs)


def _compile_training(
    joint: Graph, traced: Traced, plans: Plans, emitter: Emitter, times: StageTimes
) -> tuple[Training, tuple[PassRecord, ...]]:
    settings = emitter.settings
    with times.stage("partition"):
        policy = emitter.backend.partition if settings.partition == "auto" else settings.partition
        split = partition(joint, policy)
    whole = split.backward
    with times.stage("passes"):
        forward, records = run_passes(split.forward, "forward", settings)
        backward, more = run_passes(split.backward, "backward", settings)
        split = replace(split, forward=forward, backward=backward)
    with times.stage("codegen"):
        halves = emitter.halves(split)

    recipes = traced.facts.recipes

    @functools.cache
    def reduced(missing: frozenset[Slot]) -> BoxedCall:
        graph, _ = run_passes(without_tangents(whole, missing), "backward", settings)
        call = emitter.another_backward(split, halves, graph).call
        groups = process_groups(recipes)
        agree(collectives(graph), label=f"{emitter.name} backward", settings=settings, groups=groups)
        return call

    again = plan_again(traced.graph, traced.facts.functions)
    node = node_plan(traced, plans, split, halves.tangent_strides, again)
    twice = _Twice(traced.graph, again, emitter)
    return Training(joint, split, halves, node, reduced, twice), (*records, *more)


class _Twice:
    """The gradients as a compiled function with a backward of its own; made when they are first asked for."""

    def __init__(self, joint: Graph, again: Again, emitter: Emitter) -> None:
        self._joint, self._again, self._emitter = joint, again, emitter
        self._artifacts: list[Artifact] = []

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Gradients, given the primals that are needed and tangents."""
        result = call_fitting(self._artifacts, tensors, {})
        if result is not MISS:
            return result
        emitter = self._emitter
        run = as_function(gradients(self._joint, self._again))
        run.__name__ = f"gradients of {emitter.name}"
        artifact = compile_call(run, run, tensors, {}, emitter.backend, emitter.settings)
        self._artifacts.append(artifact)
        return artifact.call(tensors, {})


def _compile_inference(
    joint: Graph, emitter: Emitter, times: StageTimes
) -> tuple[Inference, tuple[PassRecord, ...]]:
    with times.stage("passes"):
        graph, records = run_passes(joint, "forward", emitter.settings)
    with times.stage("codegen"):
        emitted = emitter.inference(graph)
    return Inference(graph, emitted), records
