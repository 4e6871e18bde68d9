"""Operators that compute each element from the elements at its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from aotdist.kernels.ir import Expr, held
from aotdist.kernels.rule import (
    NotEmitted,
    Point,
    Pointwise,
    Reader,
    Rule,
    cast,
    constant,
    counted,
    elementwise,
    number_of,
    operand,
    position,
    val_of,
)
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.symbols import hint

aten, prims = torch.ops.aten, torch.ops.prims

Formula = Callable[..., Expr]
"""Takes operands as expressions of one dtype, and whatever else the operator takes as it stands."""


def _pointwise(formula: Formula, operands: int, *, is_cheap: bool = False) -> Pointwise:
    """Compute in the result's dtype."""

    def value(reader: Reader, node: Node, point: Point) -> Expr:
        dtype: torch.dtype = val_of(node).dtype
        if any(isinstance(arg, Node) for arg in (*node.args[operands:], *node.kwargs.values())):
            raise NotEmitted("a number that differs from call to call")
        given = [operand(reader, arg, point, dtype) for arg in node.args[:operands]]
        return reader.rounded(formula(*given, *node.args[operands:], **node.kwargs), dtype)

    return Pointwise(value, is_cheap)


def _test(formula: Formula) -> Pointwise:
    """Compute in the dtype that the operands promote to; the result is a truth."""

    def value(reader: Reader, node: Node, point: Point) -> Expr:
        left, *rest = node.args
        dtype = torch.result_type(*(map(_value, node.args))) if rest else _value(left).dtype
        return formula(*(operand(reader, arg, point, dtype) for arg in node.args))

    return Pointwise(value, is_cheap=True)


def _value(argument: Any) -> Any:
    return hint(val_of(argument)) if isinstance(argument, Node) else argument


def _word(op: str) -> Formula:
    return lambda *args: elementwise(op, *args)


def _truth(op: str) -> Formula:
    return lambda *args: elementwise(op, *args, dtype=torch.bool)


def _of_truths(op: str) -> Formula:
    return lambda *args: elementwise(op, *(cast(arg, torch.bool) for arg in args), dtype=torch.bool)


def _like(other: Expr, value: float) -> Expr:
    return constant(value, other.dtype)


def _add(left: Expr, right: Expr, *, alpha: float = 1) -> Expr:
    return elementwise("or" if left.dtype is torch.bool else "add", left, _scaled(right, alpha))


def _multiply(left: Expr, right: Expr) -> Expr:
    return elementwise("and" if left.dtype is torch.bool else "mul", left, right)


def _subtract(left: Expr, right: Expr, alpha: float = 1) -> Expr:
    return elementwise("sub", left, _scaled(right, alpha))


def _scaled(value: Expr, by: float) -> Expr:
    return value if by == 1 else _multiply(value, _like(value, by))


def _subtract_from(right: Expr, left: float, alpha: float = 1) -> Expr:
    return _subtract(_like(right, left), right, alpha)


def _shifted(op: str) -> Formula:
    def formula(value: Expr, by: int) -> Expr:
        if value.dtype.is_floating_point or not 0 <= by < 8 * value.dtype.itemsize:
            raise NotEmitted(f"{value.dtype}, shifted by {by}")
        return elementwise(op, value, _like(value, by))

    return formula


def _reciprocal(value: Expr) -> Expr:
    return elementwise("div", _like(value, 1), value)


def _sigmoid(value: Expr) -> Expr:
    return _reciprocal(elementwise("add", _like(value, 1), elementwise("exp", elementwise("neg", value))))


def _relu(value: Expr) -> Expr:
    return elementwise("max", value, _like(value, 0))


_TANH_NEAR_0 = (-0.33333331, 0.13333118, -0.05391007, 0.02131274, -0.00661575)
"""`(tanh(x) / x - 1) / x^2` as a polynomial of `x^2`, by Chebyshev's nodes: 7e-8 of `tanh` up to 0.55."""


