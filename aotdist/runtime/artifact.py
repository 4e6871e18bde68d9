"""Artifacts: loaded compilations that calls run, and what each callable keeps: these, and what is refused."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import torch
from torch import nn

from aotdist.capture.ambient import ambient
from aotdist.capture.captured import Returned, UserCall
from aotdist.capture.constants import is_constant, is_leaf
from aotdist.capture.effects import NOTHING
from aotdist.codegen.contract import BoxedCall, Emitted
from aotdist.errors import UnsupportedProgram
from aotdist.facts import Facts
from aotdist.partition.gates import plan_gates
from aotdist.program import Call, Graph, PrimalIdx
from aotdist.runtime.backward import Backward
from aotdist.runtime.backwards import Training
from aotdist.runtime.compilation import Compilation, Inference, without_tensors
from aotdist.runtime.double_backward import Nodes
from aotdist.runtime.guards import MISS, Guards
from aotdist.runtime.hooks import HookPlan, schedule
from aotdist.runtime.plan import NodePlan, result_views
from aotdist.runtime.print_call import print_call
from aotdist.runtime.print_node import ForwardPrinter, print_inference, print_node
from aotdist.runtime.printer import Printer
from aotdist.runtime.ranks import (
    LossWatch,
    RunCheck,
    Sequenced,
    agreeing_on_backwards,
    board_of_this_process,
    checks_of,
    fingerprint_of,
)
from aotdist.torch_seam.ambient import any_autocast, autocast_off
from aotdist.torch_seam.modes import class_functions_off
from aotdist.torch_seam.patches import process_lock
from aotdist.torch_seam.trees import pytree


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


_MANY_REFUSALS = 8
"""After so many of one function, calls run eagerly whatever their arguments are."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a call, by which `Settings(unsupported="eager")` decides what runs eagerly.

    Calls of one kind have the same types, sizes and constants of arguments, ambient modes and training flags.
    Several ranks must decide the same, and their arguments differ, so there only modes and flags count, and
    the first call of a kind decides. If it is refused on some rank, all ranks run such calls eagerly from
    then on. If all agree on what they compiled, a later refusal is an error, as peers may be running the
    compiled program.

    Args:
        common: digest of what is the same on all ranks: modes and training flags.
        whole: that, and a description of the arguments.
    """

    common: str
    whole: str

    @classmethod
    def of(cls, call: UserCall) -> Kind:
        """The kind of a call."""
        target = call.target
        training = [module.training for module in target.modules()] if isinstance(target, nn.Module) else []
        # A rank has a device of its own, and functions at addresses of its own.
        modes = ambient()._replace(device=None, dtensor=None)
        common = hashlib.sha256(repr((call.name, call.number, modes, training)).encode()).hexdigest()[:32]
        arguments = (call.args, dict(sorted(call.kwargs.items())))
        leaves, spec = pytree.tree_flatten(arguments, is_leaf=is_leaf)
        return cls(common, repr((common, spec, list(map(_described, leaves)))))


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        shape = None if leaf.is_nested else leaf.shape
        return type(leaf), shape, leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad
    return type(leaf), leaf if is_constant(leaf) else None


class Artifacts(list[Artifact]):
    """The artifacts of one function, most recently used first; other threads may read the list at any time.

    Attributes:
        refused: the reason by `common` or `whole` of each kind of call that runs eagerly.
        compiled_kinds: the `common` of kinds that ranks agreed to run compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}
        self.compiled_kinds = set[str]()
        self._num_refusals = Counter[str]()
        self._agreed: set[tuple[Sequenced, ...]] = set()

    def refuse(self, kind: Kind, refusal: UnsupportedProgram) -> bool:
        """Run calls of a kind eagerly from now on; returns whether the reason is new."""
        reason = f"{refusal.what}, at {refusal.where}" if refusal.where else refusal.what
        is_new = reason not in self.refused.values()
        self._num_refusals[kind.common] += 1
        is_many = self._num_refusals[kind.common] >= _MANY_REFUSALS
        any_arguments = is_many or board_of_this_process() is not None
        self.refused[kind.common if any_arguments else kind.whole] = reason
        return is_new

    def is_refused(self, kind: Kind) -> bool:
        """Whether calls of a kind run eagerly."""
        return kind.common in self.refused or kind.whole in self.refused

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
            for decisions in (self.refused, self.compiled_kinds, self._num_refusals, self._agreed):
                decisions.clear()


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
