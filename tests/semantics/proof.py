"""Proves with Z3 that the guards which a call is tested for imply all that was decided by symbolic sizes.

Guards are simplified, and what follows from others is dropped: a mistake there would let a program run on
sizes that it was not traced for. The proof reads the very expressions that the printed call tests.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import z3

from aotdist.sizes import Expression, Sizes

_TIMEOUT_MS = 10_000


def prove_guards(sizes: Sizes, counts: Sequence[str] = ()) -> None:
    """Look for sizes that pass the guards and break something that was decided.

    What Z3 cannot express (a square root) or settle within ten seconds is taken as proved.
    """
    scope: dict[str, Any] = {name: z3.Int(name) for name in (*(name for name, _ in sizes.symbols), *counts)}
    scope |= {"max": _pick(operator.ge), "min": _pick(operator.le)}
    solver = z3.Solver()
    solver.set("timeout", _TIMEOUT_MS)
    solver.add(*(formula for guard in sizes.guards if (formula := _formula(guard, scope)) is not None))
    for decided in sizes.decided:
        formula = _formula(decided, scope)
        is_broken = formula is not None and solver.check(z3.Not(formula)) == z3.sat
        assert not is_broken, f"that break `{decided}`: {solver.model()}; guards are {sizes.guards}"


def _formula(guard: Expression, scope: dict[str, Any]) -> Any:
    """A guard as a formula; None for what Z3 cannot express. Sizes are positive: its `/` is Python's `//`."""
    spelled = guard.replace("//", "/")
    try:
        return None if spelled.count("/") != guard.count("//") else eval(spelled, {}, scope)
    except (NameError, TypeError):
        return None


def _pick(is_better: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *numbers: functools.reduce(lambda a, b: z3.If(is_better(a, b), a, b), numbers)