def _tanh(value: Expr) -> Expr:
    """`1 - 2 / (exp(2 |x|) + 1)`, and near 0, where that cancels, `x` and an odd polynomial; in float32.

    A division and an exponential of each element bound what activations cost; in float64 there are more.
    """
    if value.dtype is not torch.float32:
        return _exact_tanh(value)
    magnitude, one = elementwise("abs", value), _like(value, 1)
    grown = elementwise("add", elementwise("exp", elementwise("mul", magnitude, _like(value, 2))), one)
    far = elementwise("sub", one, elementwise("div", _like(value, 2), grown))
    is_negative = elementwise("lt", value, _like(value, 0), dtype=torch.bool)
    far = elementwise("where", is_negative, elementwise("neg", far), far, dtype=value.dtype)
    square, rest = elementwise("mul", value, value), _like(value, _TANH_NEAR_0[-1])
    for factor in reversed((1, *_TANH_NEAR_0[:-1])):
        rest = elementwise("add", elementwise("mul", rest, square), _like(value, factor))
    near = elementwise("mul", value, rest)  # which keeps the sign of a 0
    is_near = elementwise("lt", magnitude, _like(value, 0.55), dtype=torch.bool)
    return elementwise("where", is_near, near, far, dtype=value.dtype)


def _exact_tanh(value: Expr) -> Expr:
    """Through `expm1`, which keeps small values exact: `-e / (e + 2)` for `e = expm1(-2 |x|)`."""
    magnitude = elementwise("abs", value)
    decay = _expm1(elementwise("mul", magnitude, _like(value, -2)))
    result = elementwise("div", elementwise("neg", decay), elementwise("add", decay, _like(value, 2)))
    is_negative = elementwise("lt", value, _like(value, 0), dtype=torch.bool)
    return elementwise("where", is_negative, elementwise("neg", result), result, dtype=value.dtype)


def _log1p(value: Expr) -> Expr:
    """Exact for small values; source: Kahan, as in Goldberg 1991, theorem 4."""
    one = _like(value, 1)
    grown = elementwise("add", one, value)
    is_tiny = elementwise("eq", grown, one, dtype=torch.bool)
    is_infinite = elementwise("eq", value, _like(value, math.inf), dtype=torch.bool)
    ratio = elementwise("div", value, elementwise("sub", grown, one))
    exact = elementwise("mul", elementwise("log", grown), ratio)
    rest = elementwise("where", is_infinite, value, exact, dtype=value.dtype)
    return elementwise("where", is_tiny, value, rest, dtype=value.dtype)


def _expm1(value: Expr) -> Expr:
    """Exact for small values; source: Kahan, as in Higham 2002, section 1.14.1."""
    one = _like(value, 1)
    power = elementwise("exp", value)
    less = elementwise("sub", power, one)
    is_tiny = elementwise("eq", power, one, dtype=torch.bool)
    is_far = elementwise("gt", elementwise("abs", value), one, dtype=torch.bool)
    exact = elementwise("div", elementwise("mul", less, value), elementwise("log", power))
    rest = elementwise("where", is_far, less, exact, dtype=value.dtype)
    return elementwise("where", is_tiny, value, rest, dtype=value.dtype)


def _sign(value: Expr) -> Expr:
    zero = _like(value, 0)
    up, down = (cast(elementwise(op, value, zero, dtype=torch.bool), value.dtype) for op in ("gt", "lt"))
    return elementwise("sub", up, down)


def _power(value: Expr, exponent: float) -> Expr:
    match exponent:
        case 0.5:
            return elementwise("sqrt", value)
        case -0.5:
            return elementwise("rsqrt", value)
        case -1 | -2:
            return _reciprocal(_power(value, -exponent))
        case 0:
            return _like(value, 1)
        case int() | float() if exponent in (1, 2, 3, 4):
            return value if exponent == 1 else elementwise("mul", _power(value, exponent - 1), value)
        case _:
            raise NotEmitted(f"the exponent {exponent}")


