"""A compiled call, loaded: what the user's call runs, and what it can be asked about."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, assert_never

import torch

from aotdist.capture.capture import Captured
from aotdist.capture.in_backward import InBackward
from aotdist.capture.modules import ModuleGuard
from aotdist.capture.reach import constants_but
from aotdist.capture.source import Source, held_in
from aotdist.codegen.contract import BoxedCall, Emitted
from aotdist.convention.dedupe import DedupePlan
from aotdist.convention.layer import Call
from aotdist.convention.mutation import differentiable_writes
from aotdist.errors import UnsupportedProgram
from aotdist.program import ArgIdx, DistinctIdx, NodeOutIdx, PrimalIdx, Row, Slot
from aotdist.runtime.anomaly import pointing_at_the_forward
from aotdist.runtime.backward import Backward, Part
from aotdist.runtime.compilation import Compilation, Inference, Training
from aotdist.runtime.double_backward import DoubleBackward
from aotdist.runtime.forgetting import fit_without_tensors, without_tensors
from aotdist.runtime.gate import Gates, schedule
from aotdist.runtime.guard import no_overlap, place_in_storage
from aotdist.runtime.heap import keep_freed_memory
from aotdist.runtime.hooks import detaching, shielding, taking_turns
from aotdist.runtime.node import make_node, without_autocast
from aotdist.runtime.other_kinds import OtherKinds
from aotdist.runtime.print_call import MISS, Fit, print_call
from aotdist.runtime.print_node import Watch, print_inference, print_node
from aotdist.runtime.printer import Printer, variable_names
from aotdist.runtime.ranks import naming_lost_ranks
from aotdist.runtime.results import Versions, detached_views, result_views, setting_versions, versions_to_set
from aotdist.runtime.spent import Shares
from aotdist.sizes import SCOPE, concrete, evaluate
from aotdist.subclasses.protocol import plain_tensors


@dataclass(frozen=True, slots=True)
class Artifact:
    """One compiled signature.

    Args:
        call: `(args, kwargs)` to the user's result, or `MISS`.
        source: the printed code of `call`, the autograd node included.
        compilation: how it came to be, without the tensors of the call.
        fit: when it fits, likewise.
    """

    call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    source: str
    compilation: Compilation
    fit: Fit


def call_fitting(artifacts: list[Artifact], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the artifact that fits and move it to the front, where it is tried first; `MISS` if none fits."""
    for position, artifact in enumerate(tuple(artifacts)):
        result = artifact.call(args, kwargs)
        if result is not MISS:
            if position:  # another thread may be looking, or adding one: it is in there at any time
                artifacts.insert(0, artifact)
                del artifacts[artifacts.index(artifact, 1)]
            return result
    return MISS


def load(compilation: Compilation, fit: Fit) -> Artifact:
    """Print the runtime of a compilation, for the calls that it fits, and load it."""
    keep_freed_memory()
    printer = Printer(fit.variables)
    names = fit.primal_variables()
    symbols = fit.symbols()
    plans = compilation.plans
    watch = _watch(compilation)
    gates = None
    match compilation.region:
        case Training() as region:
            backward = _backward(compilation, region, watch)
            gates = _gates(compilation, region, backward)
            print_node(
                printer,
                names,
                symbols,
                region.node,
                _forward(compilation, region.halves.forward),
                backward,
                [(claim.rule.after_backward, claim.root) for claim in compilation.captured.environment.rules],
                compilation.captured.in_backward.whole,
                watch,
                versions=_versions(compilation),
                has_classes=fit.has_classes(),
            )
            run = "Node.apply"
        case Inference() as region:
            print_inference(
                printer,
                names,
                symbols,
                region.graph.sizes(),
                plans.unwrap,
                plans.plain_writes,
                plans.rng,
                _forward(compilation, region.emitted),
                watch,
                views=result_views(region.graph),
                versions=_versions(compilation),
                recorded=_is_recorded(compilation),
            )
            run = "region"
        case _:
            assert_never(compilation.region)
    print_call(
        printer,
        fit,
        run,
        plans,
        compilation.returned,
        enables_grad=_enables_grad(compilation),
        gates=gates,
        shielded=_shielded(compilation, gates),
        detached=_detached(compilation),
        turns=_turns(compilation),
    )
    call = printer.load("call", compilation.captured.name)
    return Artifact(call, printer.source(), without_tensors(compilation), fit_without_tensors(fit))


def _forward(compilation: Compilation, emitted: Emitted) -> BoxedCall:
    return without_autocast(emitted.call) if compilation.captured.ambient.autocast else emitted.call


def _backward(compilation: Compilation, region: Training, watch: Watch) -> Backward:
    rules = compilation.captured.environment.rules

    def after() -> None:
        for claim in rules:
            claim.rule.after_backward(claim.root)

    return backward_of(region, watch, after, compilation.captured.in_backward)


