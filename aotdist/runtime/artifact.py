"""Artifacts: loaded compilations that calls run, and the list of them that each callable keeps."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from aotdist.capture.captured import Returned
from aotdist.capture.effects import NOTHING
from aotdist.codegen.contract import BoxedCall, Emitted
from aotdist.facts import Facts
from aotdist.partition.gates import plan_gates
from aotdist.program import Call, Graph, PrimalIdx
from aotdist.runtime.backward import Backward
from aotdist.runtime.backwards import Training
from aotdist.runtime.compilation import Compilation, Inference, without_tensors
from aotdist.runtime.double_backward import Nodes
from aotdist.runtime.guards import MISS, Guards
from aotdist.runtime.hooks import HookPlan, schedule
from aotdist.runtime.kinds import Kinds
from aotdist.runtime.plan import NodePlan, result_views
from aotdist.runtime.print_call import print_call
from aotdist.runtime.print_node import ForwardPrinter, print_inference, print_node
from aotdist.runtime.printer import Printer
from aotdist.runtime.ranks import (
    LossWatch,
    RunCheck,
    Sequenced,
    agreeing_on_backwards,
    checks_of,
    fingerprint_of,
)
from aotdist.torch_seam.ambient import any_autocast, autocast_off
from aotdist.torch_seam.modes import class_functions_off
from aotdist.torch_seam.patches import process_lock


@dataclass(frozen=True, slots=True)
class Artifact:
    """One compiled signature.

    Args:
        call: from `(args, kwargs)` to the user's result, or `MISS`.
        source: the printed code of `call`, with the autograd node.
        compilation: what was compiled, without the tensors of the call.
        fit: the guards of a call, likewise.
        agreed: the fingerprint that its ranks agreed on, see `fingerprint_of`.
        check: the comparison of ranks before each forward, if there is one.
    """

    call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    source: str
    compilation: Compilation
    fit: Guards
    agreed: tuple[Sequenced, ...]
    check: RunCheck | None


_order_lock = process_lock()


class Artifacts(list[Artifact]):
    """The artifacts of one function, most recently used first; other threads may read the list at any time.

    Attributes:
        kinds: the kinds of calls that run eagerly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds = Kinds()
        self._agreed: set[tuple[Sequenced, ...]] = set()

    def put_first(self, artifact: Artifact) -> None:
        """Put an artifact, new or not, at the front, and drop the least recently used beyond `max_artifacts`.

        Results of dropped artifacts can still be differentiated. What ranks agreed on for them still holds: a
        rank that compiles one of them again does so without the others.
        """
        with _order_lock:
            self._agreed.add(artifact.agreed)
            if all(one is not artifact for one in self):
                # Only the newest artifact keeps autograd's graph of its trace, for gradients of gradients.
                for region in (one.compilation.region for one in self):
                    if isinstance(region, Training):
                        region.forget_trace()
            ordered = [artifact, *(one for one in self if one is not artifact)]
            self[:] = ordered[: artifact.compilation.settings.max_artifacts]

    def agreed(self) -> set[tuple[Sequenced, ...]]:
        """The fingerprints that ranks agreed on, those of dropped artifacts included."""
        return set(self._agreed)

    def clear(self) -> None:
        """Forget all artifacts, and what ranks agreed on."""
        with _order_lock:
            super().clear()
            self.kinds = Kinds()
            self._agreed.clear()


