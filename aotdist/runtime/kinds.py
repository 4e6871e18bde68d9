"""Which kinds of calls run eagerly because one was refused: `Settings(unsupported="eager")`.

Calls of one kind have the same types, sizes and constants of arguments, ambient modes and training flags.
Several ranks must decide the same, and their arguments differ, so there only modes and flags count, and the
first call of a kind decides. If it is refused on some rank, all ranks run such calls eagerly from then on. If
all agree on what they compiled, a later refusal is an error, as peers may be running the compiled program.
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
"""After so many refusals, calls run eagerly whatever their arguments are."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a call.

    Args:
        common: digest of what is the same on all ranks: modes and training flags.
        whole: that, and a description of the arguments.
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
        return cls(common, repr((common, spec, list(map(_described, leaves)))))


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        shape = None if leaf.is_nested else leaf.shape
        return type(leaf), shape, leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad
    return type(leaf), leaf if is_constant(leaf) else None


class Kinds:
    """The decisions about kinds of calls of one function.

    Attributes:
        refused: the reason by `common` or `whole` of each kind that runs eagerly.
        agreed: the `common` of kinds that ranks agreed to run compiled.
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self.agreed = set[str]()
        self._counts = Counter[str]()

    def refuse(self, kind: Kind, refusal: UnsupportedProgram) -> bool:
        """Run calls of a kind eagerly from now on; returns whether the reason is new."""
        reason = f"{refusal.what}, at {refusal.where}" if refusal.where else refusal.what
        is_new = reason not in self.refused.values()
        self._counts[kind.common] += 1
        any_arguments = board_of_this_process() is not None or self._counts[kind.common] >= _MANY
        self.refused[kind.common if any_arguments else kind.whole] = reason
        return is_new

    def is_refused(self, kind: Kind) -> bool:
        """Whether calls of a kind run eagerly."""
        return kind.common in self.refused or kind.whole in self.refused
