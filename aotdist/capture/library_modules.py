"""Attributes of modules whose code is a library's: the walk does not enter that code, so they all count."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from aotdist.capture.attached import ATTACHED
from aotdist.capture.code import is_users_class, is_users_code
from aotdist.capture.constants import is_constant
from aotdist.capture.source import Source
from aotdist.torch_seam.fsdp import is_fsdp_hook
from aotdist.torch_seam.modules import PARAMETRIZATIONS

OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
"""Attributes that modules have by being modules."""
_NO_SETTINGS = (nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType, types.ModuleType)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def is_watched(name: str, value: Any) -> bool:
    """Whether an attribute of a module is watched by the guard of its tree, or need not be watched."""
    return name in OF_EVERY_MODULE or isinstance(value, ATTACHED) or is_constant(value)


def hooks_of(path: str, module: nn.Module) -> Iterator[tuple[Source, Any]]:
    """The hooks of a module, named by their positions: keys differ from process to process.

    Those of FSDP2 are not entered: what they do is traced by rules, and their state changes at each call, so
    that a program which reads any attribute (`getattr(self, name)`) would fit no call.
    """
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        hooks: dict[int, Any] = getattr(module, name)
        shown = f"{path}.{name}" if path else name
        for position, (key, hook) in enumerate(hooks.items()):
            if is_fsdp_hook(hook):
                continue
            yield Source(shown, hooks).item(key, f"{shown}[{position}]"), hook


def computed_once() -> Iterator[tuple[Source, Any]]:
    """What parametrized modules cache inside of `parametrize.cached()`."""
    parametrize = Source("parametrize", PARAMETRIZATIONS)
    enabled = bool(PARAMETRIZATIONS["_cache_enabled"])
    yield parametrize.item("_cache_enabled").applied(bool, "whether `parametrize.cached()` is on"), enabled
    if enabled:
        yield parametrize.item("_cache", "what `parametrize.cached()` keeps"), PARAMETRIZATIONS["_cache"]


def library_settings(path: str, module: nn.Module) -> Iterator[tuple[Source, Any]]:
    """The constants in objects that an installed library's module has as attributes (transformers' `config`).

    Which of them its `forward` reads is not looked up, so all count.
    """
    cls = type(module)
    if is_users_class(cls) or cls.__module__.partition(".")[0] == "torch":
        return
    for name, value in vars(module).items():
        if name not in OF_EVERY_MODULE and hasattr(value, "__dict__") and not isinstance(value, _NO_SETTINGS):
            place = Source(path, module).attribute(name)
            yield from (
                (place.attribute(key), item) for key, item in vars(value).items() if is_constant(item)
            )


def library_functions(path: str, module: nn.Module) -> Iterator[tuple[Source, Any]]:
    """The functions among the attributes of a module whose `forward` is a library's (`activation`)."""
    code = getattr(type(module).forward, "__code__", None)
    if code is not None and is_users_code(code):
        return
    for name, value in vars(module).items():
        if name not in OF_EVERY_MODULE and isinstance(value, _FUNCTIONS):
            yield Source(path, module).attribute(name), value
