"""Tensor classes that hear of torch functions, as people write them."""

from __future__ import annotations

from typing import Any

import torch


class Methods(torch.Tensor):
    """No `__torch_function__` of its own: results are of the class too."""

    def doubled(self) -> torch.Tensor:
        return self * 2


class Silent(torch.Tensor):
    """Has methods, and hears of nothing: results are plain."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def doubled(self) -> torch.Tensor:
        return self * 2


class Logging(torch.Tensor):
    """Counts what it is asked."""

    heard: dict[str, int] = {}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        Logging.heard[name] = Logging.heard.get(name, 0) + 1
        if func is not torch.Tensor.__repr__:
            assert repr(args)
        return super().__torch_function__(func, types, args, kwargs or {})


class Unit(torch.Tensor):
    """Lengths, times: products have the product of units, other results the unit of the first."""

    unit: str

    @staticmethod
    def of(tensor: torch.Tensor, unit: str) -> Unit:
        made = tensor.as_subclass(Unit)
        made.unit = unit
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        units = [arg.unit for arg in args if isinstance(arg, Unit)]
        if func is torch.Tensor.add and len(set(units)) > 1:
            raise ValueError(f"{units} cannot be added")
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Unit) and result is not args[0]:
            result.unit = "*".join(units) if func is torch.Tensor.mul else units[0]
        return result


class WithScale(torch.Tensor):
    """Carries a scale, a tensor, that its product is multiplied by; what comes out is plain."""

    scale: torch.Tensor

    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> WithScale:
        return torch.Tensor._make_subclass(cls, data, data.requires_grad)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.scale = scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func in (torch.Tensor.mul, torch.Tensor.matmul):
                for arg in args:
                    if isinstance(arg, WithScale):
                        result = result * arg.scale
        return result


class Traveller(torch.Tensor):
    """Takes all its attributes along."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if type(result) is Traveller:
            for arg in args:
                if isinstance(arg, Traveller) and arg is not result:
                    result.__dict__.update(arg.__dict__)
        return result


def tagged(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with attributes: a word, and a tensor."""
    tensor.tag, tensor.note = "a", torch.ones(3, 4)  # type: ignore[attr-defined]
    return tensor


class Shy(torch.Tensor):
    """Leaves all that it can to the others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Shy for kind in types):
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})


class Greedy(torch.Tensor):
    """Makes what it meets its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(Greedy) if type(result) is torch.Tensor else result


class Weight(torch.nn.Parameter):
    """A parameter that hears of what is done to it."""

    gain = 2.0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result * cls.gain if func is torch.nn.functional.linear else result
