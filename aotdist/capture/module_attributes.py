"""Attributes of modules: those that `compile` adds for the user, and the settings of libraries.

The attributes that `compile` adds (`module.source`, `module.graphs`, `module.explain()`) become empty in a
deep copy and in a pickle, as a copy of a module is not compiled. The walk does not enter the code of
libraries, so calls are specialised on all settings of their modules.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from aotdist.capture.code import is_users_class, is_users_code
from aotdist.capture.constants import is_constant
from aotdist.capture.source import Source
from aotdist.torch_seam.fsdp import is_fsdp_hook
from aotdist.torch_seam.modules import PARAMETRIZATIONS


class PrintedSource(str):
    """The printed Python of a module's artifacts; not a constant of the program."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return (PrintedSource, ("",))


class GraphList(list[Mapping[str, torch.fx.GraphModule]]):
    """The graphs of a module's artifacts."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (GraphList, ())


class Explain:
    """Calls the report of a module's compiled call."""

    def __init__(self, report: Callable[..., Any] | None = None) -> None:
        self._report = report

    def __call__(self, **options: Any) -> Any:
        """The module's report, see `aotdist.explain`."""
        if self._report is None:
            return "not compiled: this module is a copy of one that was"
        return self._report(**options)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Explain, ())


ATTACHED = (PrintedSource, GraphList, Explain)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of modules that hold their hooks."""


OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
"""Attributes that every module has."""
_NO_SETTINGS = (nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType, types.ModuleType)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def is_watched(name: str, value: Any) -> bool:
    """Whether `ModuleGuard` watches an attribute of a module, or it need not be watched."""
    return name in OF_EVERY_MODULE or isinstance(value, ATTACHED) or is_constant(value)


def hooks_of(path: str, module: nn.Module) -> Iterator[tuple[Source, Any]]:
    """The hooks of a module, named by their positions: keys differ from process to process.

    Those of FSDP2 are left out: rules trace what they do, and their state changes at each call, so a program
    that may read any attribute (`getattr(self, name)`) would fit no later call.
    """
    for name in HOOKS:
        hooks: dict[int, Any] = getattr(module, name)
        shown = f"{path}.{name}" if path else name
        for position, (key, hook) in enumerate(hooks.items()):
            if is_fsdp_hook(hook):
                continue
            yield Source(shown, hooks).item(key, f"{shown}[{position}]"), hook


def computed_once() -> Iterator[tuple[Source, Any]]:
    """The cache of parametrized modules in `parametrize.cached()`."""
    parametrize = Source("parametrize", PARAMETRIZATIONS)
    enabled = bool(PARAMETRIZATIONS["_cache_enabled"])
    yield parametrize.item("_cache_enabled").applied(bool, "whether `parametrize.cached()` is on"), enabled
    if enabled:
        yield parametrize.item("_cache", "what `parametrize.cached()` keeps"), PARAMETRIZATIONS["_cache"]


def library_settings(path: str, module: nn.Module) -> Iterator[tuple[Source, Any]]:
    """Constants in objects that are attributes of a library's module (transformers' `config`).

    It is not known which of them its `forward` reads, so all count. They are read past the class's own
    `__getattribute__`: transformers' raises for what is another number in each layer.
    """
    cls = type(module)
    if is_users_class(cls) or cls.__module__.partition(".")[0] == "torch":
        return
    for name, value in vars(module).items():
        if name not in OF_EVERY_MODULE and hasattr(value, "__dict__") and not isinstance(value, _NO_SETTINGS):
            place = Source(path, module).attribute(name)
            held = place.attribute("__dict__", place.path)
            yield from (
                (held.item(key, f"{place.path}.{key}"), item)
                for key, item in vars(value).items()
                if is_constant(item)
            )


def names_of_state(cls: type) -> frozenset[str]:
    """Attributes of a library's objects that a training step depends on."""
    return _STATE.get(cls.__module__.partition(".")[0], frozenset())


_STATE: Mapping[str, frozenset[str]] = {
    # accelerate updates every few calls, and when a loader says that a batch is the last.
    "accelerate": frozenset(
        ("step", "gradient_state", "sync_gradients", "plugin_kwargs")
        + ("_dataloader_references_ref", "end_of_dataloader")
    ),
}


def library_functions(path: str, module: nn.Module) -> Iterator[tuple[Source, Any]]:
    """The functions among the attributes of a module whose `forward` is a library's (`activation`)."""
    code = getattr(type(module).forward, "__code__", None)
    if code is not None and is_users_code(code):
        return
    for name, value in vars(module).items():
        if name not in OF_EVERY_MODULE and isinstance(value, _FUNCTIONS):
            yield Source(path, module).attribute(name), value
