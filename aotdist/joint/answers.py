"""Choices of a library's modules by data that is there before a call.

`nn.TransformerEncoder` looks whether the mask that it is given is the causal one (`(mask == causal).all()`),
models of transformers whether theirs pads anything. Such a condition is found out while the program is
captured, from the tensors of that call. What was chosen holds for calls with the same answers: a compiled
call finds the conditions out anew before it runs, and where an answer is another, the program is compiled
anew. So a condition has to follow from arguments, buffers and closed-over tensors that no gradient is taken
of, by a few operators.

Conditions of the user's own code are refused: what they choose is better chosen on the device, at each call.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from aotdist.facts import Answer
from aotdist.joint import known
from aotdist.joint.known import NotKnown
from aotdist.program import PrimalIdx

_MOST_STEPS = 16
"""Operators that a condition may take: they run at every call, before the program does."""


class NeedsSizes(Exception):
    """A condition may follow from sizes that are symbols: the program is to be traced without."""


class Answers:
    """The conditions that a program has chosen by.

    Attributes:
        given: what the program chose by, in order.
    """

    def __init__(self) -> None:
        self.given: list[Answer] = []
        self._there: dict[Node, tuple[PrimalIdx, int]] = {}
        self._reals: dict[Node, torch.Tensor] = {}

    def note_data(self, node: Node, at: PrimalIdx, leaf: int, real: torch.Tensor) -> None:
        """Note that the data of a plain tensor of an input exists before a call.

        Args:
            node: stands for the plain tensor.
            at: the input.
            leaf: which of its plain tensors.
            real: the plain tensor.
        """
        self._there[node], self._reals[node] = (at, leaf), real

    def answer(self, condition: Node, root: torch.nn.Module) -> bool:
        """Whether a condition holds.

        Args:
            condition: a tensor of one boolean.
            root: holds the constants of the graph.

        Raises:
            NotKnown: it follows from something that is not there before a call, or by many operators.
        """
        steps = known.leading_to(condition, self._there)
        if len(steps) > _MOST_STEPS:
            raise NotKnown(condition)
        holds: bool = known.result_of(bool, (condition,), {}, root, self._reals)
        needed = {condition}.union(*(step.all_input_nodes for step in steps))
        used = [node for node in self._there if node in needed]
        ask = known.as_function(condition, used, root)
        self.given.append(Answer(tuple(self._there[node] for node in used), ask, holds))
        return holds

    def forget(self) -> None:
        """The program has returned: let go of the caller's tensors; nothing is asked any more."""
        self._there.clear()
        self._reals.clear()
