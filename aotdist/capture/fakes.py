"""Fake tensors that the user made: a trace runs in their mode, and meets them as it meets real ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.functional import FakeTensorMode, mode_of_fake


@dataclass(frozen=True, slots=True)
class UserFakes:
    """The fake tensors of a call.

    Args:
        mode: to trace in; None where there is none.
        identities: of fake tensors that the program is given, or may close over.
    """

    mode: FakeTensorMode | None
    identities: frozenset[int]


NO_FAKES = UserFakes(None, frozenset())
"""Every tensor of the call is real."""


def fakes_of(
    named: Iterable[tuple[str, torch.Tensor]],
    closed_over: Callable[[], Collection[int]],
    around: FakeTensorMode | None = None,
) -> UserFakes:
    """The fake tensors of a call.

    Args:
        named: the tensors that the call is given, with their names.
        closed_over: gives identities of tensors that it may close over.
        around: the mode to take if no fake tensor is among them.

    Raises:
        UnsupportedProgram: they are of several modes.
    """
    mode, first, found = around, "", set[int]()
    for path, tensor in named:
        other = mode_of_fake(tensor)
        if other is None:
            continue
        if found and other is not mode:
            raise UnsupportedProgram(
                f"`{path}` is a fake tensor of another mode than `{first}`",
                stage="capture",
                fix="make all fake tensors in one `FakeTensorMode`",
            )
        mode, first = other, first or path
        found.add(id(tensor))
    if mode is None:
        return NO_FAKES
    return UserFakes(mode, frozenset(found.union(closed_over())))
