"""What holds for every test: search profiles, markers that skip or group, a clean environment."""

import gc
import os
import zlib
from collections.abc import Generator, Iterator, Mapping

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton, which asks once: kernels run on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"

REPEATABLE = hypothesis.settings(deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("dev", max_examples=5, deadline=None)
hypothesis.settings.register_profile("ci", REPEATABLE, max_examples=3)
hypothesis.settings.register_profile("sweep", max_examples=1250, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


ONE_OF: Mapping[str, int] = {
    "artifacts/test_semantics.py": 16,
    "capture/test_effects.py": 1,
    "docs/test_pages.py": 1,
    "kernels/test_operators.py": 12,
    "models/test_zoo.py": 1,
    "op_db/test_op_db.py": 42,
    "op_db/test_rounding.py": 250,
    "semantics/test_aliased_inputs.py": 16,
    "semantics/test_generated_inductor.py": 8,
    "semantics/test_kinds_of_writes.py": 12,
    "semantics/test_storage_writes.py": 12,
    "step/test_placed.py": 129,
    "trace/test_generated_blocks.py": 22,
}
"""Of a table of cases, `make test` runs the first and one of so many others, always the same: of those that
are not named here, one of `OTHERWISE`. `make test-all` runs all."""

OTHERWISE = 10

TESTS = pytest.StashKey[set[str]]()
"""The tests that have been collected so far."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks a test as its markers ask; here, because xdist reads the groups before any later hook of ours."""
    name, _, parameters = item.nodeid.partition("[")
    tests = item.session.stash.setdefault(TESTS, set())
    one_of = ONE_OF.get("/".join(item.path.parts[-2:]), OTHERWISE)
    is_of_device = item.get_closest_marker("device") is not None  # minutes of a GPU are there for all of them
    if parameters and name in tests and not is_of_device and zlib.crc32(item.name.encode()) % one_of:
        item.add_marker(pytest.mark.sweep)
    tests.add(name)
    if item.get_closest_marker("ranks"):
        # Each starts 2 to 4 processes: two of them at once on two cores run into their own timeouts.
        item.add_marker(pytest.mark.xdist_group("ranks"))
    if is_of_device and not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: a look at its 800,000 objects takes the collector 0.4 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Triton's binding reports as leaks what the collector may not take apart at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one test compiles may be there for the next, but nothing of the developer's own runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No `AOTDIST_*` of the developer's shell, and the same random numbers in every order of tests."""
    for name in os.environ:
        if name.startswith("AOTDIST_"):
            monkeypatch.delenv(name)
    torch.manual_seed(0)
