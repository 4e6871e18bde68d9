"""One FSDP2 parameter as graph nodes: the gather of its shards, the reduction of its gradient.

FSDP2 gathers and reduces a whole unit at once, in flat buffers that its hooks fill and free. Here each
parameter has its own chain of operators in the graph; a graph pass merges the chains of a unit. Nodes in
brackets exist only if the parameter needs them::

    forward   shard ─[to param_dtype]─[pad rows]─ all_gather_into_tensor ─ wait_tensor ─
              [chunk, cat]─[narrow]─ whole
    backward  grad ─[redistribute over TP]─[add accumulated]─[to reduce_dtype]─[chunk, cat]─[pad rows]─[div]─
              reduce_scatter_tensor ─ wait_tensor ─[add partial]─[all_reduce ─ wait_tensor]─
              [div]─[to original dtype]─[narrow]─ shard

Rows are padded where the first dimension does not divide by the number of shards: every rank brings
`ceil(rows / shards)` rows, of which the last ranks own fewer or none. A parameter sharded on another
dimension (always evenly) is gathered as rows and then concatenated. A tensor subclass with FSDP2's extension
(`fsdp_pre_all_gather`, `fsdp_post_all_gather`) determines what is sent, and what is made of it.
Every step computes, element by element, what FSDP2 computes on its flat buffers, so values are equal bit for
bit.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from aotdist.origins import annotate
from aotdist.subclasses.fsdp_units import PARTIAL, Ranks, Reductions, ShardedParam
from aotdist.torch_seam.dtensor import (
    local_tensor,
    make_dtensor,
    retyped_spec,
    spec_of_dtype,
    spec_summed_later,
)
from aotdist.torch_seam.fsdp import fsdp_data_axes, fsdp_divide_factors, fsdp_unsharded_spec
from aotdist.torch_seam.proxies import recorded_once

_c10d = torch.ops._c10d_functional


class Unshard(torch.autograd.Function):
    """The sharded parameter as the module computes with it; its gradient as the optimizer takes it."""

    @staticmethod
    def forward(ctx: Any, sharded: Any, param: ShardedParam, capture: Reductions) -> torch.Tensor:
        """The whole parameter: a plain tensor, or a DTensor on the mesh that it had before `fully_shard`."""
        _remember(ctx, param, capture)
        with annotate(param.unit, param.policy):
            return gather(local_tensor(sharded), param)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the names
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        """The sharded gradient; None when there is none, or when it is accumulated."""
        (grad,) = grads
        with annotate(ctx.param.unit):
            return _sharded_grad(grad, ctx.param, ctx.capture), None, None


class LeaveSharded(Unshard):
    """A parameter that this forward does not use: nothing is gathered, but its backward can be reached."""

    @staticmethod
    def forward(ctx: Any, sharded: Any, param: ShardedParam, capture: Reductions) -> torch.Tensor:
        """A tensor without elements."""
        _remember(ctx, param, capture)
        return local_tensor(sharded).new_empty(0)


class ReachAll(torch.autograd.Function):
    """An output whose backward also runs, without a gradient, that of parameters which it does not use."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *unsharded: torch.Tensor) -> torch.Tensor:
        """`output`; `unsharded` are results of `Unshard` or `LeaveSharded`."""
        ctx.num_unsharded = len(unsharded)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient for the output; autograd runs the other nodes all the same."""
        return *grads, *[None] * ctx.num_unsharded


class EnterUnit(torch.autograd.Function):
    """The inputs of a unit. FSDP2 registers the end of the unit's backward on a node like this one.

    Gradients of all uses of an input inside of the unit are summed here, before they are added to those of
    other units, and a missing one is zero: the order shows in sums of three numbers.
    """

    passes_gradients_on = True

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`inputs`, all of which require grad."""
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Their gradients."""
        return grads


class GatherAgain(torch.autograd.Function):
    """A second use of a parameter that was resharded in between: new nodes, but the same gradient.

    FSDP2 has one leaf for both uses, so their gradients are added before they are reduced, once.
    """

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, sharded: Any, param: ShardedParam) -> torch.Tensor:
        """The whole parameter, gathered anew; `whole` is the result of `Unshard`."""
        with annotate(param.unit, param.policy):
            return gather(local_tensor(sharded), param)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient, for `Unshard` to reduce."""
        return *grads, None, None


def _remember(ctx: Any, param: ShardedParam, capture: Reductions) -> None:
    ctx.param, ctx.capture = param, capture
    ctx.set_materialize_grads(False)  # a missing gradient is not zero


def _sharded_grad(grad: torch.Tensor | None, param: ShardedParam, capture: Reductions) -> torch.Tensor | None:
    if capture.accumulates(param):
        _accumulate(grad, param)
        return None
    if grad is None and param.accumulates:
        return None
    accumulated = capture.take_accumulated(param)
    total = grad
    if accumulated is not None:
        total = accumulated if grad is None else accumulated + _placed_like(grad, accumulated, param.record)
    if total is None:
        return None
    reduced = None
    if param.accumulates:
        capture.keep_whole(param, total.to(param.record.reduce_dtype or total.dtype))
    else:
        reduced = reduce(param.record._get_grad_inner_tensor(total), param, capture)
    if accumulated is not None:
        accumulated.fill_(-0.0)  # it is reduced once, even if another forward adds it too
    return None if reduced is None else make_dtensor(reduced, param.record._sharding_spec)


