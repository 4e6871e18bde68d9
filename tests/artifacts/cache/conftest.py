"""A folder with what one program compiled to, and a process that may not compile again."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from aotdist.codegen.inductor import InductorBackend
from tests.artifacts.cache.programs import refuse_to_compile, stepped
from tests.ranks.harness import world2 as world2


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Any, ...]]:
    folder = tmp_path_factory.mktemp("compiled-once")
    return folder, stepped(folder)


@pytest.fixture
def warm(compiled_once: tuple[Path, tuple[Any, ...]], tmp_path: Path) -> tuple[Path, tuple[Any, ...]]:
    """A copy of that folder, and what the program showed when it was compiled."""
    folder, shown = compiled_once
    shutil.copytree(folder, tmp_path / "cache")
    return tmp_path / "cache", shown


@pytest.fixture
def compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check", "decompositions", "emit", "prepare_joint"):
        monkeypatch.setattr(InductorBackend, name, refuse_to_compile)
