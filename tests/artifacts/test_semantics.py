"""The tests of semantics once more, with each compiled call read from what would be in a file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aotdist import compiling
from aotdist.artifacts.record import read, written
from aotdist.capture.captured import UserCall
from aotdist.codegen.contract import Backend
from aotdist.pipeline import compilation_of, loaded_together, printed
from aotdist.runtime.artifact import Artifact
from aotdist.settings import Settings
from aotdist.torch_seam.modes import class_functions_off
from tests.semantics.meshes import mesh as mesh
from tests.semantics.test_metadata_writes import *  # noqa: F403
from tests.semantics.test_modules import *  # noqa: F403
from tests.semantics.test_outputs import *  # noqa: F403
from tests.semantics.test_writes import *  # noqa: F403

# Their second programs have symbols, which no file holds.
del test_a_cache_written_at_a_moving_place, test_functions_that_a_librarys_module_calls_may_be_replaced  # noqa: F821


@pytest.fixture(autouse=True)
def through_a_file(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.name.endswith("[a constant attribute]"):
        pytest.skip("its second program has a symbol, which no file holds")
    monkeypatch.setattr(compiling, "compile_call", _compile_call)


def _compile_call(call: UserCall, backend: Backend, settings: Settings, **_: Any) -> Artifact:
    compilation = compilation_of(call, backend, settings)
    record = json.loads(json.dumps(written(call.target, compilation, "cpu", {}), allow_nan=False))
    with class_functions_off():
        return loaded_together("it", settings, lambda: printed(read(record, call, settings, "cpu", {})))
