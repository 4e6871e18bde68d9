"""Batch norms of GPUs, which write running statistics without saying so in their schemas.

In eager, cuDNN's and MIOpen's batch norm, and what `SyncBatchNorm` gathers statistics with, add to the
running mean and variance that they are given. No trace can see that, so each has a twin that returns the new
ones, and what the program holds is written as by any other operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from aotdist.torch_seam.operators import OpOverload, argument_names, schema_of

_ATEN = torch.ops.aten
_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_RUNNING = ("running_mean", "running_var")
_BROKEN_UP = _ATEN._native_batch_norm_legit_functional.default
"""What compilers know how to break up; its results are those of MIOpen's twin."""


def _twin(op: OpOverload) -> OpOverload:
    """The operator with two more results: the new running mean, and the new running variance."""
    names = argument_names(op)
    at = [names.index(name) for name in _RUNNING]

    def run(*args: Any) -> tuple[Tensor, ...]:
        given = list(args)
        for position in at:
            given[position] = args[position].clone()
        return (*op(*given), *(given[position] for position in at))

    name = f"{op.name().removeprefix('aten::')}_functional"
    arguments, _, results = schema_of(op).partition("(")[2].rpartition(") -> (")
    _LIBRARY.define(f"{name}({arguments}) -> ({results.removesuffix(')')}, Tensor, Tensor)")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aotdist::{name}", run, lib=_LIBRARY)
    return getattr(torch.ops.aotdist, name).default


_TWIN_OF: Mapping[OpOverload, OpOverload] = {
    op: _twin(op)
    for op in (
        _ATEN.cudnn_batch_norm.default,
        _ATEN.miopen_batch_norm.default,
        _ATEN.batch_norm_gather_stats.default,
        _ATEN.batch_norm_gather_stats_with_counts.default,
    )
}


def with_new_statistics(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[], tuple[Tensor, ...]] | None:
    """The same computation, with what it writes as results that are written; None for all other operators.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: the others.
    """
    if func not in _TWIN_OF:
        return None
    given = {**dict(zip(argument_names(func), args, strict=False)), **kwargs}  # there are no defaults
    running = [given[name] for name in _RUNNING]
    if not given.get("training", True) or running[0] is None:
        return None
    return functools.partial(_write, _TWIN_OF[func], tuple(given.values()), running)


def _write(twin: OpOverload, args: tuple[Any, ...], running: list[Tensor]) -> tuple[Tensor, ...]:
    *results, mean, variance = twin(*args)
    for statistic, new in zip(running, (mean, variance), strict=True):
        statistic.copy_(new)
    return tuple(results)


def _as_cudnn(*args: Any) -> tuple[Tensor, ...]:
    """The same, and the space that cuDNN's backward would ask for."""
    out, mean, deviation, *new = _BROKEN_UP(*args)
    return out, mean, deviation, out.new_empty((0,), dtype=torch.uint8), *new


MADE_OF: Mapping[OpOverload, Callable[..., Any]] = {
    _TWIN_OF[_ATEN.cudnn_batch_norm.default]: _as_cudnn,
    _TWIN_OF[_ATEN.miopen_batch_norm.default]: _BROKEN_UP,
}
"""What compilers make of a batch norm; its backward is in PyTorch's own table."""
