"""`make bench-gpu` runs to its end on a CPU, keeps its time, and says what it left out."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import workers
from benchmarks.gpu import __main__ as script
from benchmarks.gpu import measuring, per_kernel
from benchmarks.gpu.__main__ import Options, options_of
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.measuring import COPY, WARM_UP, Answer, Job, hand_in, measure, read
from benchmarks.gpu.page import nothing, page
from benchmarks.gpu.place import Cpu
from benchmarks.gpu.rows import Row, rows
from benchmarks.gpu.workload import Workload
from benchmarks.record import Record
from benchmarks.timing import Pace, Series

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
    assert set(found.errors) == {note.removesuffix(WITHOUT_LIGER) + "Liger" for note in found.failed}
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
    started: list[tuple[tuple[str, ...], bool]] = []

    def call(label: str, work: object, job: Job, **_: object) -> None:
        started.append((job.cases, job.again))
        with job.file.open("ab") as answers:
            hand_in(answers, Answer(job.cases[0], ()))
        if len(started) == 1:
            raise RuntimeError("a worker ended with 1:\nTraceback\nCUDA error: misaligned address")

    monkeypatch.setattr(script.workers, "call", call)
    found = script.answers_of((WARM_UP, "b", "c"), dry=True, budget=Budget.of(60))
    assert started == [((WARM_UP, "b", "c"), False), (("c",), True)]
    assert (found[1].case, found[1].notes) == ("b", ("its process ended: CUDA error: misaligned address",))
    assert found[1].errors == {
        "its process": "a worker ended with 1:\nTraceback\nCUDA error: misaligned address"
    }


def row_of(outcomes: dict[str, Tensor | Exception]) -> Row:
    """A row with these outcomes of contenders, of which one may be an error."""

    def build(way: str, place: object) -> Workload:
        def outcome() -> list[Tensor]:
            if isinstance(found := outcomes[way], Exception):
                raise found
            return [torch.ones(2), found]

        return Workload(lambda: None, outcome)

    costs: dict[Any, float] = dict.fromkeys(outcomes, 1.0)
    return Row("row", 1, cold=False, memory=False, costs=costs, build=build, pace=Pace(rounds=1))


def test_what_is_not_a_number_fails_wherever_it_stands() -> None:
    nan = torch.tensor([1.0, float("nan")])
    row = row_of({"eager": torch.ones(2), "Liger": nan, "fused": torch.ones(2)})
    answer = measuring._measure(row, Cpu(), Budget.of(60), later=0.0)
    assert answer.notes == ("Liger: computes something else, nan from eager",)
    assert {series.contender for series in answer.series} == {"eager", "fused"}
    answer = measuring._measure(row_of({"eager": nan, "Liger": nan}), Cpu(), Budget.of(60), later=0.0)
    assert len(answer.notes) == 2 and not answer.series


def test_an_error_is_kept_whole_and_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = row_of({"eager": torch.ones(2), "Liger": ValueError("first\nlast"), "fused": torch.ones(2)})

    def little(x: Tensor) -> Tensor:
        raise ValueError("of the warm-up\nlast")

    monkeypatch.setattr(measuring, "_little", little)
    monkeypatch.setattr(measuring, "rows", lambda dry: [row, replace(row, case="other")])
    job = Job((WARM_UP, "row", "other"), dry=True, budget=Budget.of(60), file=tmp_path / "answers")
    measure(job)
    warm_up, *others = read(job.file)
    assert all("of the warm-up\nlast" in text and "in little" in text for text in warm_up.errors.values())
    assert set(warm_up.errors) == {"torch.compile", "aotdist triton"}
    for answer in others:
        assert answer.notes == ("Liger: ValueError: first",)
        assert "in outcome" in answer.errors["Liger"] and "first\nlast" in answer.errors["Liger"]
        assert {series.contender for series in answer.series} == {"eager", "fused"}
    monkeypatch.setattr(script, "answers_of", lambda *_, **__: [warm_up, *others])
    script.main(Options(dry_run=True, folder=tmp_path))
    assert Record.load(tmp_path / "results" / "gpu.json").errors["row: Liger"] == others[0].errors["Liger"]
    assert others[0].errors["Liger"] in (tmp_path / "results" / "gpu.log").read_text()


ALONE = """
import sys, time
sys.modules |= dict.fromkeys(("tyro", "rich", "transformers", "torchao", "liger_kernel"))
import benchmarks.gpu.__main__
from benchmarks.gpu import measuring
measuring._PATIENCE = 0.1
with measuring._deadline(None):
    time.sleep(60)
"""


def test_a_row_that_hangs_is_ended_and_says_where_and_nothing_but_torch_and_triton_is_needed() -> None:
    ended = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert ended.returncode == 1 and 'File "<string>", line 8' in ended.stderr
    assert measuring.what_ended(ended.stderr).startswith("Timeout (")


def test_what_a_process_wrote_is_there_when_its_time_is_over(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    with pytest.raises(subprocess.TimeoutExpired) as error:
        workers._finish(command, os.environ, 1.0, tmp_path / "log")
    assert error.value.output == "here\n"


def test_the_command_line_names_rows_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--minutes", "3", "--dry-run", "--cases", "softmax", COPY, "--folder", "there"]
    assert options_of(arguments) == Options(3.0, True, ("softmax", COPY), Path("there"))
    assert options_of([]) == Options()
    with pytest.raises(SystemExit):
        options_of(["--cases", "sofmax"])
    assert "sofmax" in capsys.readouterr().err


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


def test_a_kernel_that_left_its_results_poisoned_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right, poisoned = torch.ones(4), torch.full((4,), float("nan"))
    graph = torch.fx.Graph()
    emitted = SimpleNamespace(nodes=(graph.placeholder("out"),))
    kernel = per_kernel._OneKernel(*([None] * 2), emitted, {"out": right}, None)  # type: ignore[arg-type]
    monkeypatch.setattr(per_kernel._OneKernel, "_exactly", lambda *_: right)
    assert math.isnan(kernel._beside_float64("out", poisoned)) and kernel._beside_float64("out", right) == 0
