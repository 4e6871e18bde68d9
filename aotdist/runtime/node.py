"""The autograd node around one compiled forward and backward, as a call; `plan.py` has its plan.

The node of a backward that is differentiated in turn runs so, and the printed node
(`aotdist.runtime.print_node`) is tested against it: the same steps, found by walking the plan at every call
instead of once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from aotdist.aliasing.overwrite import version_of
from aotdist.codegen.contract import BoxedCall
from aotdist.convention.mutation import write_plain
from aotdist.program import Call
from aotdist.runtime.backward import Backward
from aotdist.runtime.held import run_once
from aotdist.runtime.plan import NodePlan, detached_views, saved_beside
from aotdist.runtime.wrappers import check_unwritten
from aotdist.sizes import evaluate
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.ambient import any_autocast, autocast_off
from aotdist.torch_seam.modes import class_functions_off
from aotdist.torch_seam.tensors import counter_of


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
            outs = plan.inside.unwrap.rebuilt(values)
            saved, kept, late = plan.saved, plan.kept_inputs, plan.backward_writes
            ctx.save_for_backward(*_saved(plan, plains, results))
            ctx.kept_primals = tuple(primals[idx] for idx in kept.primals)
            ctx.versions = tuple(version_of(ctx.kept_primals[k]) for k, _ in kept.unsaved)
            ctx.symbols = symbols
            ctx.written = [plains[idx] for idx in late.plains]
            ctx.bumped = [primals[idx] for idx in late.wrappers]
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
            if plan.backward_writes.once:
                run_once(ctx)
            with class_functions_off():
                return backward(ctx, *(tangents[idx] for idx in plan.differentiable()))

    return lambda primals: list(Node.apply(*primals))


def _saved(plan: NodePlan, plains: Sequence[Any], results: Sequence[Any]) -> Iterator[torch.Tensor]:
    yield from (plains[plain].detach() if changes else plains[plain] for plain, changes in plan.saved.inputs)
    values = (results[position] for position in plan.saved.results)
    yield from map(saved_beside, values) if plan.inside.unwrap.versions else values


def without_autocast(call: BoxedCall) -> BoxedCall:
    """`call` with autocast off: a traced graph already holds its casts."""

    def quiet(args: list[Any]) -> Sequence[Any]:
        if not any_autocast():
            return call(args)
        with autocast_off():
            return call(args)

    return quiet