def backward_of(
    region: Training, watch: Watch, after: Callable[[], None], in_python: InBackward | None = None
) -> Backward:
    """What runs in the backward of a region's node.

    Args:
        region: the region.
        watch: what stands around every run of a graph.
        after: is called when the gradients are there.
        in_python: what backwards change in Python.
    """

    def guarded(call: BoxedCall) -> BoxedCall:
        return without_autocast(call) if watch is None else _watched(without_autocast(call), watch)

    def reduced(missing: frozenset[Slot]) -> BoxedCall:
        return guarded(region.reduced(missing))

    def parts(outs: tuple[Slot, ...], arrived: frozenset[Slot], *, in_parts: bool) -> Part:
        part = region.parts(outs, arrived, in_parts=in_parts)
        return Part(guarded(part.call), part.sources)

    node, others, double = region.node, region.others, region.double_backward
    pairs = zip(node.differentiable(), node.tangents, strict=True)
    tangents = {idx: tangent.slots() for idx, tangent in pairs}
    return Backward(
        plan=node,
        whole=without_autocast(pointing_at_the_forward(region.backward, region.split.backward)),
        reduced=reduced,
        parts=parts,
        differentiable_parts=region.differentiable_parts,
        after=after,
        results=region.split.backward.outs,
        other_kinds=None if others is None else OtherKinds(node, others, guarded, after),
        double_backward=None if double is None else DoubleBackward(node, double),
        shares=functools.cache(
            functools.partial(Shares.of, region.split.backward, tangents, len(node.saved))
        ),
        in_python=in_python,
    )


def _versions(compilation: Compilation) -> Versions:
    unwrap, outs = compilation.plans.unwrap, list(compilation.traced.facts.node_outs)
    match compilation.region:
        case Training() as region:
            return versions_to_set(unwrap, outs, region.split.forward, region.halves.forward)
        case Inference() as region:
            return versions_to_set(unwrap, outs, region.graph, region.emitted)


def _gates(compilation: Compilation, region: Training, backward: Backward) -> Gates | None:
    if not region.gates:
        return None
    passages = compilation.traced.facts.passages
    steps = schedule(compilation.plans, region.gates, passages)
    shielded = tuple(region.node.with_siblings())
    return Gates(steps, passages, backward.pieces, backward.takes, frozenset(region.node.met), shielded)


def _shielded(compilation: Compilation, gates: Gates | None) -> list[NodeOutIdx]:
    """The node's results to shield as soon as they are there."""
    if gates is not None:
        return gates.at_once()
    return compilation.region.node.with_siblings() if isinstance(compilation.region, Training) else []


def _detached(compilation: Compilation) -> list[PrimalIdx]:
    """Inputs to hand to the node without their history."""
    examples = compilation.traced.program.examples
    return compilation.region.node.without_grad(examples) if isinstance(compilation.region, Training) else []


def _turns(compilation: Compilation) -> list[PrimalIdx]:
    """Inputs that get gradients and are not written, in the order in which these arrive.

    None where that does not matter: one input, one result.
    """
    if not isinstance(compilation.region, Training):
        return []
    grads, facts = compilation.region.node.grads, compilation.traced.facts
    written = facts.written()
    found = [idx for idx in facts.arrived if grads[idx] is not None and idx not in written]
    return found if len(found) > 1 or len(compilation.region.node.differentiable()) > 1 else []


def _watched(call: BoxedCall, watch: AbstractContextManager[Any]) -> BoxedCall:
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


def _watch(compilation: Compilation) -> Watch:
    watch = naming_lost_ranks(
        compilation.collectives(), label=compilation.captured.name, settings=compilation.settings
    )
    return None if isinstance(watch, nullcontext) else watch


def reference(artifact: Artifact) -> Call:
    """The composed lifts: what the printed call is tested against. Takes the arguments, then the sources."""
    compilation, fit = artifact.compilation, artifact.fit

    def inner(primals: Sequence[Any]) -> list[Any]:
        return _lifted(compilation, fit.sizes.read(primals))(primals)

    return fit.dedupe.lift(compilation.bases.lift(inner))


