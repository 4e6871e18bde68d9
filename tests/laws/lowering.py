"""One trace of a plain function, for the facts that layers are lowered by. Nothing is compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotdist.convention.layer import Call
from aotdist.facts import Facts
from aotdist.joint.context import TraceOptions
from aotdist.joint.recorder import Recorder
from aotdist.joint.trace import trace
from aotdist.program import PrimalIdx, Program, Row, Slot


def program_of(fn: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Program[PrimalIdx]:
    """`fn`, which takes tensors and returns a list, as a program."""
    slots = Row[PrimalIdx, Slot](Slot("primal", f"args[{k}]") for k in range(len(tensors)))
    return Program(lambda *args: list(fn(*args)), slots, Row(tensors))


def facts_of(program: Program[PrimalIdx], *, training: bool = True) -> Facts:
    """What one trace of `program` shows.

    Raises:
        UnsupportedProgram: it cannot be traced.
    """

    def name_closed_over(real: torch.Tensor) -> Slot:
        raise AssertionError(f"the program closes over {real}")

    with torch.set_grad_enabled(training):
        options = TraceOptions(training=training)
        return trace(program, Recorder({}), options, name_closed_over=name_closed_over).facts


def call_of(program: Program[Any]) -> Call:
    """A program's function, taking its arguments as one sequence."""
    return lambda args: list(program.fn(*args))
