"""Sizes of tensors as something to compare and hash, which for symbolic ones is a guard."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Symbolic:
    """A symbolic size, equal to others of the same expression: to compare these themselves is a guard.

    Args:
        expression: of sympy's.
        number: the size.
    """

    expression: Any
    number: torch.SymInt = field(compare=False)


Number = int | Symbolic
"""A size that can be compared."""


def comparable(size: int | torch.SymInt) -> Number:
    """A size as something to compare and hash."""
    return Symbolic(size.node.expr, size) if isinstance(size, torch.SymInt) else size


def number_of(size: Number) -> Any:
    """The size that was made `comparable`."""
    return size.number if isinstance(size, Symbolic) else size
