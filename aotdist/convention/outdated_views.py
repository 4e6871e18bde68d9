"""Histories of views whose base was changed in place after they were made.

After a write to its base, autograd makes the history of a view again when it is asked for it. In eager it
goes by the places of the two in memory, whatever sizes the base has by then. Tensors of a trace have no
memory: there, autograd calls the operators that made the view once more, on the base as it is now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from aotdist.convention.changes import Change
from aotdist.facts import ViewStep
from aotdist.torch_seam.autograd import creation_meta, set_creation_meta
from aotdist.torch_seam.swaps import swap_histories


def make_again(view: torch.Tensor, changed: torch.Tensor, steps: Sequence[ViewStep]) -> None:
    """Give a view the history of one that is made of its base as that is after a change.

    Args:
        view: the view; all else of it stays.
        changed: a view of the base as it is now, that shows it as it was.
        steps: how the view was made of the base as it was.
    """
    creation, again = creation_meta(view), changed
    for step in steps:
        result = step.of(again)
        again = result if step.pick is None else result[step.pick]
    swap_histories(view, again)
    set_creation_meta(view, creation)


def lies_elsewhere(base: torch.Tensor, changes: Iterable[Change]) -> bool:
    """Whether some of these changes moved a tensor in its storage, or gave it other sizes or strides.

    Eager makes the history of a view again from places in the storage.
    """
    formers = [change.former for change in changes if change.moves() and change.former is not None]
    return any(_place(former) != _place(base) for former in formers)


def _place(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())
