"""Proves with Z3 that the guards on sizes imply every decision that the trace made by symbolic sizes.

Guards are simplified, and implied ones dropped: a mistake there would let a program run on sizes that it was
not traced for. The proof reads the same expressions that the printed call tests.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from aotdist.errors import BadSettings, InternalError
from aotdist.sizes import Expression, Sizes

_TIMEOUT_MS = 10_000


def prove_guards(sizes: Sizes, counts: Sequence[str] = ()) -> None:
    """Look for sizes that pass the guards and contradict a decision of the trace.

    Decisions that Z3 cannot express (a square root), or settle within ten seconds, count as proved.

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
    scope = {name: z3.Int(name) for name in (*(name for name, _ in sizes.symbols), *counts)}
    scope |= {"max": _pick(z3, operator.ge), "min": _pick(z3, operator.le)}
    solver = z3.Solver()
    solver.set("timeout", _TIMEOUT_MS)
    solver.add(*(formula for guard in sizes.guards if (formula := _formula(guard, scope)) is not None))
    for decided in sizes.decided:
        formula = _formula(decided, scope)
        if formula is not None and solver.check(z3.Not(formula)) == z3.sat:
            raise InternalError(
                f"sizes pass the guards that break `{decided}`: {solver.model()}; "
                f"guards are {', '.join(sizes.guards)}",
                stage="runtime",
                fix="report this; `aotdist.Settings(dynamic=False)` compiles each size by itself",
            )


def _formula(guard: Expression, scope: dict[str, Any]) -> Any:
    """A guard as a formula, or None if Z3 cannot express it. Of positive integers, its `/` is `//`."""
    spelled = guard.replace("//", "/")
    try:
        return None if spelled.count("/") != guard.count("//") else eval(spelled, {}, scope)
    except (NameError, TypeError):
        return None


def _pick(z3: Any, is_better: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *numbers: functools.reduce(lambda a, b: z3.If(is_better(a, b), a, b), numbers)
