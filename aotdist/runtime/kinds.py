"""Kinds of calls, and which of them run as they were written since one was refused: `Settings.unsupported`.

Calls of one kind have in common: types, sizes and constants of their arguments, the modes around them, and
which modules train. Ranks have to decide alike, and each has arguments of its own, so theirs do not count.
There, a kind is decided at its first call. Either a rank is refused, and all run such calls as they were
written from then on, without asking. Or all agree on what they compiled, and a later refusal is an error: the
peers may be running what they have.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aotdist.capture.ambient import ambient
from aotdist.capture.captured import UserCall
from aotdist.capture.constants import is_constant, is_leaf
from aotdist.errors import UnsupportedProgram
from aotdist.runtime.ranks import board_of_this_process
from aotdist.torch_seam.trees import pytree

_MANY = 8
"""How many kinds that differ in their arguments are refused before it is not tried with others any more."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells calls of one function apart.

    Args:
        common: what ranks have in common, as a digest.
        whole: that, and what the arguments are.
    """

    common: str
    whole: str

    @classmethod
    def of(cls, call: UserCall) -> Kind:
        """The kind of a call."""
        target = call.target
        training = [module.training for module in target.modules()] if isinstance(target, nn.Module) else []
        # A rank has a device of its own, and functions at addresses of its own.
        modes = ambient()._replace(device=None, dtensor=None)
        common = hashlib.sha256(repr((call.name, call.number, modes, training)).encode()).hexdigest()[:32]
        arguments = (call.args, dict(sorted(call.kwargs.items())))
        leaves, spec = pytree.tree_flatten(arguments, is_leaf=is_leaf)
        return cls(common, repr((common, spec, list(map(_told, leaves)))))


def _told(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        shape = None if leaf.is_nested else leaf.shape
        return type(leaf), shape, leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad
    return type(leaf), leaf if is_constant(leaf) else None


class Kinds:
    """What was decided about the kinds of calls of one function.

    Attributes:
        refused: those that run as they were written, common or whole, and why.
        agreed: those, in common, that ranks run compiled, so that none may run one as it was written.
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self.agreed = set[str]()
        self._counts = Counter[str]()

    def refuse(self, kind: Kind, refusal: UnsupportedProgram) -> bool:
        """Let calls of a kind run as they were written; returns whether this is the first for that reason."""
        reason = f"{refusal.what}, at {refusal.where}" if refusal.where else refusal.what
        is_first = reason not in self.refused.values()
        self._counts[kind.common] += 1
        alike = board_of_this_process() is not None or self._counts[kind.common] >= _MANY
        self.refused[kind.common if alike else kind.whole] = reason
        return is_first

    def is_refused(self, kind: Kind) -> bool:
        """Whether calls of a kind run as they were written."""
        return kind.common in self.refused or kind.whole in self.refused
