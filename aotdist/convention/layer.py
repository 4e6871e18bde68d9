"""What a calling-convention layer is.

A layer *lowers* a program to one with a simpler convention and leaves a `Plan`, whose `lift` undoes
it at run time. The law that each layer is tested by, alone and without compiling anything:

    inner, plan = LAYER.lower(program, facts)
    plan.lift(inner.fn)  behaves as  program.fn,  in its results and in what it writes to its arguments

From the outside in, a call passes: `dedupe` (an argument given twice), `synthetic_base` (arguments that share
memory), `epilogue` (outputs that are views or inputs), `metadata` (writes to sizes, strides and history),
`mutation.DIFFERENTIABLE` (writes that take part in the backward), then the autograd node, and inside it
`subclass` (wrappers taken apart) and `mutation.PLAIN` (writes that do not). What is left is a function
of plain tensors without aliases or writes, and, if `rng` is asked for, one without a hidden generator: the
graph.

Plans are frozen data, and follow from the facts; the lifts composed are the reference that the printed
runtime (`aotdist.runtime.printer`) is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from aotdist.facts import Facts
from aotdist.program import Program

Call: TypeAlias = Callable[[Sequence[Any]], list[Any]]
"""A program's function, taking its arguments as one sequence."""


class Plan(Protocol):
    """Undoes a lowering at run time."""

    def lift(self, call: Call) -> Call:
        """`call` speaks the inner convention; the result speaks the outer one."""
        ...


class Layer(Protocol):
    """Lowers a program to a simpler convention."""

    def lower(self, program: Program[Any], facts: Facts) -> tuple[Program[Any], Plan]:
        """The simpler program, and the plan that undoes the step."""
        ...
