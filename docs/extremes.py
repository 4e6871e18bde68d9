"""Writes `docs/extremes.md`: where Inductor's results on extreme numbers are not eager's.

`python docs/extremes.py` prints the page. Each operator runs on infinities, NaN and the largest and smallest
numbers, in eager, by `backend="inductor"` and by `torch.compile`, on a CPU; so does its gradient. A row is an
operator for which one of the two is not eager's.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

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
"""The largest of float32 is 3.4e38, its smallest normal one 1.2e-38, its smallest 1e-45; exp(89) is inf."""


def _of(module: Any, names: str, **options: Any) -> dict[str, Op]:
    return {name: functools.partial(getattr(module, name), **options) for name in names.split()}


UNARY: Mapping[str, Op] = {
    **_of(torch, "abs acos acosh asin asinh atan atanh ceil cos cosh digamma erf erfc erfinv exp exp2 expm1"),
    **_of(torch, "floor frac i0 isfinite isinf isnan lgamma log log10 log1p log2 logit nan_to_num neg"),
    **_of(torch, "reciprocal round rsqrt sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc"),
    **_of(F, "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6"),
    **_of(F, "selu silu softplus softshrink softsign tanhshrink"),
    **_of(torch.special, "erfcx i1 log_ndtr ndtr"),
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x**3,
    "x ** 0.5": lambda x: x**0.5,
    "x ** -0.5": lambda x: x**-0.5,
    "2 ** x": lambda x: 2**x,
    "clamp": lambda x: x.clamp(-2, 2),
    "to bfloat16 and back": lambda x: x.bfloat16().float(),
    "to float16 and back": lambda x: x.half().float(),
    "3 x in float64, back": lambda x: x.double().mul(3).float(),
}
BINARY: Mapping[str, Op] = {
    **_of(torch, "add sub mul div atan2 copysign eq fmax fmin fmod ge hypot ldexp"),
    **_of(torch, "logaddexp logaddexp2 lt maximum minimum pow remainder xlogy"),
    **_of(F, "mse_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits", reduction="none"),
    "div, floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div, trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.75),
}
ROWS: Mapping[str, Op] = {
    **_of(torch, "amax amin argmax argmin cumprod cumsum logcumsumexp log_softmax logsumexp mean", dim=-1),
    **_of(torch, "nanmean nansum norm prod softmax std sum var", dim=-1),
    "cummax": lambda x: x.cummax(-1).values,
    "norm, 1": lambda x: x.norm(1, dim=-1),
    "norm, inf": lambda x: x.norm(float("inf"), dim=-1),
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


def results(ops: Mapping[str, Op], inputs: Sequence[Tensor], compiler: Callable[[Any], Any]) -> Results:
    """What the operators give in one program, each on inputs of its own."""

    def program(groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        return [op(*group) for op, group in zip(ops.values(), groups, strict=True)]

    groups = [[x.clone().requires_grad_() for x in inputs] for _ in ops]
    outs = compiler(program)(groups)
    ends = [out for out in outs if out.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    found: dict[str, Tensor] = {}
    for name, out, group in zip(ops, outs, groups, strict=True):
        found[name] = out.detach()
        which = ("",) if len(group) == 1 else (" by x", " by y")
        found |= {
            f"{name}, gradient{by}": x.grad for by, x in zip(which, group, strict=True) if x.grad is not None
        }
    return found


def differ(expected: Tensor, found: Tensor) -> Tensor:
    """Where numbers are neither within a thousandth of each other, nor within a millionth of 1."""
    return ~torch.isclose(found.double(), expected.double(), rtol=1e-3, atol=1e-6, equal_nan=True)


COMPILERS: Mapping[str, Callable[[Any], Any]] = {
    "eager": lambda fn: fn,
    "inductor": lambda fn: aotdist.compile(fn, backend="inductor"),
    "torch.compile": torch.compile,
}


def lines() -> Iterator[str]:
    """A row of the table for each operator of which one compiled result is not eager's; then a count."""
    num_results = num_rows = 0
    for ops, inputs in cases():
        found = {name: results(ops, inputs, compiler) for name, compiler in COMPILERS.items()}
        for name, eager in found["eager"].items():
            num_results += 1
            wrong = differ(eager, found["inductor"][name]) | differ(eager, found["torch.compile"][name])
            if wrong.any():
                num_rows += 1
                yield _row(name, inputs, [each[name] for each in found.values()], wrong)
    yield ""
    yield f"{num_rows} of {num_results} results and gradients of operators are in the table."


def _row(name: str, inputs: Sequence[Tensor], found: Sequence[Tensor], wrong: Tensor) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    given = ", ".join(map(_given, (x[at[: x.dim()]] if x.shape == wrong.shape else x[at[0]] for x in inputs)))
    numbers = (f"{each[at].item():.6g}" for each in found)
    return f"| {name} | {int(wrong.sum())} of {wrong.numel()} | {given} | {' | '.join(numbers)} |"


def _given(x: Tensor) -> str:
    """A number, or what is no ordinary one in a row."""
    if x.dim() == 0:
        return f"{x.item():.6g}"
    extreme = [number for number in x.unique().tolist() if abs(number) > 2 or number != number]
    return "a row with " + " and ".join(f"{number:.6g}" for number in extreme)


HEAD = """\
# Extreme numbers under Inductor

Where Inductor's code for a CPU does not compute what eager does with infinities, NaN and the largest and
smallest numbers of float32. `docs/extremes.py` writes this page (`make docs`): it runs operators on every
number of a list, on every pair, or in rows among ordinary numbers, and differentiates them. `fx` gives
eager's bits for all of these. `torch.compile` generates its code by Inductor, too, and stands beside it.
Not listed is what lies within a thousandth of eager's result, or within a millionth of 1.
How often `var`, `std` and `layer_norm` differ of rows that overflow is not the same in every run.

| operator | differs for | for example for | eager | `inductor` | `torch.compile` |
|---|---|---|---|---|---|"""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("\n".join((HEAD, *lines())))
