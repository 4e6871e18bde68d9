"""A compiled call, loaded: what the user's call runs, and what it can be asked about."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from aotdist.capture.captured import Returned
from aotdist.capture.effects import NOTHING
from aotdist.capture.in_backward import InBackward
from aotdist.codegen.contract import BoxedCall, Emitted
from aotdist.facts import Facts
from aotdist.program import Call, Graph, PrimalIdx
from aotdist.runtime.backward import Backward
from aotdist.runtime.backwards import Guard
from aotdist.runtime.compilation import Compilation, Inference, Training, without_tensors
from aotdist.runtime.double_backward import Nodes
from aotdist.runtime.gate import Gates, schedule
from aotdist.runtime.guards import MISS, Guards
from aotdist.runtime.kinds import Kinds
from aotdist.runtime.plan import NodePlan, result_views
from aotdist.runtime.print_call import HookPlan, print_call
from aotdist.runtime.print_node import ForwardPrinter, print_inference, print_node
from aotdist.runtime.printer import Printer
from aotdist.runtime.ranks import (
    LossWatch,
    RunCheck,
    Sequenced,
    agreeing_on_backwards,
    fingerprint_of,
    watches_of,
)
from aotdist.torch_seam.ambient import any_autocast, autocast_off
from aotdist.torch_seam.modes import class_functions_off
from aotdist.torch_seam.patches import process_lock


@dataclass(frozen=True, slots=True)
class Artifact:
    """One compiled signature.

    Args:
        call: `(args, kwargs)` to the user's result, or `MISS`.
        source: the printed code of `call`, the autograd node included.
        compilation: how it came to be, without the tensors of the call.
        fit: when it fits a call, likewise.
        agreed: what its ranks agreed on, see `fingerprint_of`.
        check: what stands before a run of its forward.
    """

    call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    source: str
    compilation: Compilation
    fit: Guards
    agreed: tuple[Sequenced, ...]
    check: RunCheck | None


_order = process_lock()


class Artifacts(list[Artifact]):
    """The artifacts of one function, the one used last first.

    Another thread that looks for one finds it at any time.

    Attributes:
        kinds: what was decided about kinds of calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds = Kinds()
        self._agreed: set[tuple[Sequenced, ...]] = set()

    def put_first(self, artifact: Artifact) -> None:
        """Let an artifact be the first, new or not.

        As many are kept as its settings say; those used longest ago are dropped. What they computed can be
        differentiated as before, and what ranks agreed on for them holds: a rank that compiles one again does
        so alone.
        """
        with _order:
            self._agreed.add(artifact.agreed)
            if all(one is not artifact for one in self):
                # The last artifact keeps autograd's graph of its trace, for gradients of gradients.
                for region in (one.compilation.region for one in self):
                    if isinstance(region, Training):
                        region.backwards.forget_trace()
            ordered = [artifact, *(one for one in self if one is not artifact)]
            self[:] = ordered[: artifact.compilation.settings.max_artifacts]

    def agreed(self) -> set[tuple[Sequenced, ...]]:
        """What ranks agreed on, also for artifacts that were dropped."""
        return set(self._agreed)

    def clear(self) -> None:
        """Forget all of them, and what ranks agreed on."""
        with _order:
            super().clear()
            self.kinds = Kinds()
            self._agreed.clear()


