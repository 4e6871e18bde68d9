"""Lightning's Fabric: its wrapper around a model.

The wrapper's forward casts arguments, enters autocast, and hangs a hook on each result, which raises
unless it is called inside of `fabric.backward`: in a trace it would be, always. So what is compiled is
the module that the wrapper calls, and Fabric's forward goes on to run around it, as around a module that
was compiled before it was set up. Fabric is not imported: whoever has a model that it wrapped has done
so.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from aotdist.subclasses.protocol import ContainerRule

_PLACES = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")
"""Where the wrapper's class is, by the name of the package that it was installed with."""


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
