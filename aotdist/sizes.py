"""Symbolic sizes: numbers that differ from call to call, how to read them, and the guards on them.

In a trace with symbolic sizes, sizes, strides and arguments are PyTorch's `SymInt`s, and so they are in the
program's facts and plans. At run time each symbol is read from a tensor of the call, and `concrete` evaluates
expressions of symbols.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from aotdist.program import PrimalIdx, Row
from aotdist.torch_seam.symbols import SYMBOLIC, expression, symbols_in, unbacked_symbols

T = TypeVar("T")

Expression: TypeAlias = str
"""Python source of a number in terms of symbols: `s0*4`."""

SCOPE: Mapping[str, Any] = {"math": math, "torch": torch}
"""Modules that an expression may name."""


@dataclass(frozen=True, slots=True)
class NumberStep:
    """A float that Python computes, outside the graph, from numbers that are read from tensors.

    Args:
        function: an operator of Python's, or a function of `math`.
        args: its arguments.
        symbols: the symbols in these.
    """

    function: Callable[..., Any]
    args: tuple[Expression, ...]
    symbols: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], args: Sequence[Any]) -> NumberStep:
        """The call of `function` with numbers, symbolic or not."""
        symbols = {name for arg in args if isinstance(arg, SYMBOLIC) for name in symbols_in(arg)}
        return cls(function, tuple(map(_spelled, args)), tuple(sorted(symbols)))

    def value(self, symbols: Mapping[str, Any]) -> Any:
        """The number, given the values of its symbols."""
        # As a program would: a trace replaces `math`'s functions, `max` and `min` by some that record.
        module = sys.modules.get(self.function.__module__)
        function = getattr(module, self.function.__name__, self.function)
        return function(*(evaluate(arg, symbols) for arg in self.args))


def _spelled(number: Any) -> Expression:
    if isinstance(number, SYMBOLIC):
        return expression(number)
    return repr(number) if number == number and abs(number) != math.inf else f"float('{number}')"


@dataclass(frozen=True, slots=True)
class Measure:
    """A size or stride of an input.

    Args:
        input: which of the primals.
        inner: attribute path of a tensor inside it (`._local_tensor`), else empty.
        of: the method that returns it.
        dim: the method's argument.
    """

    input: PrimalIdx
    inner: str
    of: Literal["size", "stride"]
    dim: int

    def spelled(self, name: str) -> Expression:
        """The expression that reads it from the variable `name`."""
        return f"{name}{self.inner}.{self.of}({self.dim})"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The symbols of a program, and the guards on them.

    Args:
        symbols: name of each, and where to read its value.
        conditions: further sizes and strides, with the expressions that they must equal.
        guards: further conditions that the trace assumed.
        decided: every decision of the trace by symbols; `guards` imply them.
    """

    symbols: tuple[tuple[str, Measure], ...] = ()
    conditions: tuple[tuple[Measure, Expression], ...] = ()
    guards: tuple[Expression, ...] = ()
    decided: tuple[Expression, ...] = ()


STATIC = Sizes()
"""Every size is a number."""


def evaluate(expression: Expression, symbols: Mapping[str, int]) -> Any:
    """The value of an expression."""
    return eval(_code(expression), dict(SCOPE), dict(symbols))


@functools.cache
def _code(expression: Expression) -> CodeType:
    return compile(expression, "<size>", "eval")


def is_symbolic(value: Any) -> bool:
    """Whether `value` contains a symbol."""
    if type(value) in _PLAIN:  # most parts are
        return False
    return isinstance(value, SYMBOLIC) or any(map(is_symbolic, _parts(value)))


_PLAIN = frozenset({int, str, bool, float, type(None), torch.dtype, torch.device, torch.layout})


def numbers_of_data(value: Any) -> dict[str, Any]:
    """The unbacked symbols (numbers that depend on data) in `value`, by name."""
    if isinstance(value, SYMBOLIC):
        return unbacked_symbols(value)
    return {name: number for part in _parts(value) for name, number in numbers_of_data(part).items()}


def concrete(value: T, symbols: Mapping[str, int]) -> T:
    """`value` (a plan, a fact, a recipe) with the numbers of one call in place of symbols."""
    if not is_symbolic(value):
        return value
    made: Any = value
    if isinstance(made, SYMBOLIC):
        made = evaluate(expression(made), symbols)
    elif isinstance(made, dict):
        made = {key: concrete(part, symbols) for key, part in made.items()}
    elif isinstance(made, Row):
        made = Row[Any, Any](concrete(part, symbols) for part in made)
    elif _is_ours(made):
        fields = {f.name: concrete(getattr(made, f.name), symbols) for f in dataclasses.fields(made)}
        made = dataclasses.replace(made, **fields)
    elif isinstance(made, slice):
        made = slice(*(concrete(part, symbols) for part in _parts(made)))
    elif hasattr(made, "_fields"):
        made = type(made)(*(concrete(part, symbols) for part in made))
    else:
        made = type(made)(concrete(part, symbols) for part in made)
    return made


def _parts(value: Any) -> Sequence[Any]:
    """The parts that `concrete` replaces: items of containers, fields of this package's dataclasses."""
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, Row):
        return list(value)
    if isinstance(value, slice):
        return (value.start, value.stop, value.step)
    return [getattr(value, f.name) for f in dataclasses.fields(value)] if _is_ours(value) else ()


def _is_ours(value: Any) -> bool:
    """Whether it is a dataclass of this package; PyTorch's (`DTensorSpec`) are left as they are."""
    ours = type(value).__module__.startswith("aotdist.")
    return ours and dataclasses.is_dataclass(value) and not isinstance(value, type)
