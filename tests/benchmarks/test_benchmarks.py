"""The arithmetic and the bookkeeping of the benches; what they measure is no test's business."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor

from benchmarks import bench_memory
from benchmarks.bench_call import Callable100, check_agreement
from benchmarks.models import LlamaShape
from benchmarks.record import Record
from benchmarks.tables import section
from benchmarks.timing import Contender, Pace, Series, as_series, take_turns
from benchmarks.verdicts import Target, judge, ratio, spread_of
from tests.semantics.meshes import mesh, sharded

__all__ = ["mesh"]
TARGET = Target("case*", "step", "ours", ("slow", "fast"), limit=0.9, prediction=0.8)


def series(contender: str, *samples: float, case: str = "case a") -> Series:
    return Series(case, contender, "step", "ms", samples)


def test_contenders_take_turns() -> None:
    log: list[str] = []
    contenders = [Contender(name, lambda name=name: log.append(name)) for name in "AB"]
    samples = take_turns(contenders, Pace(rounds=3, calls=2, warmup=1))
    assert "".join(log) == "AB" + "AABB" * 3
    assert {name: len(each) for name, each in samples.items()} == {"A": 3, "B": 3}


def test_preparation_comes_before_each_run() -> None:
    log: list[str] = []
    take_turns([Contender("A", lambda: log.append("run"), lambda: log.append("prepare"))], Pace(2, warmup=0))
    assert log == ["prepare", "run"] * 2


def test_a_stopwatch_of_its_own_may_time_the_runs() -> None:
    timed: list[str] = []

    def seconds_of(contender: Contender) -> float:
        timed.append(contender.name)
        return float(len(timed))

    contenders = [Contender(name, lambda: None) for name in "AB"]
    assert take_turns(contenders, Pace(2, calls=2), seconds_of=seconds_of) == {
        "A": [1.5, 5.5],
        "B": [3.5, 7.5],
    }
    assert "".join(timed) == "AABB" * 2


def test_a_ratio_is_taken_round_by_round() -> None:
    found = ratio(series("ours", 1.0, 10.0, 3.0), series("peer", 2.0, 20.0, 6.0))
    assert (found.low, found.median, found.high) == (0.5, 0.5, 0.5)


def test_the_spread_of_one_sample_is_that_sample() -> None:
    assert spread_of([4.0]) == spread_of([4.0, 4.0])


@pytest.mark.parametrize(("mine", "verdict"), [(0.9, "met"), (0.91, "missed")])
def test_the_best_peer_counts(mine: float, verdict: str) -> None:
    (found,) = judge([TARGET], [series("ours", mine), series("slow", 5.0), series("fast", 1.0)])
    assert (found.peer, found.verdict) == ("fast", verdict)


def test_a_target_covers_every_case_that_starts_so() -> None:
    found = [
        series(name, 1.0, case=case) for case in ("case a", "case b", "other") for name in ("ours", "fast")
    ]
    assert [judgement.case for judgement in judge([TARGET], found)] == ["case a", "case b"]


def test_seconds_become_the_unit() -> None:
    assert as_series({"A": [0.5]}, case="c", quantity="q", unit="us")[0].samples == (5e5,)


def test_memory_is_that_of_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's may be more than most steps', by when a collective lets go of its buffers."""
    peaks = iter([5.0, 1.0, 2.0, *[1.0] * bench_memory.NUM_MEASURED])
    monkeypatch.setattr(bench_memory, "most_allocated_by", lambda step: next(peaks))
    monkeypatch.setattr(bench_memory, "_forget_high_water", lambda: None)
    shape = LlamaShape(dim=8, num_layers=1, num_heads=2, vocab=8, sequence=4, batch=1)
    job = bench_memory.Job("single", shape, "eager", num_steps=1)
    found = bench_memory.peak_of(job).step_tensors
    assert len(found) == bench_memory.NUM_MEASURED
    assert spread_of(found).median == 1.0


def test_a_record_survives_its_file_and_shows_failures(tmp_path: Path) -> None:
    samples = (series("slow", 2.0, 4.0), series("ours", 1.0, 2.0))
    written = Record("step", "cmd", "2026-01-01", {"torch": "2"}, {"cores": "2"}, samples, ("case z",))
    written.save(tmp_path)
    read = Record.load(tmp_path / "step.json")
    assert read == written
    text = section(read, "Purpose.", [TARGET])
    assert "0.50 (0.50-0.50) | met" in text and "**Failed: case z.**" in text


def test_contenders_for_wrapper_cost_have_to_agree(mesh: DeviceMesh) -> None:
    inputs = [sharded(mesh, torch.ones(2)), TwoTensor(torch.ones(2), torch.zeros(2)), torch.ones(2)]
    for given in inputs:
        leaf = given.requires_grad_()
        eager, twice = (
            Callable100(lambda x=leaf: x.sum(), [leaf]),
            Callable100(lambda x=leaf: x.sum() * 2, [leaf]),
        )
        check_agreement({"eager": eager, "the same": eager})
        with pytest.raises(RuntimeError, match="the double found"):
            check_agreement({"eager": eager, "the double": twice})
