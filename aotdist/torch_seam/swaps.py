"""`torch.utils.swap_tensors`: heard of."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import copyreg
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from aotdist.torch_seam.patches import Patch

_swap_bodies = torch._C._swap_tensor_impl


def intercept_swaps(hear: Callable[[torch.Tensor, torch.Tensor], None]) -> AbstractContextManager[None]:
    """Where `torch.utils.swap_tensors` would exchange what two tensors are, in this thread, `hear` is called.

    By then its checks are done, and what the two have of their own as Python objects is exchanged already.
    """
    return _SWAPS.applied(hear)


def _tell_of_swap(first: torch.Tensor, second: torch.Tensor) -> None:
    (_SWAPS.value or _swap_bodies)(first, second)


_SWAPS = Patch[Callable[[torch.Tensor, torch.Tensor], None]](
    "swap_hearers", lambda: [(torch._C, "_swap_tensor_impl", _tell_of_swap)]
)


def swap_attributes(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange what two tensors have of their own as Python objects: class, attributes, slots."""
    slots = copyreg._slotnames(type(first))
    held = [{name: getattr(t, name) for name in slots if hasattr(t, name)} for t in (first, second)]
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    for tensor, before, now in ((first, *held), (second, *reversed(held))):
        for name in before:
            delattr(tensor, name)
        for name, value in now.items():
            setattr(tensor, name, value)


def swap_histories(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange what autograd knows of two tensors that are the same in all else: history, base, views."""
    _swap_bodies(first, second)
