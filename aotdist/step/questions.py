"""By which numbers a traced step chose its way, and whether a call would choose the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.joint import known
from aotdist.joint.scalars import Scalars


@dataclass(frozen=True, slots=True)
class Questions:
    """What one trace asked.

    Args:
        ask: the answers, given the tensors of a call whose numbers are there before it.
        answers: those of the trace.
    """

    ask: Callable[..., Sequence[Any]]
    answers: tuple[bool, ...]

    @classmethod
    def of(cls, scalars: Scalars) -> Questions | None:
        """The questions of a trace; None if it asked nothing."""
        if not scalars.asked:
            return None
        ask = known.as_function(tuple(node for node, _ in scalars.asked), list(scalars.values), scalars.root)
        return cls(ask, tuple(holds for _, holds in scalars.asked))

    def hold(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether the answers are the same now."""
        return tuple(map(bool, self.ask(*given))) == self.answers