def _accumulate(grad: torch.Tensor | None, param: ShardedParam) -> None:
    assert param.accumulated is not None, (
        "prepare() allocates accumulators before a call that does not reduce"
    )
    if grad is not None:
        param.accumulated.add_(_placed_like(grad, param.accumulated, param.record))


def gather(shard: torch.Tensor, param: ShardedParam) -> torch.Tensor:
    """All ranks' shards put together, in the dtype that the module computes in."""
    if hasattr(shard, "fsdp_pre_all_gather"):
        return _gathered_by_extension(shard, param)
    dtype, rows, ranks, dim = param.record.param_dtype, param.num_padded, param.gather, param.shard_dim

    def gathered(shard: torch.Tensor) -> torch.Tensor:
        shard = shard if dtype is None else shard.to(dtype)
        whole = _all_gather(_padded(shard, rows), ranks)
        return whole if dim == 0 else torch.cat(whole.chunk(ranks.size), dim)

    whole = recorded_once((gather, dtype, rows, ranks, dim), gathered, shard)
    whole = _first_rows(whole, param.num_rows)
    spec = unsharded_spec(param.record, whole.dtype)
    return whole if spec is None else make_dtensor(whole, spec)


def arguments_of_extension(shard: Any) -> int:
    """How many of FSDP2's five arguments the extension takes; it may be the mesh alone."""
    return len(inspect.signature(shard.fsdp_pre_all_gather).parameters)


def _gathered_by_extension(shard: Any, param: ShardedParam) -> torch.Tensor:
    """Gather a tensor subclass by its own extension."""
    record = param.record
    size, stride = record._orig_size, record._contiguous_orig_stride
    known = (record.shard_mesh, size, stride, record._module_info.module, record.mp_policy)
    sent, metadata = shard.fsdp_pre_all_gather(*known[: arguments_of_extension(shard)])
    gathered = tuple(_all_gather(part, param.gather) for part in sent)
    dtype = record.param_dtype or record.orig_dtype
    whole, _ = shard.fsdp_post_all_gather(gathered, metadata, dtype)
    whole = torch.as_strided(whole, size, stride, storage_offset=0)
    spec = unsharded_spec(record, dtype)
    return whole if spec is None else make_dtensor(whole, spec)


