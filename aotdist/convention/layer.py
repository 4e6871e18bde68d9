"""What a step of the calling convention is.

A graph is a function of plain tensors without aliases or writes, and, if `rng` is asked for, one without a
hidden generator. Between it and the user's program lie steps, each with a *plan* whose `lift` makes of a call
that speaks the inner convention one that speaks the outer:

    plan.lift(inner)  behaves as  outer,  in its results and in what it writes to its arguments

From the outside in, a call passes: `dedupe` (an argument given twice), `synthetic_base` (arguments that share
memory), `epilogue` (outputs that are views or inputs), `metadata` (writes to sizes, strides and history),
`mutation` (writes that take part in the backward), then the autograd node, and inside it `subclass` (wrappers
taken apart), `mutation` (writes that do not) and `rng`. The first two are *layers*: they lower the program
that is traced, before the trace. The plans of the others follow from its facts, and what lowers the program
is the trace itself; `tests/laws` lowers programs by hand, to hold each plan to the law without a compiler.

Plans are frozen data; the lifts composed are the reference that the printed runtime
(`aotdist.runtime.printer`) is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Call: TypeAlias = Callable[[Sequence[Any]], list[Any]]
"""A program's function, taking its arguments as one sequence."""