def _power_of(reader: Reader, node: Node, point: Point) -> Expr:
    """A number to the power of a tensor, in float64: where it is taken off 1, every digit counts."""
    base, exponent = node.args
    dtype: torch.dtype = val_of(node).dtype
    if dtype is torch.float64 or not dtype.is_floating_point or isinstance(base, Node):
        raise NotEmitted(f"a power of {dtype}")
    rounded = torch.tensor(base, dtype=held(dtype)).item()
    if not 0 < rounded < math.inf:
        raise NotEmitted(f"the powers of {base}")
    wide = cast(operand(reader, exponent, point, dtype), torch.float64)
    power = elementwise("exp2", elementwise("mul", wide, constant(math.log2(rounded), torch.float64)))
    return reader.rounded(cast(power, dtype), dtype)


def _plus_product(total: Expr, one: Expr, other: Expr, *, value: float = 1) -> Expr:
    return elementwise("add", total, _multiply(_scaled(one, value), other))


def _plus_quotient(total: Expr, one: Expr, other: Expr, *, value: float = 1) -> Expr:
    return elementwise("add", total, elementwise("div", _scaled(one, value), other))


def _clamp(value: Expr, low: float | None = None, high: float | None = None) -> Expr:
    if low is not None:
        value = elementwise("max", value, _like(value, low))
    return value if high is None else elementwise("min", value, _like(value, high))


def _clamp_max(value: Expr, high: float) -> Expr:
    return _clamp(value, None, high)


def _is_nan(value: Expr) -> Expr:
    return elementwise("ne", value, value, dtype=torch.bool)


def _is_infinite(value: Expr) -> Expr:
    if not value.dtype.is_floating_point:
        return constant(False, torch.bool)
    return elementwise("eq", elementwise("abs", value), _like(value, math.inf), dtype=torch.bool)


def _divided(left: Expr, right: Expr, *, rounding_mode: str | None = None) -> Expr:
    quotient = elementwise("div", left, right)
    if rounding_mode is None:
        return quotient
    if not left.dtype.is_floating_point:
        raise NotEmitted("a division of whole numbers")
    return elementwise(rounding_mode, quotient)


def _copy(reader: Reader, node: Node, point: Point) -> Expr:
    return operand(reader, node.args[0], point, val_of(node).dtype)


def _copied_to(reader: Reader, node: Node, point: Point) -> Expr:
    """The second argument, in the layout of the first."""
    dtype: torch.dtype = val_of(node).dtype
    return reader.rounded(operand(reader, node.args[1], point, dtype), dtype)


def _converted(reader: Reader, node: Node, point: Point) -> Expr:
    dtype: torch.dtype = val_of(node).dtype
    return reader.rounded(operand(reader, node.args[0], point, dtype), dtype)


def _where(reader: Reader, node: Node, point: Point) -> Expr:
    dtype: torch.dtype = val_of(node).dtype
    condition = operand(reader, node.args[0], point, torch.bool)
    chosen = [operand(reader, arg, point, dtype) for arg in node.args[1:]]
    return elementwise("where", condition, *chosen, dtype=held(dtype))


_WORDS_IN_A_BLOCK = 4


