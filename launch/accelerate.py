"""`AotdistPlugin`: lets accelerate compile models by aotdist.

accelerate compiles what it prepares by `torch.compile`, with the arguments of its dynamo plugin. Its own
plugin accepts backends of a fixed list only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from aotdist.codegen.backend import Compiler, is_eager, resolve
from aotdist.codegen.contract import Backend
from aotdist.dynamo.backend import backend as dynamo_backend
from aotdist.settings import Settings, settings_of


class AotdistPlugin(TorchDynamoPlugin):
    """For accelerate: `Accelerator(dynamo_plugin=AotdistPlugin("fx"))`.

    Arguments that are left out have the values of `accelerate launch` (`--dynamo_use_dynamic` and so on).

    Attributes:
        code_backend: turns graphs into callables.
        settings: how to compile.

    Args:
        backend: as for `aotdist.compile`.
        settings: likewise.
        dynamic: of `torch.compile`.
        fullgraph: of `torch.compile`: whether a graph break is an error.
        use_regional_compilation: whether blocks of one class are compiled one by one.

    Raises:
        BadSettings: the backend or a setting is unknown.
    """

    def __init__(
        self,
        backend: str | Compiler | Backend = "auto",
        settings: Settings | Mapping[str, Any] | None = None,
        *,
        dynamic: bool | None = None,
        fullgraph: bool | None = None,
        use_regional_compilation: bool | None = None,
    ) -> None:
        if not is_eager(backend):
            resolve(backend).check()
        self.code_backend = backend
        self.settings = settings_of(settings)
        given: dict[str, Any] = {
            "dynamic": dynamic,
            "fullgraph": fullgraph,
            "use_regional_compilation": use_regional_compilation,
        }
        # accelerate only checks that the backend is not `NO`; `to_kwargs` has the real one.
        super().__init__(backend=DynamoBackend.EAGER, **given)

    def to_dict(self) -> dict[str, Any]:
        """What accelerate shows of the plugin."""
        return {**super().to_dict(), "backend": "aotdist", "settings": asdict(self.settings)}

    def to_kwargs(self) -> dict[str, Any]:
        """What accelerate calls `torch.compile` with."""
        return {
            "backend": dynamo_backend,
            "fullgraph": self.fullgraph,
            "dynamic": self.dynamic,
            "options": {"backend": self.code_backend, **asdict(self.settings)},
        }
