"""Joint graphs of small models whose parameters are gathered and reduced as FSDP2's are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.program import Graph
from tests.partition.joint_graphs import record_joint

C10D = torch.ops._c10d_functional
SHARD_GROUP, REPLICA_GROUP = "shard", "replicate"


@dataclass(frozen=True, slots=True)
class Layout:
    """How parameters are sharded: over `world` ranks, replicated over `replicas` groups of such ranks."""

    world: int
    replicas: int = 1
    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32

    def padded_rows(self, rows: int) -> int:
        """Rows that each rank brings to a collective."""
        return -(-rows // self.world)

    def own_rows(self, rows: int, rank: int) -> int:
        """Rows that a rank owns: the last ones fewer, or none."""
        padded = self.padded_rows(rows)
        return max(0, min(padded, rows - rank * padded))


Units = Sequence[Sequence[tuple[int, int]]]
"""For each unit, the full shapes of its weights."""


class _Gather(torch.autograd.Function):
    """Local shard -> full parameter; the gradient is averaged back into the shard."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, rows: int, layout: Layout) -> torch.Tensor:
        ctx.rows, ctx.local, ctx.layout = rows, shard.shape[0], layout
        padded = layout.padded_rows(rows)
        x = (
            shard
            if shard.dtype == layout.param_dtype
            else torch.ops.aten._to_copy(shard, dtype=layout.param_dtype)
        )
        if padded != shard.shape[0]:
            x = torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1) + [0, padded - shard.shape[0]])
        full = C10D.wait_tensor(C10D.all_gather_into_tensor(x, layout.world, SHARD_GROUP))
        return full if full.shape[0] == rows else full.narrow(0, 0, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layout: Layout = ctx.layout
        padded = layout.padded_rows(ctx.rows) * layout.world
        g = grad.contiguous()
        if g.dtype != layout.reduce_dtype:
            g = torch.ops.aten._to_copy(g, dtype=layout.reduce_dtype)
        if padded != ctx.rows:
            g = torch.constant_pad_nd(g, [0, 0] * (g.dim() - 1) + [0, padded - ctx.rows])
        op = "sum" if layout.replicas > 1 else "avg"
        g = C10D.wait_tensor(C10D.reduce_scatter_tensor(g, op, layout.world, SHARD_GROUP))
        if layout.replicas > 1:
            g = C10D.wait_tensor(C10D.all_reduce(g, "sum", REPLICA_GROUP))
            g = g / (layout.world * layout.replicas)
        g = g if g.shape[0] == ctx.local else g.narrow(0, 0, ctx.local)
        return g if g.dtype == torch.float32 else torch.ops.aten._to_copy(g, dtype=torch.float32), None, None


def record_mlp(units: Units, layout: Layout, reshard: bool = True, rank: int = 0, batch: int = 3) -> Graph:
    """A chain of units, each a chain of matmuls with weights of the given full shapes.

    Args:
        rank: position within the shard group: where rows do not divide, the last ranks own fewer.
    """
    shapes = [shape for unit in units for shape in unit]
    shards = [torch.ones(layout.own_rows(rows, rank), cols, requires_grad=True) for rows, cols in shapes]
    x = torch.ones(batch, shapes[0][1])

    def forward(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, h = iter(args[:-1]), args[-1].to(layout.param_dtype)
        for unit in units:
            full = [_Gather.apply(next(left), rows, layout) for rows, _ in unit]
            for weight in full:
                h = torch.tanh(h @ weight.t())
        return (h.float().sum(),)

    joint = record_joint(forward, [*shards, x])
    tag_units(joint, [i for i, unit in enumerate(units) for _ in unit], reshard)
    return joint


def tag_units(joint: Graph, unit_of_param: Sequence[int], reshard: bool) -> None:
    """Marks every collective with its unit, and gathers with `must_recompute` if they are resharded."""
    results = {n: i for i, n in enumerate(joint.results()) if n is not None}
    params = joint.placeholders()[: len(unit_of_param)]
    for node in joint.gm.graph.nodes:
        if node.target is C10D.all_gather_into_tensor.default:
            chain = _sources(node)
            node.meta["unit"] = f"layers.{unit_of_param[params.index(chain[-1])]}"
            if reshard:
                for member in [*chain[:-1], *_views_of(node)]:
                    member.meta["policy"] = "must_recompute"
        elif node.target in (C10D.reduce_scatter_tensor.default, C10D.all_reduce.default):
            node.meta["unit"] = f"layers.{unit_of_param[results[_last(node)] - 1]}"


def _sources(node: torch.fx.Node) -> list[torch.fx.Node]:
    chain = [node]
    while chain[-1].op != "placeholder":
        chain.append(chain[-1].all_input_nodes[0])
    return chain


def _views_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    wait = next(iter(node.users))
    return [wait, *(u for u in wait.users if u.target is torch.ops.aten.slice.Tensor)]


def _last(node: torch.fx.Node) -> torch.fx.Node:
    while not any(user.op == "output" for user in node.users):
        (node,) = node.users
    return node
