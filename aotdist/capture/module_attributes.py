"""Attributes of modules: what `compile` hangs on one for its user, and the settings of libraries.

What `compile` hangs on a module (`module.source`, `module.graphs`, `module.explain()`) survives `deepcopy`
and pickling as an empty shell, since a copy of a module is not compiled. Code of libraries is not entered by
the walk, so all attributes of their modules count.
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
"""Attributes in which modules have their hooks."""


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
    for name in HOOKS:
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


def names_of_state(cls: type) -> frozenset[str]:
    """The attributes in which an installed library's objects keep what decides what a step does."""
    return _STATE.get(cls.__module__.partition(".")[0], frozenset())


_STATE: Mapping[str, frozenset[str]] = {
    # accelerate counts calls, and asks its loaders whether a batch is the last, to choose who updates.
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
