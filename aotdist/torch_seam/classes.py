"""Classes of tensors: which functions they override, and where a tensor is converted to another class."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from aotdist.torch_seam.modes import class_functions_off
from aotdist.torch_seam.patches import all_replaced_here

Remake: TypeAlias = Callable[[torch.Tensor | None, type[torch.Tensor], Callable[..., torch.Tensor]], Any]
"""Called when a tensor is converted to a class, with the operator that autograd sees: `alias` or `detach`.

It returns the tensor of that class, or None to let PyTorch make it. There is no tensor if sizes are given.
"""

_ALIAS, _DETACH = torch.ops.aten.alias.default, torch.ops.aten.detach.default

is_wrapper_class = functools.cache(is_traceable_wrapper_subclass_type)
"""Whether tensors of a class say themselves how they are flattened."""

CACHED_SIZES = frozenset(
    f"_{numbers}_capsule{end}"
    for numbers in ("sizes", "strides", "sym_sizes", "sym_strides")
    for end in ("", "_len")
)
"""Attributes in which PyTorch caches the sizes of a tensor whose class computes them."""


def intercept_classes(callback: Remake) -> AbstractContextManager[None]:
    """In this context and thread, `callback` is called where a tensor is converted to another class.

    By `as_subclass`, `_make_subclass`, `nn.Parameter` or the class itself, called with a tensor. None of
    these is a torch function, so no mode sees them.
    """

    def as_subclass(make: Any, tensor: torch.Tensor, cls: Any) -> torch.Tensor:
        made = callback(tensor, cls, _ALIAS)
        return make(tensor, cls) if made is None else made

    def of_class(make: Any, cls: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_given = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        made = callback(args[0] if is_given else None, cls, _ALIAS)
        return make(cls, *args, **kwargs) if made is None else made

    def make_subclass(
        make: Any, cls: Any, data: torch.Tensor, require_grad: bool = False, **options: Any
    ) -> torch.Tensor:
        made = None if options else callback(data, cls, _DETACH)
        return make(cls, data, require_grad, **options) if made is None else _leaf(made, require_grad)

    def parameter(make: Any, cls: Any, data: torch.Tensor | None = None, requires_grad: bool = True) -> Any:
        made = None if data is None else callback(data, cls, _DETACH)
        return make(cls, data, requires_grad) if made is None else _leaf(made, requires_grad)

    return all_replaced_here(
        (torch.Tensor, "as_subclass", as_subclass),
        (torch.Tensor, "__new__", of_class),
        (torch.Tensor, "_make_subclass", make_subclass),
        (torch.nn.Parameter, "__new__", parameter),
    )


def _leaf(made: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    with class_functions_off():  # a mode sees it, and notes it
        return made.requires_grad_() if requires_grad else made


def attributes_from_users(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes of a tensor that PyTorch did not set."""
    return {name: value for name, value in vars(tensor).items() if name not in CACHED_SIZES}


def flatten_protocol(tensor: Any) -> tuple[list[str], Any]:
    """Attribute names and context of a wrapper tensor."""
    return tensor.__tensor_flatten__()


def overrides_torch_functions(cls: type[torch.Tensor]) -> bool:
    """Whether torch functions on tensors of a class call its `__torch_function__`, own or default."""
    return cls is not torch.Tensor and cls.__torch_function__ is not torch._C._disabled_torch_function_impl


def changes_functions(cls: type[torch.Tensor]) -> bool:
    """The same, but for a parameter's class that hands all functions on to `nn.Parameter`, as vLLM's do."""
    own = (vars(base)["__torch_function__"] for base in cls.__mro__ if "__torch_function__" in vars(base))
    first = next((one for one in own if not _hands_on(one)), None)
    return cls is not torch.Tensor and first is not torch._C._disabled_torch_function_impl


def _hands_on(torch_function: Any) -> bool:
    """Whether a `__torch_function__` names nothing but that of `super()`."""
    code = getattr(getattr(torch_function, "__func__", None), "__code__", None)
    return code is not None and set(code.co_names) == {"super", "__torch_function__"}


def dispatches(cls: Any) -> bool:
    """Whether a tensor class handles operators itself, below autograd."""
    return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
