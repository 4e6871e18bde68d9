"""The composed lifts of an artifact: what its printed call is tested against."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, assert_never

import torch

from aotdist.aliasing.overwrite import put, version_of
from aotdist.codegen.contract import BoxedCall
from aotdist.convention.epilogue import Outputs
from aotdist.convention.mutation import write_plain
from aotdist.convention.stack import Plans
from aotdist.convention.subclass import rebuild_all
from aotdist.facts import Fresh
from aotdist.partition.gates import Gate
from aotdist.program import Call
from aotdist.runtime import artifact as runtime
from aotdist.runtime.artifact import Artifact
from aotdist.runtime.backward import Backward
from aotdist.runtime.backwards import Training
from aotdist.runtime.compilation import Compilation, Inference
from aotdist.runtime.held import check_unwritten, run_once
from aotdist.runtime.hooks import HookPlan, make_gate, shield, with_silenced_hooks
from aotdist.runtime.plan import NodePlan, result_views
from aotdist.sizes import concrete, evaluate
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.modes import class_functions_off
from aotdist.torch_seam.tensors import counter_of


def reference(artifact: Artifact) -> Call:
    """Takes the arguments of a call, then the sources."""
    compilation, fit = artifact.compilation, artifact.fit

    def inner(primals: Sequence[Any]) -> list[Any]:
        sizes = {
            name: eval(measure.spelled("tensor"), {"tensor": primals[measure.input]})
            for name, measure in fit.numbers.sizes.symbols
        }
        return lifted(compilation, sizes)(primals)

    return fit.dedupe.lift(compilation.bases.lift(inner))


def lifted(compilation: Compilation, symbols: Mapping[str, int]) -> Call:
    """The layers inside of the synthetic bases, in a call of these sizes."""
    plans = concrete(compilation.plans, symbols)
    hooks, enables_grad = HookPlan(compilation.traced.facts.backward), False
    match compilation.region:
        case Training() as region:
            forward = runtime._forward(compilation, region.halves.forward)
            backward = runtime._backward(compilation, region, (), None)
            call = make_node(concrete(region.node, symbols), forward, backward, symbols)
            hooks = runtime._hooks(compilation, region, backward)
            enables_grad = not compilation.captured.ambient.grad
        case Inference() as region:
            forward, views = runtime._forward(compilation, region.emitted), result_views(region.graph)
            sizes = [evaluate(size, symbols) for size in region.graph.sizes()]
            call = plans.inside.lift(lambda given: detached_views(forward(list(given)), views), sizes)
            call = torch.no_grad()(call) if runtime._is_recorded(compilation) else call
        case _:
            assert_never(compilation.region)
    if hooks.gated:
        return through_gates(hooks, plans, call)
    return plans.lift_outside(hooked(call, hooks), enables_grad=enables_grad)


def make_node(
    plan: NodePlan,
    forward: BoxedCall,
    backward: Backward,
    symbols: Mapping[str, int],
) -> Call:
    """The node as a call.

    Args:
        plan: how tensors pass.
        forward: plain inputs, sizes -> results, then saved values.
        backward: what runs in the backward.
        symbols: of this call.
    """

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *primals: Any) -> Any:
            with class_functions_off():
                return Node.compute(ctx, primals)

        @staticmethod
        def compute(ctx: Any, primals: Sequence[Any]) -> Any:
            plains = [plain for primal in primals for plain in plain_tensors(primal)]
            ctx.rng = plan.inside.rng.state()
            sizes = [evaluate(size, symbols) for size in plan.sizes]
            results = list(forward([*plains, *sizes, *ctx.rng]))
            for plain, position, bumps in plan.inside.writes.writes:
                write_plain(plains[plain], results[position], bumps)
            plan.inside.unwrap.count(primals)
            values = detached_views(results[: plan.inside.writes.num_values], plan.views)
            outs = rebuild_all(plan.inside.unwrap.outs, values)
            saved, kept, late = plan.saved, plan.kept_inputs, plan.backward_writes
            ctx.save_for_backward(*_saved(plan, plains, results))
            ctx.kept_primals = tuple(primals[idx] for idx in kept.primals)
            ctx.versions = tuple(version_of(ctx.kept_primals[k]) for k, _ in kept.unsaved)
            ctx.symbols = symbols
            ctx.written = [plains[idx] for idx in late.plains]
            ctx.bumped = [primals[idx] for idx, _ in late.wrappers]
            ctx.mark_non_differentiable(
                *(outs[idx] for idx, out in plan.outs.enumerate() if not out.differentiable)
            )
            held = [primals[idx] for idx in saved.wrappers.ins]
            held += [counter_of(outs[idx]) for idx in saved.wrappers.outs]
            ctx.wrappers = tuple((wrapper, wrapper._version) for wrapper in held)
            ctx.set_materialize_grads(False)
            return tuple(outs)

        @staticmethod
        def backward(ctx: Any, *tangents: Any) -> Any:
            check_unwritten(ctx.wrappers, plan.saved.wrappers.names)
            if plan.backward.once:
                run_once(ctx)
            with class_functions_off():
                return backward(ctx, *(tangents[idx] for idx in plan.differentiable()))

    return lambda primals: list(Node.apply(*primals))


def _saved(plan: NodePlan, plains: Sequence[Any], results: Sequence[Any]) -> Iterator[torch.Tensor]:
    yield from (plains[plain].detach() if changes else plains[plain] for plain, changes in plan.saved.inputs)
    yield from (results[position] for position in plan.saved.results)


def detached_views(results: Sequence[Any], views: frozenset[int]) -> list[Any]:
    """`results` with those at `views` detached, which keeps memory and version counter."""
    return [value.detach() if position in views else value for position, value in enumerate(results)]


def hooked(call: Call, hooks: HookPlan) -> Call:
    """`call`, with its results shielded, and its inputs silenced or detached."""

    def hooked_call(primals: Sequence[Any]) -> list[Any]:
        given = [p.detach() if k in hooks.detached else p for k, p in enumerate(primals)]
        values = call(with_silenced_hooks(hooks.silenced, *given))
        shield(*(values[idx] for idx in hooks.at_once()))
        return values

    return hooked_call


def through_gates(hooks: HookPlan, plans: Plans, call: Call) -> Call:
    """Lead the node's values through the gates, write inputs and make outputs."""

    def led(primals: Sequence[Any]) -> list[Any]:
        outs = Outputs(plans.epilogue, primals)
        plans.writes.prepare(primals)
        outs.values = values = list(call(primals))
        plans.epilogue.count(primals)
        shield(*(values[idx] for idx in hooks.at_once()))
        before = None
        for step in hooks.gated:
            match step:
                case Gate():
                    places = hooks.places(step)
                    points = [values[p.value] if isinstance(p, Fresh) else outs.make(p) for p in places]
                    before = make_gate(hooks, step)(values, points, before)
                case (primal, value, bumps):
                    put(primals[primal], values[value], bumps)
                case _:
                    outs.do(step)
        return outs.in_order()

    return led
