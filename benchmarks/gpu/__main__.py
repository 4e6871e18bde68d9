"""Measure on a GPU: `make bench-gpu`.

Writes `benchmarks/GPU.md` and `benchmarks/results/gpu.json`. It keeps its own time: contenders and rows that
do not fit into it are left out, from the last, and named. Without a GPU the page says that there was none.
"""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import tyro

from benchmarks import workers
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.measuring import COPY, Answer, Job, measure, read
from benchmarks.gpu.page import nothing, page
from benchmarks.gpu.place import Cpu, Gpu, described
from benchmarks.gpu.rows import rows
from benchmarks.record import ROOT, Record, machine, versions

_SPARE = 10.0  # seconds for what a process does before and after its rows
_LEAST = 15.0  # seconds in which a new process comes to no row


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Args:
        minutes: that it may take.
        dry_run: run everything with tiny tensors on the CPU, and measure nothing worth reading.
        cases: some of the rows; all of them when none is named.
        folder: where the page goes, and `results/gpu.json`; a dry run leaves `benchmarks/` alone.
    """

    minutes: float = 8.5
    dry_run: bool = False
    cases: tuple[str, ...] = ()
    folder: Path | None = None


def main(options: Options) -> None:
    """Measure, write and show."""
    folder = options.folder or (ROOT / "results" / "quick" if options.dry_run else ROOT)
    if not options.dry_run and not torch.cuda.is_available():
        _say_that_there_is_none(folder)
        return
    known = (COPY, *(row.case for row in rows(dry=options.dry_run)))
    cases = tuple(case for case in known if not options.cases or case in options.cases)
    answers = answers_of(cases, dry=options.dry_run, budget=Budget.of(60 * options.minutes))
    recorded = _record(answers, dry=options.dry_run)
    recorded.save(folder / "results")
    (folder / "GPU.md").write_text(page(recorded))
    print(page(recorded))


def _say_that_there_is_none(folder: Path) -> None:
    """Only where nothing was ever measured does the page say so."""
    print("no GPU is at hand: nothing was measured")
    if not (folder / "results" / "gpu.json").exists():
        (folder / "GPU.md").write_text(nothing())


def answers_of(cases: Sequence[str], *, dry: bool, budget: Budget) -> list[Answer]:
    """What became of the rows.

    A row in which the process is lost, as it is by a kernel that reads where it must not, has failed; the
    rest go on in another process.
    """
    found: list[Answer] = []
    with tempfile.TemporaryDirectory() as folder:
        while len(found) < len(cases):
            pending = cases[len(found) :]
            if budget.left() < _LEAST:
                return found + [Answer(case, (), ("left out for want of time",)) for case in pending]
            file = Path(folder, f"answers{len(found)}")
            file.touch()
            why = _run(Job(tuple(pending), dry, budget, file), Path(folder))
            found += read(file)
            if len(found) < len(cases):
                found.append(Answer(cases[len(found)], (), (why or "its process ended early",)))
    return found


def _run(job: Job, caches: Path) -> str:
    """Measure in a process of its own, with caches that were empty; why it came to no end, if it did not."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "AOTDIST_CACHE_FOLDER": str(caches / "aotdist"),
    }
    environment |= {"TRITON_INTERPRET": "1"} if job.dry else {"OMP_NUM_THREADS": str(os.cpu_count())}
    try:
        workers.call(
            f"from {job.cases[0]}",
            measure,
            job,
            environment=environment,
            timeout_s=max(_LEAST, job.budget.left()) + _SPARE,
        )
    except subprocess.TimeoutExpired:
        return "left out: it took longer than all the time that there was"
    except RuntimeError as error:
        return f"its process ended: {str(error).strip().splitlines()[-1][:200]}"
    return ""


def _record(answers: Sequence[Answer], *, dry: bool) -> Record:
    return Record(
        bench="gpu",
        command=shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        date=datetime.date.today().isoformat(),
        versions=versions() | _packages("triton", "torchao", "liger-kernel"),
        machine=machine() | described(Cpu() if dry else Gpu()),
        series=tuple(series for answer in answers for series in answer.series),
        failed=tuple(f"{answer.case}: {note}" for answer in answers for note in answer.notes),
    )


def _packages(*names: str) -> dict[str, str]:
    found = {name: list(metadata.distributions(name=name)) for name in names}
    return {name: each[0].version if each else "none" for name, each in found.items()}


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