def reduce(grad: torch.Tensor, param: ShardedParam, capture: Reductions) -> torch.Tensor | None:
    """This rank's shard of the gradient, averaged over all ranks, in the parameter's own dtype.

    None if it stays in the buffer of gradients that are not yet summed over replicas.
    """
    dtype = param.group._reduce_dtype or grad.dtype
    reduction = Reduction.of(param, dtype, grad.device)
    rows, ranks, dim = param.num_padded * param.scatter.size, param.scatter, param.shard_dim

    def scattered(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.to(dtype)
        grad = grad if dim == 0 else torch.cat(grad.chunk(ranks.size, dim))
        return reduction.scattered(_padded(grad, rows).contiguous(), ranks)

    grad = recorded_once((reduce, dtype, reduction, rows, ranks, dim), scattered, grad)
    if param.stays_partial:
        capture.add_partial(param, grad)
        return None
    if param.replicas is not None:
        if (partial := capture.take_partial(param)) is not None:
            grad = grad + partial
            partial.fill_(-0.0)
        grad = reduction.all_reduced(grad, param.replicas)
    grad = _divided(grad, reduction.postdivide).to(param.record.orig_dtype)
    return _first_rows(grad, param.num_own)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are averaged: the collective divides, or FSDP2 does, to keep fp16 in range.

    Args:
        prescale: factor before the collective, in place of `PREMUL_SUM`, which functional collectives do not
            have. NCCL multiplies by it too, so values are the same up to rounding.
        predivide: divisor before the collective.
        scatter_op: operation of the reduce-scatter.
        all_reduce_op: operation of the all-reduce among replicas.
        postdivide: divisor after the collectives.
        alone: divisor when there is one shard, so nothing to scatter.
    """

    prescale: float | None
    predivide: float | None
    scatter_op: str
    all_reduce_op: str
    postdivide: float | None
    alone: float | None

    @classmethod
    def of(cls, param: ShardedParam, dtype: torch.dtype, device: torch.device) -> Reduction:
        """The reduction that FSDP2 would choose for a gradient."""
        factor = param.group.gradient_divide_factor
        predivide, postdivide, scatter_op, all_reduce_op = fsdp_divide_factors(
            param.group._reduce_scatter_process_group,
            param.group._all_reduce_process_group if param.replicas else None,
            dtype,
            device.type,
            factor,
            param.group.force_sum_reduction_for_comms,
        )
        names = {dist.ReduceOp.AVG: "avg", dist.ReduceOp.SUM: "sum"}
        scatter_name = next((name for op, name in names.items() if scatter_op == op), None)
        return cls(
            prescale=1 / factor if scatter_name is None else None,
            predivide=predivide,
            scatter_op=scatter_name or "sum",
            all_reduce_op="avg" if all_reduce_op == dist.ReduceOp.AVG else "sum",
            postdivide=postdivide,
            alone=factor,
        )

    def scattered(self, grad: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """The reduce-scatter, with what comes before it."""
        grad = _divided(grad, self.predivide)
        if ranks.size == 1:
            return grad.clone() if self.alone is None else grad / self.alone
        if self.prescale is not None:
            grad = grad * self.prescale
        return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(grad, self.scatter_op, ranks.size, ranks.group))

    def all_reduced(self, grad: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """The all-reduce among replicas."""
        return _c10d.wait_tensor(_c10d.all_reduce(grad, self.all_reduce_op, ranks.group))


def unsharded_spec(record: Any, dtype: torch.dtype) -> Any | None:
    """The DTensor spec of the gathered parameter, None for a plain one (no TP)."""
    spec = fsdp_unsharded_spec(record)
    return None if spec is None else spec_of_dtype(spec, dtype)


def new_accumulator(record: Any) -> torch.Tensor:
    """An accumulator filled with -0.0, to which the first gradient is added without changing a bit of it.

    With 0.0 a gradient of -0.0 would become 0.0.
    """
    dtype = record.reduce_dtype or record.param_dtype or record.orig_dtype
    local = torch.full(record._orig_size, -0.0, dtype=dtype, device=record.device)
    spec = unsharded_spec(record, dtype)
    return local if spec is None else make_dtensor(local, spec_summed_later(spec, fsdp_data_axes(record)))


def make_whole(record: Any) -> None:
    """Let FSDP2 make its whole parameter, without memory, if eager never gathered it.

    A pipeline's schedule has FSDP2 itself reduce what its backwards accumulated, which looks for one.
    """
    if hasattr(record, "_unsharded_param") or hasattr(
        local_tensor(record.sharded_param), "fsdp_pre_all_gather"
    ):
        return
    count, dtype = record.padded_sharded_param_size.numel(), record.param_dtype or record.orig_dtype
    record.init_all_gather_outputs([count], [dtype], record.mesh_info.shard_mesh_size, record.device)
    record.init_unsharded_param()
    record.free_unsharded_param()


def share_out_partial(group: Any) -> bool:
    """Give each trainable parameter its part of FSDP2's buffer of gradients not yet summed over replicas.

    If there is no buffer, one is allocated for a group that is about to add to it.

    Returns:
        whether that was possible: eager's own buffer leaves out parameters without a gradient.
    """
    records = [record for record in group.fsdp_params if record.sharded_param.requires_grad]
    sizes = [record.padded_sharded_param_size for record in records]
    if group._partial_reduce_output is None and records and group._is_hsdp and not group.all_reduce_grads:
        dtype = group._reduce_dtype or records[0].param_dtype or records[0].orig_dtype
        count = sum(size.numel() for size in sizes)
        group._partial_reduce_output = torch.full((count,), -0.0, dtype=dtype, device=group.device)
    flat = group._partial_reduce_output
    if flat is not None and flat.numel() != sum(size.numel() for size in sizes):
        return False
    start = 0
    for record, size in zip(records, sizes, strict=True):
        setattr(record, PARTIAL, None if flat is None else flat[start : start + size.numel()].view(size))
        start += size.numel()
    return True


def _all_gather(shard: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    # A single shard is copied, as in FSDP2: the optimizer may write it while backward still reads the copy.
    if ranks.size == 1:
        return shard.clone()
    if shard.dtype.is_floating_point and shard.itemsize == 1:  # FP8 travels as bytes: gloo does not know it
        return _all_gather(shard.view(torch.uint8), ranks).view(shard.dtype)
    return _c10d.wait_tensor(_c10d.all_gather_into_tensor(shard, ranks.size, ranks.group))


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - tensor.size(0)
    return tensor if missing == 0 else nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing])


def _first_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor if tensor.size(0) == rows else tensor.narrow(0, 0, rows)


def _divided(tensor: torch.Tensor, divisor: float | None) -> torch.Tensor:
    return tensor if divisor is None or divisor == 1 else tensor / divisor


def _placed_like(grad: torch.Tensor, accumulated: torch.Tensor, record: Any) -> torch.Tensor:
    """The gradient with the accumulator's placements, but summed over no axis that FSDP2 reduces over."""
    if not isinstance(grad, DTensor) or not isinstance(accumulated, DTensor):
        return grad
    placements = [
        own if axis in fsdp_data_axes(record) else other
        for axis, (own, other) in enumerate(zip(grad.placements, accumulated.placements, strict=True))
    ]
    local = local_tensor(grad.redistribute(placements=placements))
    return make_dtensor(local, retyped_spec(accumulated, grad.dtype))