def _random_word(reader: Reader, node: Node, point: Point) -> Expr:
    """A word of the stream of a seed and an offset, by number (`Settings.functional_rng`).

    A kernel computes the words that it needs where it needs them; a backward computes the same ones again.
    """
    seed, offset, start, *_ = node.args
    assert isinstance(seed, Node) and isinstance(offset, Node), "seed and offset are tensors"
    (index,) = point.indices
    first = elementwise("add", reader.read(offset, point.to(())), counted(number_of(start), torch.int64))
    block = elementwise("add", first, position(index // _WORDS_IN_A_BLOCK))
    which = position(index % _WORDS_IN_A_BLOCK)
    return elementwise("philox", reader.read(seed, point.to(())), block, which)


_WORDS = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "trunc")
_TESTS = ("eq", "ne", "lt", "le", "gt", "ge")
_BITS = {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor"}
_TRUTHS = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor"}

RULES: dict[OpOverload, Rule] = {
    **{getattr(aten, word).default: _pointwise(_word(word), 1) for word in _WORDS},
    **{
        getattr(getattr(aten, test), kind): _test(_truth(test))
        for test in _TESTS
        for kind in ("Tensor", "Scalar")
    },
    **{
        getattr(getattr(aten, name), kind): _pointwise(_word(word), 2)
        for name, word in _BITS.items()
        for kind in ("Tensor", "Scalar")
    },
    **{getattr(aten, name).default: _test(_of_truths(word)) for name, word in _TRUTHS.items()},
    aten.logical_not.default: _test(_of_truths("not")),
    aten.bitwise_not.default: _pointwise(_word("not"), 1),
    aten.isnan.default: _test(_is_nan),
    aten.isinf.default: _test(_is_infinite),
    aten.neg.default: _pointwise(_word("neg"), 1, is_cheap=True),
    aten.abs.default: _pointwise(_word("abs"), 1, is_cheap=True),
    aten.sign.default: _pointwise(_sign, 1),
    aten.relu.default: _pointwise(_relu, 1, is_cheap=True),
    aten.reciprocal.default: _pointwise(_reciprocal, 1),
    aten.sigmoid.default: _pointwise(_sigmoid, 1),
    aten.tanh.default: _pointwise(_tanh, 1),
    aten.log1p.default: _pointwise(_log1p, 1),
    aten.expm1.default: _pointwise(_expm1, 1),
    aten.add.Tensor: _pointwise(_add, 2),
    aten.add.Scalar: _pointwise(_add, 2),
    aten.sub.Tensor: _pointwise(_subtract, 2),
    aten.sub.Scalar: _pointwise(_subtract, 2),
    aten.rsub.Scalar: _pointwise(_subtract_from, 1),
    aten.mul.Tensor: _pointwise(_multiply, 2),
    aten.mul.Scalar: _pointwise(_multiply, 2),
    aten.div.Tensor: _pointwise(_divided, 2),
    aten.div.Scalar: _pointwise(_divided, 2),
    aten.div.Tensor_mode: _pointwise(_divided, 2),
    aten.maximum.default: _pointwise(_word("max"), 2),
    aten.minimum.default: _pointwise(_word("min"), 2),
    aten.clamp.default: _pointwise(_clamp, 1),
    aten.clamp_min.default: _pointwise(_clamp, 1),
    aten.clamp_max.default: _pointwise(_clamp_max, 1),
    aten.pow.Tensor_Scalar: _pointwise(_power, 1),
    aten.__lshift__.Scalar: _pointwise(_shifted("shift left"), 1),
    aten.__rshift__.Scalar: _pointwise(_shifted("shift right"), 1),
    aten.bitwise_left_shift.Tensor_Scalar: _pointwise(_shifted("shift left"), 1),
    aten.bitwise_right_shift.Tensor_Scalar: _pointwise(_shifted("shift right"), 1),
    aten.pow.Scalar: Pointwise(_power_of),
    aten.addcmul.default: _pointwise(_plus_product, 3),
    aten.addcdiv.default: _pointwise(_plus_quotient, 3),
    aten.copy.default: Pointwise(_copied_to, is_cheap=True),
    aten.where.self: Pointwise(_where),
    aten.clone.default: Pointwise(_copy, is_cheap=True),
    aten.lift_fresh_copy.default: Pointwise(_copy, is_cheap=True),
    aten._to_copy.default: Pointwise(_converted, is_cheap=True),
    prims.convert_element_type.default: Pointwise(_converted, is_cheap=True),
}

RULES_BY_NAME: dict[str, Rule] = {
    "prims.fma.default": _pointwise(_word("fma"), 3),
    "aotdist.philox.default": Pointwise(_random_word),
}
"""Rules of operators that are registered later: by Inductor, and by stages that import this one."""
