"""Lightning's Fabric: its wrapper around a model.

The wrapper's forward casts arguments, enters autocast, and registers a hook on each result that raises
outside of `fabric.backward`; in a trace it would always raise. So the module that the wrapper calls is
compiled, and Fabric's forward runs around it, as around a module that was compiled before `fabric.setup`.
Fabric is not imported here: who has a wrapped model has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from aotdist.subclasses.protocol import ContainerRule

_PLACES = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")
"""Modules of the wrapper's class; the package has two names."""


class _FabricRule(ContainerRule):
    def contained(self, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, _wrapper_classes()):
            return None
        forwarded: Any = module._forward_module
        return forwarded


CONTAINER_RULE = _FabricRule()


def _wrapper_classes() -> tuple[type[nn.Module], ...]:
    imported = (sys.modules.get(place) for place in _PLACES)
    return tuple(wrappers._FabricModule for wrappers in imported if wrappers is not None)
