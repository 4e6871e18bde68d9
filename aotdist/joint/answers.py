"""Branches of a library's modules on data that is there before a call.

`nn.TransformerEncoder` tests whether its mask is the causal one (`(mask == causal).all()`), models of
transformers whether theirs masks anything. The capture evaluates such a condition on the tensors of its call.
The compiled program holds for calls with the same answers: each call evaluates the conditions before it runs,
and where an answer differs, the program is compiled again. So a condition has to follow, by a few operators,
from arguments, buffers and closed-over tensors that no gradient is taken of, and from symbolic sizes.

Conditions in the user's own code are refused: it is better to decide them on the device, at each call.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from aotdist.facts import Answer
from aotdist.joint import known
from aotdist.joint.known import NotKnown
from aotdist.program import PrimalIdx
from aotdist.sizes import Expression

_MOST_STEPS = 16
"""Operators that a condition may take: they run at every call, before the program does."""


class NeedsSizes(Exception):
    """A condition takes too many operators from symbolic sizes: with static ones it may be known."""


class Answers:
    """The conditions that a program has branched on.

    Attributes:
        given: the conditions with their answers, in order.
    """

    def __init__(self) -> None:
        self.given: list[Answer] = []
        self._there: dict[Node, tuple[PrimalIdx, int]] = {}
        self._sizes: dict[Node, Expression] = {}
        self._reals: dict[Node, torch.Tensor | float] = {}

    def note_data(self, node: Node, at: PrimalIdx, leaf: int, real: torch.Tensor) -> None:
        """Note that the data of a plain tensor of an input exists before a call.

        Args:
            node: stands for the plain tensor.
            at: the input.
            leaf: which of its plain tensors.
            real: the plain tensor.
        """
        self._there[node], self._reals[node] = (at, leaf), real

    def note_size(self, node: Node, spelled: Expression, number: float) -> None:
        """Note that a symbolic number is known before a call.

        Args:
            node: stands for it.
            spelled: what it is in terms of symbols.
            number: what it is in the call that is traced.
        """
        self._sizes[node], self._reals[node] = spelled, number

    def answer(self, condition: Node, root: torch.nn.Module) -> bool:
        """Whether a condition holds.

        Args:
            condition: a tensor of one boolean.
            root: holds the constants of the graph.

        Raises:
            NotKnown: it depends on something that is not there before a call, or takes too many operators.
        """
        steps = known.leading_to(condition, self._reals)
        if len(steps) > _MOST_STEPS:
            raise NotKnown(condition)
        holds: bool = known.result_of(bool, (condition,), {}, root, self._reals)
        needed = {condition}.union(*(step.all_input_nodes for step in steps))
        used = [node for node in self._there if node in needed]
        sizes = [node for node in self._sizes if node in needed]
        ask = known.as_function(condition, [*used, *sizes], root)
        of, numbers = (self._there[node] for node in used), (self._sizes[node] for node in sizes)
        self.given.append(Answer(tuple(of), tuple(numbers), ask, holds))
        return holds

    def forget(self) -> None:
        """Drop the caller's tensors: the program has returned, and no more conditions are evaluated."""
        self._there.clear()
        self._sizes.clear()
        self._reals.clear()