def call_fitting(artifacts: Artifacts, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the first artifact that fits and move it to the front; `MISS` if none fits."""
    for position, artifact in enumerate(tuple(artifacts)):
        result = artifact.call(args, kwargs)
        if result is not MISS:
            if position:
                artifacts.put_first(artifact)
            return result
    return MISS


def load(compilation: Compilation, fit: Guards) -> Artifact:
    """Print the runtime of a compilation, with the guards `fit`, and load it."""
    if compilation.settings.keep_freed_memory:
        keep_freed_memory()
    printer = Printer(fit.variables)
    agreed = fingerprint_of(compilation)
    checks = checks_of(compilation, agreed)
    hooks, run = HookPlan(compilation.traced.facts.backward), "region"
    forward, *_ = compilation.emitted().values()
    printing = ForwardPrinter(
        printer,
        fit.primal_variables(),
        fit.numbers.symbols(),
        fit.numbers.unbacked,
        _watched(_forward(compilation, forward), checks["forward"]),
    )
    match compilation.region:
        case Training() as region:
            backward = _backward(compilation, region, agreed, checks["backward"])
            hooks = _hooks(compilation, region, backward)
            changes, run = compilation.captured.in_backward.whole, "Node.apply"
            print_node(printing, region.node, backward, changes, has_classes=fit.has_classes())
        case Inference() as region:
            print_inference(
                printing,
                compilation.plans.inside,
                region.graph.sizes(),
                views=result_views(region.graph),
                recorded=_is_recorded(compilation),
            )
        case _:
            assert_never(compilation.region)
    # It then returns results with a history under `no_grad`.
    enables_grad = isinstance(compilation.region, Training) and not compilation.captured.ambient.grad
    returned = Returned.of(compilation.traced.facts)
    print_call(printer, fit, run, compilation.plans, returned, hooks, enables_grad=enables_grad)
    call = printer.load("call", compilation.captured.name)
    return Artifact(
        call, printer.source(), without_tensors(compilation), fit.without_tensors(), agreed, checks["forward"]
    )


def without_autocast(call: BoxedCall) -> BoxedCall:
    """`call` with autocast off: the casts are part of a traced graph."""

    def run(args: list[Any]) -> Sequence[Any]:
        if not any_autocast():
            return call(args)
        with autocast_off():
            return call(args)

    return run


def _forward(compilation: Compilation, emitted: Emitted) -> BoxedCall:
    return without_autocast(emitted.call) if compilation.captured.ambient.autocast else emitted.call


def _backward(
    compilation: Compilation, region: Training, agreed: Sequence[Sequenced], check: RunCheck | None
) -> Backward:
    rules = compilation.captured.environment.rules

    def after() -> None:
        for claim in rules:
            claim.rule.after_backward(claim.root)

    agree_on, ahead = agreeing_on_backwards(compilation, agreed), region.joint.split.backward

    def guarded(call: BoxedCall, graph: Graph) -> BoxedCall:
        return _watched(without_autocast(call), check if graph is ahead else agree_on(graph))

    region = replace(region, guarded=guarded)
    return Backward(region, after if rules else None, compilation.captured.in_backward)


def nodes_of(region: Training) -> Nodes:
    """The autograd node of a backward that is differentiated itself, for the sizes of a call."""
    forward = without_autocast(region.halves.forward.call)

    def guarded(call: BoxedCall, _: Graph) -> BoxedCall:
        return without_autocast(call)

    backward = Backward(replace(region, guarded=guarded))
    primals = [f"primal_{number}" for number in range(len(region.node.backward.grads))]

    @functools.cache
    def printed(symbols: tuple[str, ...]) -> Any:
        printer = Printer((*primals, *symbols))
        printing = ForwardPrinter(printer, primals, symbols, {}, forward)
        print_node(printing, region.node, backward, NOTHING, has_classes=False)
        return printer.load("Node", "backward of a backward")

    def of_sizes(symbols: Mapping[str, int]) -> Call:
        run, more = printed(tuple(symbols)).apply, [symbols] if symbols else []

        def call(given: Sequence[Any]) -> list[Any]:
            with class_functions_off():
                return list(run(*given, *more))

        return call

    return of_sizes


def _hooks(compilation: Compilation, region: Training, backward: Backward) -> HookPlan:
    facts, node = compilation.traced.facts, region.node
    gates = plan_gates(region.joint.cut, facts)
    return HookPlan(
        facts.backward,
        siblings=tuple(node.with_siblings()),
        detached=tuple(node.without_grad(compilation.traced.program.examples)),
        silenced=tuple(_silenced(facts, node)),
        gated=schedule(compilation.plans, gates, facts.backward) if gates else (),
        pieces=backward.pieces,
    )


def _silenced(facts: Facts, node: NodePlan) -> list[PrimalIdx]:
    """Inputs that get no gradient from some of the results; none if there is one result."""
    if len(node.differentiable()) == 1:
        return []
    written = facts.written()
    return [idx for idx, grad in node.backward.grads.enumerate() if grad is not None and idx not in written]


def _watched(call: BoxedCall, check: RunCheck | None) -> BoxedCall:
    """`call`, which checks ranks before each run, and names lost ranks after one that fails."""
    if check is None:
        return call
    watch = LossWatch.of(check)

    def watched(args: list[Any]) -> Sequence[Any]:
        with watch:
            return call(args)

    return watched


def _is_recorded(compilation: Compilation) -> bool:
    """Whether autograd would record an inference graph: grad mode is on, and some input requires grad."""
    examples = compilation.traced.program.examples
    return compilation.captured.ambient.grad and any(example.requires_grad for example in examples)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_KEPT = (1 << 31) - 1
_MOST_ON_HEAP = 32 << 20
"""The most that `mallopt` takes, and the largest block that glibc puts on its heap."""
_USERS_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which the user has configured the allocator."""


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep what lies free at the end of its heap, up to 2 GiB, for the rest of the process.

    A compiled step frees its intermediates one after the other, up to the end of the heap. By default glibc
    returns more than 62 MiB of free memory there, and all blocks of over 32 MiB, to the system; the next step
    then zeroes and maps them page by page, which takes a sixth of a small step (20,000 pages of 93 ms), in
    some processes and not in others, depending on where blocks lie. Other allocators ignore `mallopt`, and an
    allocator that the user has configured is left alone.
    """
    if any(name in os.environ for name in _USERS_CHOICE):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Setting one of them stops glibc from adjusting both, so both are set.
        mallopt(_MMAP_THRESHOLD, _MOST_ON_HEAP)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
