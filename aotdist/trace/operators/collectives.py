"""Collectives that write into tensors, as functional ones: `dist.all_reduce(x)` inside of a program.

They are waited for where they are called: when a collective starts, and when it is waited for, is a pass's
business. As in eager, autograd and version counters know nothing of the write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotdist.torch_seam.groups import (
    extent_of_group,
    finished_work,
    group_name_of,
    group_size_of,
    name_of_reduction,
)
from aotdist.torch_seam.operators import is_operator
from aotdist.trace.failures import refusal

_NAMESPACE = "c10d"
_functional = torch.ops._c10d_functional


def instead(func: Any, args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """What to call instead of a collective that writes its results into tensors; None for any other operator.

    Raises:
        UnsupportedProgram: it has no functional counterpart here.
    """
    if not is_operator(func) or func.namespace != _NAMESPACE:
        return None
    functionally = _FUNCTIONALLY.get(func.name())
    if functionally is None:
        raise refusal(
            f"the program calls `{func.name()}`, a collective that writes its results into tensors",
            fix="call its functional twin (`torch.distributed._functional_collectives`), or redistribute a "
            "DTensor",
        )
    return lambda: functionally(*args)


def _all_reduce(tensors: list[torch.Tensor], group: Any, reduce_op: Any, *_: Any) -> Any:
    for tensor in tensors:
        _write(tensor, _functional.all_reduce(tensor, name_of_reduction(reduce_op), group_name_of(group)))
    return tensors, finished_work()


def _broadcast(tensors: list[torch.Tensor], group: Any, source: int, *_: Any) -> Any:
    for tensor in tensors:
        _write(tensor, _functional.broadcast(tensor, source, group_name_of(group)))
    return tensors, finished_work()


def _all_gather_into_tensor(output: torch.Tensor, source: torch.Tensor, group: Any, *_: Any) -> Any:
    _write(output, _gathered(source, group))
    return output, finished_work()


def _all_gather(outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], group: Any, *_: Any) -> Any:
    for parts, source in zip(outputs, sources, strict=True):
        gathered = _functional.wait_tensor(_gathered(source, group))
        for part, value in zip(parts, gathered.chunk(len(parts)), strict=True):
            part.copy_(value.view(part.shape))
    return outputs, finished_work()


def _reduce_scatter_tensor(
    output: torch.Tensor, source: torch.Tensor, group: Any, reduce_op: Any, *_: Any
) -> Any:
    size, name = group_size_of(group), group_name_of(group)
    flat = source.reshape(-1)
    _write(output, _functional.reduce_scatter_tensor(flat, name_of_reduction(reduce_op), size, name))
    return output, finished_work()


def _all_to_all_single(
    output: torch.Tensor,
    source: torch.Tensor,
    group: Any,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    *_: Any,
) -> Any:
    size = group_size_of(group)
    given = ((output_splits, output), (input_splits, source))
    output_splits, input_splits = (known or [tensor.shape[0] // size] * size for known, tensor in given)
    all_to_all_single(output, source, output_splits, input_splits, group_name_of(group))
    return finished_work()


def all_to_all_single(
    output: torch.Tensor,
    source: torch.Tensor,
    output_splits: Sequence[Any],
    input_splits: Sequence[Any],
    group: str,
) -> None:
    """`dist.all_to_all_single`, done when it returns; splits may be symbols."""
    received = _functional.all_to_all_single(source, output_splits, input_splits, group)
    output.copy_(_functional.wait_tensor(received))


def _reduce_scatter(
    outputs: list[torch.Tensor], sources: list[list[torch.Tensor]], group: Any, reduce_op: Any, *_: Any
) -> Any:
    for output, parts in zip(outputs, sources, strict=True):
        if any(part.shape != output.shape for part in parts):
            raise refusal("`reduce_scatter` is given tensors of several sizes", fix="pad them to one size")
        _reduce_scatter_tensor(output, torch.stack(parts), group, reduce_op)
    return outputs, finished_work()


def _all_to_all(outputs: list[torch.Tensor], sources: list[torch.Tensor], group: Any, *_: Any) -> Any:
    splits = [[part.numel() for part in parts] for parts in (outputs, sources)]
    sent = torch.cat([source.reshape(-1) for source in sources])
    received = _functional.wait_tensor(_functional.all_to_all_single(sent, *splits, group_name_of(group)))
    for output, value in zip(outputs, received.split(splits[0]), strict=True):
        output.copy_(value.view(output.shape))
    return outputs, finished_work()


def _scatter(
    outputs: list[torch.Tensor], sources: list[list[torch.Tensor]], group: Any, source: int, *_: Any
) -> Any:
    """Every rank gets all parts, by a broadcast: there is no functional scatter."""
    size, rank = extent_of_group(group_name_of(group))
    for at, output in enumerate(outputs):
        sent = torch.stack(sources[at]) if rank == source else output.new_empty(size, *output.shape)
        parts = _functional.wait_tensor(_functional.broadcast(sent, source, group_name_of(group)))
        output.copy_(parts[rank])
    return outputs, finished_work()


def _gathered(source: torch.Tensor, group: Any) -> torch.Tensor:
    """The sources of all ranks, flattened and concatenated."""
    return _functional.all_gather_into_tensor(source.reshape(-1), group_size_of(group), group_name_of(group))


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.copy_(_functional.wait_tensor(value).view(tensor.shape))


_FUNCTIONALLY: Mapping[str, Callable[..., Any]] = {
    "c10d::allreduce_": _all_reduce,
    "c10d::broadcast_": _broadcast,
    "c10d::allgather_": _all_gather,
    "c10d::_allgather_base_": _all_gather_into_tensor,
    "c10d::_reduce_scatter_base_": _reduce_scatter_tensor,
    "c10d::alltoall_base_": _all_to_all_single,
    "c10d::reduce_scatter_": _reduce_scatter,
    "c10d::alltoall_": _all_to_all,
    "c10d::scatter_": _scatter,
}
"""For each operator, what takes its arguments, does the same functionally, and returns what it returns."""
