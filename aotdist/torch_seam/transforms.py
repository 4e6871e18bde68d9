"""`torch.func` transforms, autograd functions and scripted functions: which tensors they take."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch._functorch import eager_transforms, predispatch, utils, vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from aotdist.torch_seam.modes import torch_functions_off
from aotdist.torch_seam.patches import Patch

Swap: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

BINDS_APPLY = isinstance(vars(torch.autograd.Function)["apply"], types.ClassMethodDescriptorType)
"""Whether `Function.apply` is in C++ (from torch 2.14 on), so that one bound earlier is not replaced."""

_TAKE_TENSORS = (
    (vmap, "_add_batch_dim"),
    (vmap, "_remove_batch_dim"),
    (eager_transforms, "_wrap_for_grad"),
    # Of `jvp`: an internal function from torch 2.12 on, before that the public one.
    (predispatch, "_make_dual") if hasattr(predispatch, "_make_dual") else (forward_ad, "make_dual"),
    # Of an autograd function: up to torch 2.13 `apply` calls it, even where `apply` was bound before.
    (torch.autograd.Function, "apply") if BINDS_APPLY else (utils, "unwrap_dead_wrappers"),
    (torch._C.ScriptFunction, "__call__"),
)


beneath_transforms: Callable[[], AbstractContextManager[Any]] = temporarily_clear_interpreter_stack
"""In this context, the transforms around it differentiate, batch and wrap nothing."""


def swapped_unseen(swap: Swap) -> AbstractContextManager[None]:
    """Transforms, autograd and scripted functions of this thread take `swap(tensor)` for each tensor.

    They take tensors in C++, which no torch-function mode sees.
    """
    return _SWAPPED.applied(swap)


_SWAPPED = Patch[Swap](
    "tensors_swapped",
    lambda: [
        (owner, name, _taking_swapped(inspect.getattr_static(owner, name))) for owner, name in _TAKE_TENSORS
    ],
)


def _taking_swapped(take: Callable[..., Any]) -> Any:
    @functools.wraps(take)
    def taking(*args: Any, **kwargs: Any) -> Any:
        swap = _SWAPPED.value
        if swap is not None and not _is_of_ours(args, inspect.currentframe()):
            with torch_functions_off():
                args = _swapped(swap, args)
                kwargs = dict(zip(kwargs, _swapped(swap, tuple(kwargs.values())), strict=True))
        return take(*args, **kwargs)

    return classmethod(taking) if isinstance(take, types.ClassMethodDescriptorType) else taking


def _is_of_ours(args: tuple[Any, ...], frame: types.FrameType | None) -> bool:
    """Whether one of this library's own autograd functions is applied: to tensors of the trace."""
    caller = None if frame is None else frame.f_back
    cls = args[0] if BINDS_APPLY and args else None if caller is None else caller.f_locals.get("cls")
    return isinstance(cls, type) and cls.__module__.partition(".")[0] == "aotdist"


def _swapped(swap: Swap, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments, those in tuples included, with the tensors replaced by what `swap` gives for them."""
    plain = (_swapped(swap, arg) if type(arg) is tuple else arg for arg in args)
    return tuple(swap(arg) if isinstance(arg, torch.Tensor) else arg for arg in plain)
