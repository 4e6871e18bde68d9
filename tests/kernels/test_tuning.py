"""The quickest way to cut a kernel is measured once, kept, and leaves no trace in what is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import aotdist
from aotdist.codegen import triton
from aotdist.kernels import triton_seam, tuning
from aotdist.kernels.tuning import Tuned
from tests.kernels.as_on_a_gpu import Timekeeper, tune
from tests.kernels.reference import Emissions, assert_same

X = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Timekeeper:
    clock = Timekeeper()
    tune(monkeypatch, clock, folder)
    return clock


def runners_of(emissions: Emissions) -> list[object]:
    launches = (launch for fused in emissions.made for launch in triton.launches_of(fused).values())
    return [launch.runner for launch in launches if isinstance(launch, triton.Launch)]


def test_each_way_is_measured_at_the_first_call_and_the_quickest_kept(clock, folder, monkeypatch):
    emissions = Emissions(monkeypatch)
    compiled = aotdist.compile(F.gelu, backend="triton")
    compiled(X)
    (runner,), ((emitted,),) = runners_of(emissions), [fused.kernels for fused in emissions.made]
    assert isinstance(runner, Tuned)
    assert clock.num_asked == len(emitted.ways) > 1
    (file,) = folder.iterdir()
    kept = json.loads(file.read_text())
    assert kept["chosen"]["num_warps"] == emitted.ways[-1].num_warps
    assert len(kept["measured"]) == len(emitted.ways)
    assert [path.stat().st_mode & 0o077 for path in (folder, file)] == [0, 0]
    torch.testing.assert_close(compiled(X), F.gelu(X))
    assert clock.num_asked == len(emitted.ways)


def test_what_was_measured_once_is_not_measured_again(clock):
    def other_names(y: Tensor) -> Tensor:
        return F.gelu(y)

    aotdist.compile(F.gelu, backend="triton")(X)
    num_asked = clock.num_asked
    aotdist.compile(other_names, backend="triton")(X)
    assert clock.num_asked == num_asked
    aotdist.compile(F.gelu, backend="triton")(X[:32])
    assert clock.num_asked > num_asked


def test_another_gpu_is_measured_anew(clock, monkeypatch):
    aotdist.compile(F.gelu, backend="triton")(X)
    num_asked = clock.num_asked
    monkeypatch.setattr(triton_seam, "gpu_and_version", lambda: ("another GPU", "3"))
    aotdist.compile(F.gelu, backend="triton")(X)
    assert clock.num_asked == 2 * num_asked


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 1, "chosen": {"xblock": 7}}'])
def test_a_file_that_names_no_way_is_warned_about_and_written_anew(text, clock, folder):
    aotdist.compile(F.gelu, backend="triton")(X)
    (file,) = folder.iterdir()
    sound = json.loads(file.read_text())
    file.write_text(text)
    num_asked = clock.num_asked
    with pytest.warns(UserWarning, match="names no configuration of its kernel"):
        aotdist.compile(F.gelu, backend="triton")(X)
    assert clock.num_asked == 2 * num_asked
    assert json.loads(file.read_text())["chosen"] == sound["chosen"]


def test_a_folder_that_cannot_be_written_is_warned_about_and_missed(clock, folder):
    folder.parent.mkdir()
    folder.touch()
    with pytest.warns(UserWarning, match="is not kept in"):
        found = aotdist.compile(F.gelu, backend="triton")(X)
    torch.testing.assert_close(found, F.gelu(X))


def test_what_is_written_over_is_measured_on_a_copy(clock, monkeypatch):
    emissions = Emissions(monkeypatch)
    x, y = X.clone(), X.clone()

    def step(x: Tensor) -> None:
        x.mul_(1.5).add_(1)

    step(y)
    aotdist.compile(step, backend="triton", settings={"emulate_casts": True})(x)
    assert clock.num_asked > 1
    assert torch.equal(x, y)
    assert x._version == y._version
    assert any(isinstance(runner, Tuned) for runner in runners_of(emissions))


def test_without_memory_to_measure_in_the_first_way_runs(clock, folder, monkeypatch):
    def refuse(*_: object) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Timekeeper, "__call__", refuse)
    torch.testing.assert_close(aotdist.compile(F.gelu, backend="triton")(X), F.gelu(X))
    assert not folder.exists()


def test_a_way_that_finds_no_room_is_left_out(clock, monkeypatch):
    def measured(self: Timekeeper, start: Callable[[], None]) -> float:
        self.num_asked += 1
        if self.num_asked == 2:
            raise triton_seam.too_large()(1, 1, "shared memory")
        return 1.0

    monkeypatch.setattr(Timekeeper, "__call__", measured)
    assert_same(F.gelu, X)
    assert clock.num_asked > 2


def test_nothing_is_measured_while_a_cuda_graph_is_recorded(clock, monkeypatch):
    compiled = aotdist.compile(F.gelu, backend="triton")
    monkeypatch.setattr(tuning.triton_seam, "is_recording", lambda: True)
    compiled(X)
    assert clock.num_asked == 0
    monkeypatch.setattr(tuning.triton_seam, "is_recording", lambda: False)
    compiled(X)
    assert clock.num_asked > 0


@pytest.fixture
def as_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_seam, "is_interpreting", lambda: False)


def test_the_setting_turns_it_off(as_with_a_gpu):
    assert triton._tuner(aotdist.Settings(tune_kernels=False)) is None


def is_made_for_reductions(folder: Path) -> bool:
    tuner = triton._tuner(aotdist.Settings(cache_folder=str(folder)))
    assert tuner is not None
    return tuner.reductions


def test_reductions_are_not_tuned_where_results_must_be_deterministic(as_with_a_gpu, tmp_path):
    assert is_made_for_reductions(tmp_path)
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_made_for_reductions(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("world", [1, 2])
def test_reductions_are_not_tuned_where_ranks_must_agree(world, as_with_a_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    assert is_made_for_reductions(tmp_path) == (world == 1)


def test_then_they_run_the_first_way(monkeypatch, folder):
    clock, emissions = Timekeeper(), Emissions(monkeypatch)
    tune(monkeypatch, clock, folder, reductions=False)
    assert_same(lambda x: torch.softmax(x, -1), X)
    assert clock.num_asked == 0
    assert len(emissions.made[0].kernels[0].ways) > 1
    aotdist.compile(F.gelu, backend="triton")(X)
    assert clock.num_asked > 0


def test_interpreted_kernels_are_not_tuned():
    assert triton._tuner(aotdist.Settings()) is None
