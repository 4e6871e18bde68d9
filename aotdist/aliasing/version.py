"""Version counters, by which autograd notices that a tensor which it saved was written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from aotdist.subclasses.protocol import inner_tensors, is_wrapper
from aotdist.torch_seam.tensors import preserved_version, set_versions


def uncounted(target: torch.Tensor) -> AbstractContextManager[None]:
    """Let writes of `target` inside of the context leave its version counter alone."""
    return nullcontext() if target.is_inference() else preserved_version(target)


def version_of(tensor: torch.Tensor) -> int:
    """The version counter; 0 for a tensor that has none."""
    return 0 if tensor.is_inference() else tensor._version


def bump(target: torch.Tensor, count: int) -> None:
    """Increase the version counter of `target` by `count`."""
    if count and not target.is_inference():
        torch.autograd.graph.increment_version([target] * count)


def rewind(target: torch.Tensor, count: int) -> None:
    """Decrease the version counter of `target` by `count`: that many writes are about to be repeated."""
    if not target.is_inference():
        set_versions((target,), (target._version - count,))


def written_uncounted(args: Sequence[Any]) -> list[torch.Tensor]:
    """What an operator on lists may write, if there are wrappers in them: eager counts no such write."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    if not any(isinstance(item, torch.Tensor) and is_wrapper(item) for items in lists for item in items):
        return []
    written = [item for item in lists[0] if isinstance(item, torch.Tensor)]
    return [tensor for item in written for tensor in (item, *(inner for _, inner in inner_tensors(item)))]


def all_uncounted(targets: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """`uncounted` for each of them."""
    stack = ExitStack()
    for target in targets:
        stack.enter_context(uncounted(target))
    return stack
