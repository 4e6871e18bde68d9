"""Views of tensors that were changed in place since, to autograd.

After any write of its base, autograd makes the history of a view again, once it is asked for it. In eager
that follows from where the two lie in memory, whatever the base looks like by then. Tensors of a trace lie
nowhere: autograd calls the operators that made the view once more, on the base as it is now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from aotdist.convention.changes import Change
from aotdist.facts import ViewStep
from aotdist.torch_seam.autograd import creation_meta, set_creation_meta
from aotdist.torch_seam.swaps import swap_histories


def make_again(view: torch.Tensor, changed: torch.Tensor, steps: Sequence[ViewStep]) -> None:
    """Let a view be made of what its base is after a change, to autograd.

    Args:
        view: it stays what it is in all else.
        changed: a view of the base as it is now, that shows it as it was.
        steps: how the view was made of what the base was.
    """
    creation, again = creation_meta(view), changed
    for step in steps:
        result = step.of(again)
        again = result if step.pick is None else result[step.pick]
    swap_histories(view, again)
    set_creation_meta(view, creation)


def lies_elsewhere(base: torch.Tensor, changes: Iterable[Change]) -> bool:
    """Whether some of these changes let a tensor lie otherwise in its storage: eager counts from there."""
    formers = [change.former for change in changes if change.moves() and change.former is not None]
    return any(_place(former) != _place(base) for former in formers)


def _place(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())
