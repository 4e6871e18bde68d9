"""The composed lifts of an artifact: what its printed call is tested against."""

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import torch

from aotdist.aliasing.overwrite import put
from aotdist.convention.epilogue import Outputs
from aotdist.convention.stack import Plans
from aotdist.facts import Fresh
from aotdist.partition.gates import Gate
from aotdist.program import Call
from aotdist.runtime import artifact as runtime
from aotdist.runtime.artifact import Artifact
from aotdist.runtime.compilation import Compilation, Inference, Training
from aotdist.runtime.gate import Gates, make_gate
from aotdist.runtime.hooks import shield, with_silenced_hooks
from aotdist.runtime.node import make_node
from aotdist.runtime.plan import detached_views, result_views
from aotdist.runtime.print_call import HookPlan
from aotdist.sizes import concrete, evaluate


def reference(artifact: Artifact) -> Call:
    """Takes the arguments of a call, then the sources."""
    compilation, fit = artifact.compilation, artifact.fit

    def inner(primals: Sequence[Any]) -> list[Any]:
        return lifted(compilation, fit.numbers.sizes.read(primals))(primals)

    return fit.dedupe.lift(compilation.bases.lift(inner))


def lifted(compilation: Compilation, symbols: Mapping[str, int]) -> Call:
    """The layers inside of the synthetic bases, in a call of these sizes."""
    plans, hooks = concrete(compilation.plans, symbols), HookPlan((), (), ())
    match compilation.region:
        case Training() as region:
            forward = runtime._forward(compilation, region.halves.forward)
            backward = runtime._backward(compilation, region, (), None)
            call = make_node(concrete(region.node, symbols), forward, backward, symbols)
            hooks = runtime._hooks(compilation, region, backward)
        case Inference() as region:
            forward, views = runtime._forward(compilation, region.emitted), result_views(region.graph)
            sizes = [evaluate(size, symbols) for size in region.graph.sizes()]
            call = plans.inside.lift(lambda given: detached_views(forward(list(given)), views), sizes)
            call = torch.no_grad()(call) if runtime._is_recorded(compilation) else call
        case _:
            assert_never(compilation.region)
    if hooks.gates is not None:
        return through_gates(hooks.gates, plans, call)
    return plans.lift_outside(hooked(call, hooks), enables_grad=runtime._enables_grad(compilation))


def hooked(call: Call, hooks: HookPlan) -> Call:
    """`call`, with its results shielded, and its inputs silenced or detached."""

    def hooked_call(primals: Sequence[Any]) -> list[Any]:
        given = [p.detach() if k in hooks.detached else p for k, p in enumerate(primals)]
        values = call(with_silenced_hooks(hooks.silenced, *given))
        shield(*(values[idx] for idx in hooks.shielded))
        return values

    return hooked_call


def through_gates(gates: Gates, plans: Plans, call: Call) -> Call:
    """Lead the node's values through the gates, write inputs and make outputs."""

    def led(primals: Sequence[Any]) -> list[Any]:
        outs = Outputs(plans.epilogue, primals)
        plans.writes.prepare(primals)
        outs.values = values = list(call(primals))
        plans.epilogue.count(primals)
        shield(*(values[idx] for idx in gates.at_once()))
        before = None
        for step in gates.steps:
            match step:
                case Gate():
                    places = [gates.place(position) for position, _ in step.pieces]
                    points = [values[p.value] if isinstance(p, Fresh) else outs.make(p) for p in places]
                    before = make_gate(gates, step)(values, points, before)
                case (primal, value, bumps):
                    put(primals[primal], values[value], bumps)
                case _:
                    outs.do(step)
        return outs.in_order()

    return led
