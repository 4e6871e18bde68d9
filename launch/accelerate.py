"""`AotdistPlugin`: how accelerate compiles models by aotdist.

accelerate compiles what it prepares by calling `torch.compile` with what its dynamo plugin says. Its own
plugin takes the names of a fixed list only; this one answers for itself.
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
    """To be handed to accelerate: `Accelerator(dynamo_plugin=AotdistPlugin("fx"))`.

    What is left out is read from where `accelerate launch` puts what it was told of Dynamo
    (`--dynamo_use_dynamic` and its like).

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
        # accelerate only asks whether the backend is `NO`; `to_kwargs` says what is called.
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
