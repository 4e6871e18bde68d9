"""An argument given twice is one input: gradients add up on it, and a write is seen through both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aotdist.program import ArgIdx, Call, DistinctIdx, Program, Row


@dataclass(frozen=True, slots=True)
class DedupePlan:
    """The distinct tensors among the arguments.

    Args:
        kept: for each distinct tensor, the first argument that is that tensor.
        source: for each argument, the distinct tensor that it is.
    """

    kept: Row[DistinctIdx, ArgIdx]
    source: Row[ArgIdx, DistinctIdx]

    def lift(self, call: Call) -> Call:
        """Drop the repeated arguments."""

        def lifted(args: Sequence[Any]) -> list[Any]:
            return call([args[idx] for idx in self.kept])

        return lifted


def lower(program: Program[ArgIdx]) -> tuple[Program[DistinctIdx], DedupePlan]:
    """One input for each distinct tensor among the examples; needs no facts, so it runs before the trace."""
    position: dict[int, DistinctIdx] = {}
    kept: list[ArgIdx] = []
    source: list[DistinctIdx] = []
    for idx, example in program.examples.enumerate():
        if id(example) not in position:
            position[id(example)] = DistinctIdx(len(kept))
            kept.append(idx)
        source.append(position[id(example)])

    def fn(*primals: Any) -> list[Any]:
        return program.fn(*(primals[idx] for idx in source))

    inner = Program(fn, Row(program.ins[idx] for idx in kept), Row(program.examples[idx] for idx in kept))
    return inner, DedupePlan(Row(kept), Row(source))
