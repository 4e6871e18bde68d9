"""Writes `docs/extremes.md`: where Inductor's results on extreme numbers are not eager's.

`python docs/extremes.py` prints the page. Each operator runs on infinities, NaN and the largest and smallest
numbers, in eager, by `backend="inductor"` and by `torch.compile`, on a CPU; and so does its gradient. A row is
an operator and numbers for which one of the two is not eager's.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

import aotdist

Op: TypeAlias = Callable[..., Tensor]

NUMBERS = (
    *(
        float("inf"),
        float("-inf"),
        float("nan"),
        3.4e38,
        -3.4e38,
        1e30,
        -1e30,
        1e20,
        1e10,
        -1e10,
        89.0,
        -104.0,
    ),
    *(1.0, -1.0, 0.5, 0.0, -0.0, 1.2e-38, -1.2e-38, 1e-45, -1e-45, 1e-30),
)
"""float32: the largest is 3.4e38, the smallest normal one 1.2e-38, the smallest 1e-45; exp of 89 overflows."""

UNARY: Mapping[str, Op] = {
    **{
        name: getattr(torch, name)
        for name in (
            "abs acos acosh asin asinh atan atanh ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor frac"
            " i0 lgamma log log10 log1p log2 logit neg reciprocal round rsqrt sigmoid sign sin sinc sinh sqrt"
            " square tan tanh trunc isinf isnan isfinite signbit nan_to_num"
        ).split()
    },
    **{
        name: getattr(F, name)
        for name in (
            "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu"
            " silu softplus softshrink softsign tanhshrink"
        ).split()
    },
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "pow 2": lambda x: x**2,
    "pow 3": lambda x: x**3,
    "pow 0.5": lambda x: x**0.5,
    "pow -0.5": lambda x: x**-0.5,
    "pow of 2": lambda x: 2**x,
    "clamp": lambda x: x.clamp(-2, 2),
    "special.erfcx": torch.special.erfcx,
    "special.i1": torch.special.i1,
    "special.log_ndtr": torch.special.log_ndtr,
    "special.ndtr": torch.special.ndtr,
    "to bfloat16": lambda x: x.bfloat16().float(),
    "to float16": lambda x: x.half().float(),
    "to float64": lambda x: x.double().mul(3).float(),
}
BINARY: Mapping[str, Op] = {
    **{
        name: getattr(torch, name)
        for name in (
            "add sub mul div atan2 copysign fmax fmin fmod hypot logaddexp logaddexp2 maximum minimum nextafter"
            " pow remainder xlogy ldexp eq lt ge floor_divide heaviside"
        ).split()
    },
    "div, floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div, trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.75),
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "bce with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
}
ROWS: Mapping[str, Op] = {
    **{
        name: lambda x, op=getattr(torch, name): op(x, -1)
        for name in (
            "amax amin argmax argmin cumsum cumprod logsumexp logcumsumexp mean nansum nanmean prod std sum var"
            " log_softmax softmax"
        ).split()
    },
    "cummax": lambda x: x.cummax(-1).values,
    "norm": lambda x: x.norm(dim=-1),
    "norm, inf": lambda x: x.norm(float("inf"), dim=-1),
    "norm, 1": lambda x: x.norm(1, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmin(-1), reduction="none"),
    "sort": lambda x: x.sort(-1).values,
    "median": lambda x: x.median(-1).values,
    "matmul": lambda x: x @ x.t(),
}


def rows() -> Tensor:
    """Ordinary rows with one such number, with it and its negative, and full of it."""
    ordinary = torch.linspace(-2.0, 2.0, 20)
    made = []
    for number in NUMBERS:
        one, two = ordinary.clone(), ordinary.clone()
        one[7] = two[7] = number
        two[18] = -number
        made += [one, two, torch.full((20,), number)]
    return torch.stack(made)


def pairs() -> tuple[Tensor, Tensor]:
    """Each number with each."""
    left, right = zip(*itertools.product(NUMBERS, NUMBERS), strict=True)
    return torch.tensor(left), torch.tensor(right)


Case: TypeAlias = tuple[Mapping[str, Op], Sequence[Tensor]]


def cases() -> tuple[Case, ...]:
    """Operators with what they are given."""
    return (UNARY, (torch.tensor(NUMBERS),)), (BINARY, pairs()), (ROWS, (rows(),))


Results: TypeAlias = Mapping[str, Tensor]
"""Of each operator, and of its gradients."""


def results(
    ops: Mapping[str, Op], inputs: Sequence[Tensor], compiler: Callable[[Op], Callable[..., Tensor]]
) -> Results:
    """What the operators give, compiled one by one."""
    found: dict[str, Tensor] = {}
    for name, op in ops.items():
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = compiler(op)(*leaves)
        found[name] = out.detach()
        if out.requires_grad:
            gradients = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
            found |= {f"{name}, gradient {k}": g for k, g in enumerate(gradients) if g is not None}
    return found


def differ(expected: Tensor, found: Tensor) -> Tensor:
    """Where numbers are not the same but for rounding."""
    same = torch.isclose(found.double(), expected.double(), rtol=1e-3, atol=1e-37, equal_nan=True)
    return ~same