def call_fitting(artifacts: Artifacts, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the artifact that fits and move it to the front, where it is tried first; `MISS` if none fits."""
    for position, artifact in enumerate(tuple(artifacts)):
        result = artifact.call(args, kwargs)
        if result is not MISS:
            if position:
                artifacts.put_first(artifact)
            return result
    return MISS


def load(compilation: Compilation, fit: Guards) -> Artifact:
    """Print the runtime of a compilation, for the calls that it fits, and load it."""
    if compilation.settings.keep_freed_memory:
        keep_freed_memory()
    printer = Printer(fit.variables)
    agreed = fingerprint_of(compilation)
    watches = watches_of(compilation, agreed)
    hooks = HookPlan((), (), ())
    forward, *_ = compilation.emitted().values()
    printing = ForwardPrinter(
        printer,
        fit.primal_variables(),
        fit.numbers.symbols(),
        fit.numbers.told,
        _watched(_forward(compilation, forward), watches["forward"]),
    )
    match compilation.region:
        case Training() as region:
            backward = _backward(compilation, region, agreed, watches["backward"])
            hooks = _hooks(compilation, region, backward)
            changes = compilation.captured.in_backward.whole
            print_node(printing, region.node, backward, changes, has_classes=fit.has_classes())
            run = "Node.apply"
        case Inference() as region:
            print_inference(
                printing,
                compilation.plans.inside,
                region.graph.sizes(),
                views=result_views(region.graph),
                recorded=_is_recorded(compilation),
            )
            run = "region"
        case _:
            assert_never(compilation.region)
    enables_grad = _enables_grad(compilation)
    returned = Returned.of(compilation.traced.facts)
    print_call(printer, fit, run, compilation.plans, returned, hooks, enables_grad=enables_grad)
    call = printer.load("call", compilation.captured.name)
    kept, watch = (without_tensors(compilation), fit.without_tensors()), watches["forward"]
    return Artifact(call, printer.source(), *kept, agreed, None if watch is None else watch.check)


def without_autocast(call: BoxedCall) -> BoxedCall:
    """`call` with autocast off: a traced graph already holds its casts."""

    def quiet(args: list[Any]) -> Sequence[Any]:
        if not any_autocast():
            return call(args)
        with autocast_off():
            return call(args)

    return quiet


def _forward(compilation: Compilation, emitted: Emitted) -> BoxedCall:
    return without_autocast(emitted.call) if compilation.captured.ambient.autocast else emitted.call


def _backward(
    compilation: Compilation, region: Training, agreed: Sequence[Sequenced], watch: LossWatch | None
) -> Backward:
    rules = compilation.captured.environment.rules

    def after() -> None:
        for claim in rules:
            claim.rule.after_backward(claim.root)

    agree_on, ahead = agreeing_on_backwards(compilation, agreed), region.graphs.split.backward

    def guarded(call: BoxedCall, graph: Graph) -> BoxedCall:
        around, call = watch, without_autocast(call)
        if graph is not ahead:
            check = agree_on(graph)
            around = None if watch is None else watch.checking(check)
        return _watched(call, around)

    return backward_of(region, guarded, after if rules else None, compilation.captured.in_backward)


def backward_of(
    region: Training, guarded: Guard, after: Callable[[], None] | None, in_python: InBackward | None = None
) -> Backward:
    """What runs in the backward of a region's node.

    Args:
        region: the region.
        guarded: what stands around each backward.
        after: called once the gradients are computed, if anything is.
        in_python: what backwards change in Python.
    """
    return Backward(region.node, replace(region.backwards, guarded=guarded), after, in_python)


def nodes_of(region: Training) -> Nodes:
    """The node of the backward of a program, which is a program itself, for the sizes of a call."""
    forward = without_autocast(region.halves.forward.call)
    backward = backward_of(region, lambda call, _: without_autocast(call), None)
    primals = [f"primal_{number}" for number in range(len(region.node.grads))]

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
    gates, node = _gates(compilation, region, backward), region.node
    return HookPlan(
        shielded=tuple(node.with_siblings() if gates is None else gates.at_once()),
        detached=tuple(node.without_grad(compilation.traced.program.examples)),
        silenced=tuple(_silenced(compilation.traced.facts, node)),
        gates=gates,
    )


def _gates(compilation: Compilation, region: Training, backward: Backward) -> Gates | None:
    if not region.gates:
        return None
    facts = compilation.traced.facts.backward
    steps = schedule(compilation.plans, region.gates, facts)
    shielded = tuple(region.node.with_siblings())
    return Gates(steps, facts, backward.pieces, shielded)


def _silenced(facts: Facts, node: NodePlan) -> list[PrimalIdx]:
    """Inputs that a backward of some results may bring no gradient; none if there is one result."""
    if len(node.differentiable()) == 1:
        return []
    written = facts.written()
    return [idx for idx, grad in node.grads.enumerate() if grad is not None and idx not in written]


def _watched(call: BoxedCall, watch: LossWatch | None) -> BoxedCall:
    """`call`, with what stands around every run of a graph that communicates."""
    if watch is None:
        return call

    def watched(args: list[Any]) -> Sequence[Any]:
        with watch:
            return call(args)

    return watched


def _enables_grad(compilation: Compilation) -> bool:
    """Whether results have history although the caller has grad mode off: the program switches it on."""
    return isinstance(compilation.region, Training) and not compilation.captured.ambient.grad


def _is_recorded(compilation: Compilation) -> bool:
    """Whether autograd would record an inference graph: grad mode is on, though no result has history."""
    examples = compilation.traced.program.examples
    return compilation.captured.ambient.grad and any(example.requires_grad for example in examples)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_KEPT = (1 << 31) - 1
_MOST_ON_HEAP = 32 << 20
"""The most that `mallopt` takes, and the largest block that glibc puts on its heap."""
_TOLD_OTHERWISE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep what lies free at the end of its heap, up to 2 GiB, for the rest of the process.

    A compiled step frees its intermediates one after the other, up to the end of the heap. By itself glibc
    gives back to the system what is more than 62 MiB of it, and all blocks of over 32 MiB; in the next step
    they are zeroed and mapped page by page, for a sixth of the time of a small one (20,000 pages of 93 ms),
    in some processes and not in others, as blocks happen to lie. Other allocators do not mind, and one that
    the environment tells otherwise is left alone.
    """
    if any(name in os.environ for name in _TOLD_OTHERWISE):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Either setting ends glibc's own adjustments of both, so both are set.
        mallopt(_MMAP_THRESHOLD, _MOST_ON_HEAP)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