def _lifted(compilation: Compilation, symbols: Mapping[str, int]) -> Call:
    """The layers inside of the synthetic bases, in a call of these sizes."""
    plans, gates = concrete(compilation.plans, symbols), None
    match compilation.region:
        case Training() as region:
            forward = _forward(compilation, region.halves.forward)
            backward = _backward(compilation, region, None)
            node, versions = concrete(region.node, symbols), _versions(compilation)
            call = make_node(node, forward, backward, symbols, versions)
            gates = _gates(compilation, region, backward)
        case Inference() as region:
            forward, views = _forward(compilation, region.emitted), result_views(region.graph)
            sizes = [evaluate(size, symbols) for size in region.graph.sizes()]
            call = plans.lift_inside(lambda given: detached_views(forward(list(given)), views), sizes)
            call = setting_versions(call, _versions(compilation))
            call = torch.no_grad()(call) if _is_recorded(compilation) else call
        case _:
            assert_never(compilation.region)
    if gates is not None:
        return plans.switched_on.lift(gates.lift(plans, call))
    call = shielding(call, _shielded(compilation, gates))
    call = taking_turns(call, _turns(compilation))
    call = detaching(call, _detached(compilation))
    return plans.lift_outside(call, enables_grad=_enables_grad(compilation))


def fit_of(compilation: Compilation) -> Fit:
    """When the compiled program fits a call."""
    captured, traced = compilation.captured, compilation.traced
    environment = captured.environment
    facts = traced.facts
    written = set(facts.written())
    written |= {idx for idx in compilation.bases.bases.indices() if compilation.bases.is_span(idx)}
    counts = traced.symbols.counts()
    open_ = {count.place.spot() for count in counts}
    guard = ModuleGuard(environment.modules, environment.state, environment.reached.names, open_)
    holds: list[tuple[str, Callable[[], bool]]] = [("modules_hold", guard)] if environment.modules else []
    holds += [(f"{claim.rule.name}_holds", claim.holds) for claim in environment.rules]
    sources = _sources(compilation)
    inputs = {source.spot() for source in sources}
    paths = [*captured.arguments.tensor_paths(), *(source.path for source in sources)]
    base_paths = [slot.path for at, slot in traced.program.ins.enumerate() if compilation.bases.is_new(at)]
    sizes = traced.symbols.sizes()
    symbols = [*(name for name, _ in sizes.symbols), *(count.name for count in counts)]
    names = variable_names([*paths, *base_paths], [*SCOPE, *symbols])
    return Fit(
        arguments=captured.arguments,
        variables=tuple(names[: len(paths)]),
        sources=sources,
        dedupe=_with_closed_over(compilation),
        bases=compilation.bases,
        base_variables=tuple(names[len(paths) :]),
        slots=traced.program.ins,
        examples=traced.program.examples,
        recipes=facts.recipes,
        sizes=sizes,
        counts=counts,
        written=tuple(sorted(written)),
        with_history=tuple(idx for idx, _, _ in differentiable_writes(facts)),
        asked=facts.asked,
        storages=tuple(
            (idx, leaf, place_in_storage(plain_tensors(traced.program.examples[idx])[leaf]))
            for idx, leaf in facts.storages
        ),
        ambient=captured.ambient,
        holds=tuple(holds),
        # As they are after the trace: what happens at capture only (in sets, to objects) has happened.
        constants=tuple(
            (source, source.read()) for source in constants_but(environment.reached, open_, inputs)
        ),
        identities=(*environment.reached.identities, *_written_in_backward(captured)),
        prepare=tuple((claim.rule.prepare, claim.root) for claim in environment.rules),
    )


def _written_in_backward(captured: Captured) -> Iterator[tuple[Source, Any]]:
    """Objects and containers that a backward writes: those of the capture, so a call must find the same."""
    for held in held_in(captured.in_backward.whole.changed()):
        yield held.source, held.example


def _sources(compilation: Compilation) -> tuple[Source, ...]:
    captured = compilation.captured
    state = [tensor.source() for tensor in captured.environment.state]
    examples = compilation.traced.program.examples
    return (*state, *(captured.source_of(examples[idx]) for idx in compilation.met()))


def _with_closed_over(compilation: Compilation) -> DedupePlan:
    """The plan with the closed-over tensors, which are distinct, at the end."""
    deduped = compilation.deduped
    num_args, num_distinct = len(deduped.source), len(deduped.kept)
    extra = range(len(compilation.met()))
    kept = [*deduped.kept, *(ArgIdx(num_args + offset) for offset in extra)]
    source = [*deduped.source, *(DistinctIdx(num_distinct + offset) for offset in extra)]
    return DedupePlan(Row(kept), Row(source))


def refuse_overlap(fit: Fit) -> None:
    """Refuse a program that writes an input which shares memory with another, and with no base in common.

    Raises:
        UnsupportedProgram: naming both.
    """
    apart = {at: plains for at, plains in fit.plains_apart(fit.examples.map(plain_tensors))}
    for idx in fit.written:
        for other, plains in apart.items():
            if other != idx and not no_overlap(apart[idx], plains):
                raise UnsupportedProgram(
                    f"`{fit.slots[idx]}` is written and shares memory with `{fit.slots[other]}`",
                    stage="convention",
                    fix=f"pass `{fit.slots[other]}` as a view made inside the function, or clone one of them",
                )
