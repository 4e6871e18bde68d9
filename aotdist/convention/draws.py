"""What each random operator is made of: uniform numbers of a stream, and arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from aotdist.convention.philox import MANTISSA, Stream
from aotdist.torch_seam.operators import OpOverload

Rule: TypeAlias = Callable[..., Any]
"""`rule(stream, *args, **kwargs)`: what the operator returns, its generator left out; the layout is free."""

_ATEN = torch.ops.aten
RULES: dict[OpOverload, Rule] = {}
"""The operators that are functions of a stream."""


def _rule(op: OpOverload) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES[op] = rule
        return rule

    return register


def _floating(dtype: torch.dtype | None) -> torch.dtype:
    return dtype or torch.get_default_dtype()


# --- uniform ----------------------------------------------------------------------------------------


@_rule(_ATEN.rand.default)
def _rand(s: Stream, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return s.uniform(size, _floating(dtype))


@_rule(_ATEN.rand_like.default)
def _rand_like(s: Stream, x: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return s.uniform(x.size(), dtype or x.dtype)


@_rule(_ATEN.uniform.default)
def _uniform(s: Stream, x: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return s.uniform(x.size(), x.dtype) * (high - low) + low


# --- normal -----------------------------------------------------------------------------------------


@_rule(_ATEN.randn.default)
def _randn(s: Stream, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return s.normal(size, _floating(dtype))


@_rule(_ATEN.randn_like.default)
def _randn_like(s: Stream, x: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return s.normal(x.size(), dtype or x.dtype)


@_rule(_ATEN.normal_functional.default)
def _normal(s: Stream, x: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return s.normal(x.size(), x.dtype) * std + mean


@_rule(_ATEN.normal.Tensor_float)
@_rule(_ATEN.normal.float_Tensor)
@_rule(_ATEN.normal.Tensor_Tensor)
def _normal_of(s: Stream, mean: Any, std: Any = 1.0) -> torch.Tensor:
    sizes = [value.size() for value in (mean, std) if isinstance(value, torch.Tensor)]
    dtype = mean.dtype if isinstance(mean, torch.Tensor) else std.dtype
    return s.normal(torch.broadcast_shapes(*sizes), dtype) * std + mean


@_rule(_ATEN.normal.float_float)
def _normal_sized(
    s: Stream, mean: float, std: float, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    return s.normal(size, _floating(dtype)) * std + mean


@_rule(_ATEN.log_normal.default)
def _log_normal(s: Stream, x: torch.Tensor, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    return _normal(s, x, mean, std).exp()


# --- yes or no --------------------------------------------------------------------------------------


@_rule(_ATEN.bernoulli.default)
def _bernoulli(s: Stream, x: torch.Tensor) -> torch.Tensor:
    return _bernoulli_p(s, x, x)


@_rule(_ATEN.bernoulli.p)
@_rule(_ATEN.bernoulli.Tensor)
def _bernoulli_p(s: Stream, x: torch.Tensor, p: Any = 0.5) -> torch.Tensor:
    exact = torch.float64 if isinstance(p, torch.Tensor) and p.dtype is torch.float64 else torch.float32
    return (s.uniform(x.size(), exact) < p).to(x.dtype)


@_rule(_ATEN.native_dropout.default)
def _dropout(s: Stream, x: torch.Tensor, p: float, train: bool | None = True) -> Any:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = s.uniform(x.size(), torch.float32) >= p
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


# --- integers ---------------------------------------------------------------------------------------


def _integers(s: Stream, size: Sequence[int], low: int, high: int, dtype: torch.dtype | None) -> torch.Tensor:
    return (s.long_words(size) % (high - low) + low).to(dtype or torch.int64)


@_rule(_ATEN.randint.default)
def _randint(
    s: Stream, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    return _integers(s, size, 0, high, dtype)


@_rule(_ATEN.randint.low)
def _randint_from(
    s: Stream, low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    return _integers(s, size, low, high, dtype)


@_rule(_ATEN.randint_like.default)
def _randint_like(
    s: Stream, x: torch.Tensor, high: int, *, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    return _integers(s, x.size(), 0, high, dtype or x.dtype)


@_rule(_ATEN.randint_like.low_dtype)
def _randint_like_from(
    s: Stream, x: torch.Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    return _integers(s, x.size(), low, high, dtype or x.dtype)


@_rule(_ATEN.random.default)
def _random(s: Stream, x: torch.Tensor) -> torch.Tensor:
    """All integers from 0 on that the dtype holds, up to 62 bits of them."""
    high = 2 ** MANTISSA[x.dtype] + 1 if x.is_floating_point() else torch.iinfo(x.dtype).max
    return _integers(s, x.size(), 0, min(high, 2**62), x.dtype)


@_rule(getattr(_ATEN.random, "from"))
def _random_from(s: Stream, x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return _integers(s, x.size(), low, high, x.dtype)


@_rule(_ATEN.random.to)
def _random_to(s: Stream, x: torch.Tensor, high: int) -> torch.Tensor:
    return _integers(s, x.size(), 0, high, x.dtype)


@_rule(_ATEN.randperm.default)
def _randperm(s: Stream, n: int, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return s.long_words((n,)).argsort().to(dtype or torch.int64)


# --- others -----------------------------------------------------------------------------------------


@_rule(_ATEN.exponential.default)
def _exponential(s: Stream, x: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
    return -torch.log1p(-s.uniform(x.size(), x.dtype)) / rate


@_rule(_ATEN.geometric.default)
def _geometric(s: Stream, x: torch.Tensor, p: float) -> torch.Tensor:
    return (_exponential(s, x) / -math.log1p(-p)).ceil().clamp(min=1)


@_rule(_ATEN.cauchy.default)
def _cauchy(s: Stream, x: torch.Tensor, median: float = 0.0, width: float = 1.0) -> torch.Tensor:
    return median + width * torch.tan(math.pi * (s.uniform(x.size(), x.dtype) - 0.5))


@_rule(_ATEN.multinomial.default)
def _multinomial(s: Stream, weights: torch.Tensor, count: int, replacement: bool = False) -> torch.Tensor:
    if replacement:
        sums = weights.cumsum(-1)
        chosen = s.uniform((*weights.size()[:-1], count), weights.dtype) * sums[..., -1:]
        return torch.searchsorted(sums, chosen, right=True).clamp(max=weights.size(-1) - 1)
    # The first of so many exponential clocks to ring is each with its own weight (Efraimidis and Spirakis).
    return (weights / _exponential(s, weights)).topk(count, -1).indices
