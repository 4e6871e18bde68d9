"""Tests of semantics once more, with each joint graph read from the cache: as eager has it, bit for bit.

Inductor rounds otherwise than eager; so what it would be given is run operator by operator here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aotdist import compiling
from aotdist.artifacts.cache.backend import CachingBackend
from aotdist.capture.captured import UserCall
from aotdist.codegen.contract import Backend
from aotdist.codegen.fx import FxBackend
from aotdist.codegen.inductor import InductorBackend
from aotdist.pipeline import compile_call
from aotdist.runtime.artifact import Artifact
from aotdist.settings import Settings
from tests.artifacts.cache.programs import folder_of
from tests.semantics.meshes import mesh as mesh
from tests.semantics.test_modules import *  # noqa: F403
from tests.semantics.test_outputs import *  # noqa: F403

pytestmark = pytest.mark.sweep


@pytest.fixture(autouse=True)
def through_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    by_operator: dict[str, Callable[..., Any]] = {
        "check": lambda self: None,
        "decompositions": lambda self: {},
        "prepare_joint": lambda self, graph: graph,
        "emit": lambda self, graph, emission: FxBackend().emit(graph, emission),
    }
    for name, method in by_operator.items():
        monkeypatch.setattr(InductorBackend, name, method)
    monkeypatch.setattr(InductorBackend, "any_tangents", True)  # as `fx` does

    def twice(call: UserCall, backend: Backend, settings: Settings, **more: Any) -> Artifact:
        caching = CachingBackend(name="fx", partition="default", settings=settings, folder=folder)
        cold, warm = (compile_call(call, caching, settings, **more) for _ in range(2))
        assert warm.source == cold.source
        return warm

    monkeypatch.setattr(compiling, "compile_call", twice)
