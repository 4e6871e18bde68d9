"""Writes to what a tensor is, rather than to what it holds: `t_`, `resize_`, `set_`, `requires_grad_`.

They are repeated on the user's tensor, outside of the region and in the program's order, by the operations
that the program used. The region sees the tensor as it was: new data is returned, and written, in the old
sizes and strides, before these change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aotdist.facts import MetadataWrite
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.autograd import history_of


def rewrite(
    tensor: torch.Tensor, write: MetadataWrite, args: Sequence[Any], data: torch.Tensor | None = None
) -> None:
    """Repeat one write of metadata on `tensor`, with `args` in the place of the write's own.

    Args:
        tensor: the caller's.
        write: the write.
        args: its arguments, tensors of the trace replaced by those of the call.
        data: what the tensor's plain tensors are to hold afterwards; None to leave them as they are.
    """
    history_of(tensor)  # makes it: a view whose base got one is a leaf to autograd until it is asked for
    with torch.set_grad_enabled(write.grad):
        write.op(tensor, *args, **dict(write.kwargs))
    if data is not None:
        for plain, value in zip(plain_tensors(tensor), plain_tensors(data), strict=True):
            plain.data.copy_(value)
