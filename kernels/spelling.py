"""How Triton spells what is done to each element."""

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
    """A constant; with its dtype, but for float32, which is what Triton takes a float for."""
    return _digits(constant) if dtype is torch.float32 else block_of(constant, dtype)


def block_of(constant: Constant, dtype: torch.dtype) -> str:
    """A constant with its dtype, as a block of one element."""
    return f"tl.full([1], {_digits(constant)}, {TYPES[dtype]})"


def _digits(constant: Constant) -> str:
    value = constant.value
    is_number = not isinstance(value, float) or math.isfinite(value)
    return repr(value) if is_number else f'float("{value}")'
