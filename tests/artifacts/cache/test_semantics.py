"""Tests of semantics once more, with each joint graph read from the cache: as eager has it, bit for bit.

Inductor rounds otherwise than eager; so what it would be given is run operator by operator here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from aotdist import compiling
from aotdist.artifacts.cache.backend import CachingBackend
from aotdist.capture.captured import UserCall
from aotdist.codegen.contract import Backend, Decompositions, Emission, Emitted
from aotdist.codegen.fx import FxBackend
from aotdist.codegen.inductor import InductorBackend
from aotdist.pipeline import compile_call
from aotdist.program import Graph
from aotdist.runtime.artifact import Artifact
from aotdist.settings import Settings
from tests.artifacts.cache.programs import folder_of
from tests.semantics.meshes import mesh as mesh
from tests.semantics.test_modules import *  # noqa: F403
from tests.semantics.test_outputs import *  # noqa: F403

pytestmark = pytest.mark.sweep


@dataclass(frozen=True, slots=True)
class ByOperator(InductorBackend):
    """In Inductor's place."""

    partition: Literal["default", "min_cut"] = "default"
    any_tangents: bool = True

    def check(self) -> None:
        pass

    def decompositions(self) -> Decompositions:
        return {}

    def prepare_joint(self, graph: Graph) -> Graph:
        return graph

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        return FxBackend().emit(graph, emission)


@pytest.fixture(autouse=True)
def through_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)

    def twice(call: UserCall, backend: Backend, settings: Settings, **more: Any) -> Artifact:
        caching = CachingBackend(ByOperator(), settings, folder)
        cold, warm = (compile_call(call, caching, settings, **more) for _ in range(2))
        assert warm.source == cold.source
        return warm

    monkeypatch.setattr(compiling, "compile_call", twice)
