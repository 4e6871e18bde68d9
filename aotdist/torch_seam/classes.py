"""Classes of tensors: which functions they override, and where a tensor is converted to another class."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

from aotdist.torch_seam.modes import class_functions_off
from aotdist.torch_seam.patches import Patch

Remake: TypeAlias = Callable[[torch.Tensor, type[torch.Tensor], Callable[..., torch.Tensor]], Any]
"""Called when a tensor is converted to a class, with the operator that autograd sees: `alias` or `detach`.

It returns the tensor of that class, or None to let PyTorch make it.
"""


_make_subclass = torch.Tensor._make_subclass

CACHED_SIZES = frozenset(
    f"_{numbers}_capsule{end}"
    for numbers in ("sizes", "strides", "sym_sizes", "sym_strides")
    for end in ("", "_len")
)
"""Attributes in which PyTorch caches the sizes of a tensor whose class computes them."""


def hearing_of_classes(hear: Remake) -> AbstractContextManager[None]:
    """In this context and thread, `hear` is called where a tensor is converted to another class.

    By `as_subclass`, `_make_subclass` (`nn.Parameter` calls it) or the class itself, called with a tensor.
    None of these is a torch function, so no mode hears of them.
    """
    return _CLASSES.applied(hear)


def _heard(tensor: torch.Tensor, cls: type[torch.Tensor], op: Callable[..., torch.Tensor]) -> Any:
    hear = _CLASSES.value
    return None if hear is None else hear(tensor, cls, op)


def _as_subclass(tensor: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
    made = _heard(tensor, cls, torch.ops.aten.alias.default)
    return torch._C.TensorBase.as_subclass(tensor, cls) if made is None else made


def _subclass_of_data(
    cls: type[torch.Tensor], data: torch.Tensor, require_grad: bool = False, **options: Any
) -> torch.Tensor:
    made = None if options else _heard(data, cls, torch.ops.aten.detach.default)
    if made is None:
        return _make_subclass(cls, data, require_grad, **options)
    with class_functions_off():  # a mode hears of it, and notes it
        return made.requires_grad_() if require_grad else made


def _of_class(cls: type[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        made = _heard(args[0], cls, torch.ops.aten.alias.default)
        if made is not None:
            return made
    return torch._C.TensorBase.__new__(cls, *args, **kwargs)


_CLASSES = Patch[Remake](
    "class_hearers",
    lambda: [
        (torch.Tensor, "as_subclass", _as_subclass),
        (torch.Tensor, "__new__", staticmethod(_of_class)),
        (torch.Tensor, "_make_subclass", staticmethod(_subclass_of_data)),
    ],
)


def attributes_from_users(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes of a tensor that PyTorch did not set."""
    return {name: value for name, value in vars(tensor).items() if name not in CACHED_SIZES}


def flatten_protocol(tensor: Any) -> tuple[list[str], Any]:
    """Attribute names and context of a wrapper tensor."""
    return tensor.__tensor_flatten__()


def hears_of_functions(cls: type[torch.Tensor]) -> bool:
    """Whether torch functions on tensors of a class call its `__torch_function__`, own or default."""
    return cls is not torch.Tensor and cls.__torch_function__ is not torch._C._disabled_torch_function_impl


def dispatches(cls: Any) -> bool:
    """Whether a tensor class handles operators itself, below autograd."""
    return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
