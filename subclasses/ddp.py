"""DistributedDataParallel: reduces gradients in hooks of its own, outside of what it wraps.

Its forward prepares a C++ reducer at every call, which no graph can do. So it is never captured:
`aotdist.compile` on a DDP module compiles the module inside it, and one that a compiled function
reaches is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import Annotate


class _DataParallelRule:
    """See `aotdist.subclasses.protocol.ModuleRule`."""

    name = "ddp"

    def claims(self, root: nn.Module) -> bool:
        return any(isinstance(module, DistributedDataParallel) for module in root.modules())

    def check(self, root: nn.Module) -> None:
        for path, module in root.named_modules():
            if isinstance(module, DistributedDataParallel):
                raise UnsupportedProgram(
                    f"`{path or '(root)'}` is a DistributedDataParallel module inside of what is compiled",
                    stage="capture",
                    fix="compile the DDP module itself, `aotdist.compile(ddp_model)`, and call it from "
                    "uncompiled code",
                )

    def flags(self, root: nn.Module) -> Hashable:
        return None

    def prepare(self, root: nn.Module) -> None:
        return None

    def capturing(self, root: nn.Module, annotate: Annotate) -> AbstractContextManager[None]:
        return nullcontext()

    def lifted(self, root: nn.Module) -> Iterable[tuple[str, object, str]]:
        return ()

    def after_backward(self, root: nn.Module) -> None:
        return None


MODULE_RULE = _DataParallelRule()
