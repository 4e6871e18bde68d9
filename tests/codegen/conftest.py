"""Inductor's files go to a folder of the test session; ranks for what only they can show."""

import pytest

from tests.ranks.harness import world2 as world2


@pytest.fixture(scope="session")
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture
def inductor_cache(compiler_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that one test compiled are there for the next, and for no other run."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", compiler_cache)
