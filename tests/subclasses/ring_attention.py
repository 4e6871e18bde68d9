"""PyTorch's context parallelism on a CPU: its ring goes round with the attention that there is for CPUs.

`torch.distributed.tensor.experimental.context_parallel` knows the attention kernels of GPUs only. What it
lacks for the CPU's is a handler that sends the ring round; the ring, over gloo here, is PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as attention

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE = 2
"""The dimension of (batch, head, sequence, width) that is spread."""


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    query, key, value, dropout_p, is_causal, *_ = (*args, *(0.0, False)[len(args) - 3 :])
    mesh = query.device_mesh
    results = attention._templated_ring_attention(
        mesh.get_group(),
        _SEQUENCE,
        op,
        *map(_local, (query, key, value)),
        is_causal,
        dropout_p=dropout_p,
        **kwargs,
    )
    return tuple(_spread(result, mesh) for result in results)


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, query, key, value, out, logsumexp, dropout_p, is_causal = args
    mesh = query.device_mesh
    results = attention._templated_ring_attention_backward(
        mesh.get_group(),
        _SEQUENCE,
        op,
        _local(grad),
        "grad_out",
        *map(_local, (query, key, value, out, logsumexp)),
        is_causal,
        dropout_p=dropout_p,
        **kwargs,
    )
    return tuple(_spread(result, mesh) for result in results)


def _local(tensor: DTensor) -> torch.Tensor:
    return tensor._local_tensor


def _spread(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return DTensor.from_local(tensor, mesh, [Shard(_SEQUENCE)])


@contextmanager
def rotated(method: str) -> Generator[None]:
    """Keys and values go round by `allgather`, all at once, or by `alltoall`, one place at a time."""
    before = attention._cp_options.rotate_method
    set_rotate_method(method)
    try:
        yield
    finally:
        attention._cp_options.rotate_method = before


def unsharded(mesh: DeviceMesh, part: torch.Tensor) -> torch.Tensor:
    """The whole of what each rank has a part of. Shapes: (batch, head, sequence, width)."""
    (whole,) = attention.context_parallel_unshard(mesh, [part], [_SEQUENCE])
    return whole


@contextmanager
def ring(mesh: DeviceMesh, *buffers: torch.Tensor, dims: list[int]) -> Generator[None]:
    """`context_parallel` over a mesh of CPUs: each rank has its part of the sequence of the buffers inside.

    Args:
        mesh: the ranks.
        buffers: what has a sequence.
        dims: its dimension in each.
    """
    added = {_FORWARD: _forward, _BACKWARD: _backward}
    attention.custom_ops.update(added)
    try:
        with context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=dims):
            yield
    finally:
        for op in added:
            del attention.custom_ops[op]
