"""Branches of a library's modules on data that is there before a call.

`nn.TransformerEncoder` tests whether its mask is the causal one (`(mask == causal).all()`), models of
transformers whether theirs masks anything. The capture evaluates such a condition on the tensors of its call.
The compiled program holds for calls with the same answers: each call evaluates the conditions before it runs,
and where an answer differs, the program is compiled again. So a condition has to follow, by a few operators,
from arguments, buffers and closed-over tensors that no gradient is taken of.

Conditions in the user's own code are refused: it is better to decide them on the device, at each call.
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
    """A condition may depend on symbolic sizes: the program is to be traced again with static ones."""


class Answers:
    """The conditions that a program has branched on.

    Attributes:
        given: the conditions with their answers, in order.
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
            NotKnown: it depends on something that is not there before a call, or takes too many operators.
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
        """Drop the caller's tensors: the program has returned, and no more conditions are evaluated."""
        self._there.clear()
        self._reals.clear()
