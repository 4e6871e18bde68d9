"""Proves with Z3 that the guards which a call is tested for imply all that was decided by symbolic sizes.

Guards are simplified, and what follows from others is dropped: a mistake there would let a program run on
sizes that it was not traced for. The proof reads the very expressions that the printed call tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aotdist.errors import BadSettings, InternalError
from aotdist.sizes import Expression, Sizes

_TIMEOUT_MS = 10_000


def prove_guards(sizes: Sizes, counts: Sequence[str] = ()) -> None:
    """Look for sizes that pass the guards and break something that was decided.

    What Z3 cannot express (a square root) or settle within ten seconds is taken as proved.

    Raises:
        BadSettings: Z3 is not installed.
        InternalError: there are such sizes.
    """
    if not sizes.decided:
        return
    try:
        import z3  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError:
        raise BadSettings(
            "`validate_guards` needs Z3, which is not installed", fix="pip install 'aotdist[validate]'"
        ) from None
    scope = {name: _Number(z3.Int(name), z3) for name in (*(name for name, _ in sizes.symbols), *counts)}
    scope |= {"max": _pick(z3, ">="), "min": _pick(z3, "<=")}
    solver = z3.Solver()
    solver.set("timeout", _TIMEOUT_MS)
    solver.add(*_formulas(sizes.guards, scope))
    for decided, formula in zip(sizes.decided, _each(sizes.decided, scope), strict=True):
        if formula is not None and solver.check(z3.Not(formula)) == z3.sat:
            raise InternalError(
                f"sizes pass the guards that break `{decided}`: {solver.model()}; "
                f"guards are {', '.join(sizes.guards)}",
                stage="runtime",
                fix="report this; `aotdist.Settings(dynamic=False)` compiles each size by itself",
            )


def _formulas(guards: Sequence[Expression], scope: dict[str, Any]) -> list[Any]:
    return [formula for formula in _each(guards, scope) if formula is not None]


def _each(guards: Sequence[Expression], scope: dict[str, Any]) -> list[Any]:
    """The formula of each guard; None for what Z3 cannot express."""
    found: list[Any] = []
    for guard in guards:
        try:
            value = eval(guard, {}, scope)
        except (NameError, TypeError):
            value = None
        found.append(value)
    return found


def _pick(z3: Any, order: str) -> Callable[..., _Number]:
    def pick(*numbers: Any) -> _Number:
        first, *rest = (_raw(number) for number in numbers)
        for other in rest:
            first = z3.If(first >= other if order == ">=" else first <= other, first, other)
        return _Number(first, z3)

    return pick


def _raw(number: Any) -> Any:
    return number.term if isinstance(number, _Number) else number


class _Number:
    """A term of Z3 with Python's operators: `//` and `%` of sizes, which are positive, are Z3's own."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, term: Any, z3: Any) -> None:
        self.term = term
        self._z3 = z3

    def _made(self, term: Any) -> _Number:
        return _Number(term, self._z3)

    def __add__(self, other: Any) -> _Number:
        return self._made(self.term + _raw(other))

    def __sub__(self, other: Any) -> _Number:
        return self._made(self.term - _raw(other))

    def __rsub__(self, other: Any) -> _Number:
        return self._made(_raw(other) - self.term)

    def __mul__(self, other: Any) -> _Number:
        return self._made(self.term * _raw(other))

    def __neg__(self) -> _Number:
        return self._made(-self.term)

    def __pow__(self, other: int) -> _Number:
        term = self._z3.IntVal(1)
        for _ in range(other):
            term = term * self.term
        return self._made(term)

    def __floordiv__(self, other: Any) -> _Number:
        return self._made(self.term / _raw(other))

    def __rfloordiv__(self, other: Any) -> _Number:
        return self._made(self._z3.IntVal(other) / self.term)

    def __mod__(self, other: Any) -> _Number:
        return self._made(self.term % _raw(other))

    def __rmod__(self, other: Any) -> _Number:
        return self._made(self._z3.IntVal(other) % self.term)

    def __eq__(self, other: object) -> Any:
        return self.term == _raw(other)

    def __ne__(self, other: object) -> Any:
        return self.term != _raw(other)

    def __lt__(self, other: Any) -> Any:
        return self.term < _raw(other)

    def __le__(self, other: Any) -> Any:
        return self.term <= _raw(other)

    def __gt__(self, other: Any) -> Any:
        return self.term > _raw(other)

    def __ge__(self, other: Any) -> Any:
        return self.term >= _raw(other)

    __radd__ = __add__
    __rmul__ = __mul__
