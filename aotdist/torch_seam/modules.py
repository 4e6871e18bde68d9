"""Modules: what calling one runs."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch.nn.utils import parametrize

PARAMETRIZATIONS: Mapping[str, Any] = vars(parametrize)
"""Where parametrized modules look for, and leave, what they compute once: `_cache`, if `_cache_enabled`."""


def uncompiled_call(module: torch.nn.Module) -> Callable[..., Any]:
    """What calling a module runs when nothing has compiled it: its forward and its hooks."""
    return module._call_impl


def compiled_call_of(module: torch.nn.Module) -> Any:
    """What calling a module runs instead, or None."""
    return module._compiled_call_impl


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Run `call` instead when the module is called; its type and `state_dict` stay as they are.

    A class may hand attributes that it is assigned on to a module that it wraps (Lightning's Fabric).
    """
    vars(module)["_compiled_call_impl"] = call


def take_compiled_call_off(module: torch.nn.Module) -> None:
    """Let calling a module run its own forward again."""
    vars(module).pop("_compiled_call_impl", None)


def global_module_hooks() -> list[Mapping[int, Callable[..., Any]]]:
    """The hooks that are called for all modules."""
    module = torch.nn.modules.module
    return [
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    ]


@contextmanager
def recurrent_layers_referring_to(
    modules: Iterable[torch.nn.Module], instead: Mapping[int, torch.Tensor]
) -> Generator[None]:
    """Recurrent layers find the weights that they knew, where others hang in their places.

    They look by weak references whether their weights are others than at the last call, and if so, they make
    the list anew in which they keep them.

    Args:
        modules: recurrent layers and others.
        instead: what hangs in the place of a weight, by its `id`.
    """
    known = {one: one._flat_weight_refs for one in modules if isinstance(one, torch.nn.RNNBase)}
    for layer, references in known.items():
        weights = [None if reference is None else reference() for reference in references]
        layer._flat_weight_refs = [
            None if weight is None else ref(instead.get(id(weight), weight)) for weight in weights
        ]
    try:
        yield
    finally:
        for layer, references in known.items():
            layer._flat_weight_refs = references
