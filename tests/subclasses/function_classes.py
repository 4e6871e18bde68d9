"""Tensor classes without `__tensor_flatten__`, as people and libraries write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Silent(torch.Tensor):
    """Has methods, and hears of nothing: results are plain."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def doubled(self) -> torch.Tensor:
        return self * 2


class Loaded(nn.Parameter):
    """A parameter that knows how it is to be loaded: attributes, properties and methods."""

    def __new__(cls, data: torch.Tensor, **more: Any) -> Loaded:
        return super().__new__(cls, data, data.is_floating_point())

    def __init__(self, data: torch.Tensor, *, loader: Any = None, input_dim: int = 1) -> None:
        self._loader, self._input_dim = loader, input_dim

    @property
    def input_dim(self) -> int:
        return self._input_dim

    def rows(self, number: int) -> torch.Tensor:
        return self[:number]


class HandsOn(Loaded):
    """The same, and hands every torch function on, as vLLM's parameters do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        return super().__torch_function__(func, types, args, kwargs)


class Methods(torch.Tensor):
    """No `__torch_function__` of its own: results are of the class too."""


class Image(torch.Tensor):
    """What comes of an image is plain, but for copies, as torchvision's `tv_tensors` have it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func is torch.Tensor.clone else result


class Weight(nn.Parameter):
    """A parameter that changes what is done to it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.nn.functional.linear else result
