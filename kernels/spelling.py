"""How Triton spells what is done to each element, and the functions that kernels call."""

from __future__ import annotations

import math

import torch

from aotdist.kernels.ir import Constant, Expr

TYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float8_e4m3fn: "tl.float8e4nv",
    torch.float8_e5m2: "tl.float8e5",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}

_WORDS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "fma": "tl.fma({0}, {1}, {2})",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "trunc": "tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "shift left": "{0} << {1}",
    "shift right": "{0} >> {1}",
    "where": "tl.where({0}, {1}, {2})",
    "philox": "random_word({0}, {1}, {2})",
}


def spelled(expr: Expr, args: list[str]) -> str:
    """The Triton expression of an elementwise operation.

    Args:
        expr: the operation.
        args: names of its arguments.
    """
    operand = expr.args[0].dtype
    match expr.op:
        case "cast" if expr.dtype is torch.bool:
            return f"{args[0]} != 0"
        case "cast":
            return f"{args[0]}.to({TYPES[expr.dtype]})"
        case "not":
            return f"{args[0]} == 0" if operand is torch.bool else f"~{args[0]}"
        case "max" | "min":
            name = f"tl.{expr.op}imum"
            if not operand.is_floating_point:
                return f"{name}({args[0]}, {args[1]})"
            return f"{name}({args[0]}, {args[1]}, propagate_nan=tl.PropagateNan.ALL)"
        case "sqrt":
            # `tl.sqrt` of float32 is approximate on a GPU.
            return f"tl.sqrt_rn({args[0]})" if operand is torch.float32 else f"tl.sqrt({args[0]})"
        case str(word):
            return _WORDS[word].format(*args)
        case _:
            raise AssertionError(f"{expr.op} is not elementwise")


def number(constant: Constant, dtype: torch.dtype) -> str:
    """A constant with its dtype; float32 is Triton's default and stays implicit."""
    return _digits(constant) if dtype is torch.float32 else block_of(constant, dtype)


def block_of(constant: Constant, dtype: torch.dtype) -> str:
    """A constant with its dtype, as a block of one element."""
    return f"tl.full([1], {_digits(constant)}, {TYPES[dtype]})"


def _digits(constant: Constant) -> str:
    value = constant.value
    is_number = not isinstance(value, float) or math.isfinite(value)
    return repr(value) if is_number else f'float("{value}")'


"""What kernels call, as the source that goes before them."""

HELPERS = '''\
@triton.jit
def greater(a, b):
    """The greater of two numbers; NaN propagates."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def less(a, b):
    """The lesser of two numbers; NaN propagates."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product(a, b):
    """The product of two numbers."""
    return a * b


@triton.jit
def remainder(number, by):
    """The remainder, never negative; Triton's own has the sign of the number."""
    left = number % by
    return tl.where(left < 0, left + by, left)


@triton.jit
def quotient(number, by):
    """The quotient rounded down; Triton's own rounds towards 0."""
    return (number - remainder(number, by)) // by


@triton.jit
def more_exponentials(total, greatest, values):
    """Online softmax: sums of `exp(value - maximum)` and the maxima, updated with a block of values.

    A lane takes the contiguous values of one thread: an `exp` for each, and one to rescale its sum.
    """
    parts = tl.reshape(values, [values.shape[0], total.shape[1], values.shape[1] // total.shape[1]])
    now = greater(greatest, tl.reduce(parts, 2, greater))
    base = tl.where(now == float("-inf"), 0, now)
    return total * tl.exp(greatest - base) + tl.sum(tl.exp(parts - base[:, :, None]), 2), now


@triton.jit
def all_exponentials(total, greatest):
    """The sum of all lanes, rescaled to the overall maximum; NaN where that is infinite."""
    most = tl.reduce(greatest, 1, greater)[:, None]
    total = tl.sum(total * tl.exp(greatest - most), 1)[:, None]
    return tl.where(most - most == 0, total, float("nan"))


@triton.jit
def one_more_deviation(squares, mean, value, turn):
    """Welford's update of the sum of squared deviations and the mean, with the `turn`-th value."""
    off = value - mean
    mean += off * (tl.full([1, 1], 1, value.dtype) / turn)
    return squares + off * (value - mean), mean


@triton.jit
def all_deviations(squares, mean, size):
    """The sum of squared deviations from the overall mean; the first lanes may have one value more."""
    after = size - tl.arange(0, squares.shape[1])[None, :]
    count = ((after + squares.shape[1] - 1) // squares.shape[1]).to(squares.dtype)
    off = mean - tl.sum(mean * count, 1)[:, None] / size
    return tl.sum(squares + count * off * off, 1)[:, None]


@triton.jit
def random_word(seed, block, which):
    """One of the four words of a block of the stream of a seed: Philox-4x32-10."""
    low, high = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    a, b, c, d = tl.philox(seed, low, high, zero, zero)
    word = tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))
    return word.to(tl.int64)
'''
