"""`make bench-gpu` runs to its end on a CPU, keeps its time, and says what it left out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as script
from benchmarks.gpu.__main__ import Options
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.measuring import COPY, Answer, Job, hand_in, measure, read
from benchmarks.gpu.page import nothing, page
from benchmarks.gpu.rows import rows
from benchmarks.record import Record
from benchmarks.timing import Series

WITHOUT_LIGER = "Liger: ModuleNotFoundError: No module named 'liger_kernel'"


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_every_row_runs_on_a_cpu(tmp_path: Path) -> None:
    script.main(Options(dry_run=True, folder=tmp_path))
    found = Record.load(tmp_path / "results" / "gpu.json")
    measured = {(series.case, series.contender) for series in found.series if series.quantity == "time"}
    wanted = {(row.case, way) for row in rows(dry=True) for way in row.costs if way != "Liger"}
    assert measured == wanted | {(COPY, COPY)}
    assert {note.partition(": ")[2] for note in found.failed} <= {WITHOUT_LIGER}
    text = (tmp_path / "GPU.md").read_text()
    assert all(f"| {case} | {way} |" in text for case, way in wanted)


def test_rows_are_alike_with_and_without_a_gpu() -> None:
    assert [row.case for row in rows(dry=True)] == [row.case for row in rows(dry=False)]


def test_what_is_needed_fits_into_the_time_by_default() -> None:
    assert sum(row.needed for row in rows(dry=False)) < 60 * Options().minutes


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    cases = tuple(row.case for row in rows(dry=True))
    file = tmp_path / "answers"
    measure(Job(cases[:2], dry=True, budget=Budget.of(0.0), file=file))
    assert [(answer.case, answer.series) for answer in read(file)] == [(case, ()) for case in cases[:2]]
    assert all("for want of time" in note for answer in read(file) for note in answer.notes)


def test_ways_that_can_wait_make_room_for_later_rows(tmp_path: Path) -> None:
    first, second = (row for row in rows(dry=True) if row.case.startswith("softmax"))
    file = tmp_path / "answers"
    budget = Budget.of(second.needed + first.costs["torch.compile max-autotune"] - 0.1)
    measure(Job((first.case, second.case), dry=True, budget=budget, file=file))
    answer, _ = read(file)
    assert answer.notes == ("torch.compile max-autotune: left out for want of time (5 s)",)
    assert {series.contender for series in answer.series} == set(first.costs) - {"torch.compile max-autotune"}


def test_without_time_nothing_is_started() -> None:
    found = script.answers_of(["a", "b"], dry=True, budget=Budget.of(0.0))
    assert found == [Answer(case, (), ("left out for want of time",)) for case in "ab"]


def test_a_lost_process_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []

    def call(label: str, work: object, job: Job, **_: object) -> None:
        started.append(job.cases)
        with job.file.open("ab") as answers:
            hand_in(answers, Answer(job.cases[0], ()))
        if len(started) == 1:
            raise RuntimeError("a worker ended with 1:\nCUDA error: misaligned address")

    monkeypatch.setattr(script.workers, "call", call)
    found = script.answers_of(("a", "b", "c"), dry=True, budget=Budget.of(60))
    assert started == [("a", "b", "c"), ("c",)]
    assert found[1] == Answer("b", (), ("its process ended: CUDA error: misaligned address",))


def test_the_budget_keeps_what_later_rows_need() -> None:
    budget = Budget(time.monotonic() + 100)
    assert budget.holds(90) and budget.holds(50, later=40) and not budget.holds(50, later=60)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_page_says_so(tmp_path: Path) -> None:
    script.main(Options(folder=tmp_path))
    assert (tmp_path / "GPU.md").read_text() == nothing()
    assert [path.name for path in tmp_path.iterdir()] == ["GPU.md"]


def test_the_page_holds_ours_against_a_copy_and_against_inductor() -> None:
    series = (
        Series(COPY, COPY, "time", "us", (1.0,), work=4_000_000),
        Series("softmax", "eager", "time", "us", (4.0, 4.0), work=4_000_000),
        Series("softmax", "aotdist triton", "time", "us", (1.0, 1.0), work=3_800_000),
        Series("softmax", "torch.compile", "time", "us", (2.0, 2.0), work=3_800_000),
        Series("softmax", "torch.compile", "first run", "s", (2.0,)),
        Series("softmax", "aotdist triton", "first run", "s", (1.5,)),
        Series("Llama block, bf16", "aotdist triton", "time", "ms", (2.0,), work=8192),
        Series("Llama block, bf16", "aotdist triton", "peak", "MiB", (512.0,)),
    )
    text = page(Record("gpu", "cmd", "2026-01-01", {}, {"gpu": "H100"}, series, ("rms norm: Liger: none",)))
    assert "- rms norm: Liger: none" in text
    assert "A copy moves 4,000 GB/s." in text
    assert "| softmax | at least 0.9 of a copy's bandwidth | 0.95 | met |" in text
    assert "| softmax | time at most 1.0 of torch.compile's | 0.50 | met |" in text
    assert "| softmax | first run at most 0.5 of torch.compile's | 0.75 | **missed** |" in text
    assert "| Llama block, bf16 | aotdist triton | 2 | 4,096,000 | 512 | 1.00 | - |" in text
