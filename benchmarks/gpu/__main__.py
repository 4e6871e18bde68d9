"""Measure on a GPU: `make bench-gpu`.

Writes `benchmarks/GPU.md` and `benchmarks/results/gpu.json`. It keeps its own time: contenders and rows that
do not fit into it are left out, from the last, and named. Errors are whole in the JSON, and in
`results/gpu.log`. Without a GPU the page says that there was none. Of packages it needs torch and Triton.
"""

from __future__ import annotations

import argparse
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

from benchmarks import workers
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.measuring import COPY, WARM_UP, Answer, Job, measure, read, what_ended
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


def options_of(arguments: Sequence[str]) -> Options:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    default = Options()
    parser.add_argument("--minutes", type=float, default=default.minutes, help="that it may take")
    parser.add_argument("--dry-run", action="store_true", help="with tiny tensors, on the CPU")
    known = [COPY, *(row.case for row in rows(dry=True))]
    some = parser.add_argument("--cases", nargs="+", default=(), metavar="CASE", help="some of the rows")
    some.choices = known
    parser.add_argument("--folder", type=Path, default=None, help="where the page goes, and results/gpu.json")
    found = parser.parse_args(arguments)
    return Options(found.minutes, found.dry_run, tuple(found.cases), found.folder)


def main(options: Options) -> None:
    """Measure, write and show."""
    folder = options.folder or (ROOT / "results" / "quick" if options.dry_run else ROOT)
    if not options.dry_run and not torch.cuda.is_available():
        _say_that_there_is_none(folder)
        return
    known = (COPY, WARM_UP, *(row.case for row in rows(dry=options.dry_run)))
    cases = tuple(case for case in known if not options.cases or case in (WARM_UP, *options.cases))
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

    A row in which the process is lost, as it is by a kernel that reads where it must not, or that takes far
    longer than it should, has failed; the rest go on in another process.
    """
    found: list[Answer] = []
    with tempfile.TemporaryDirectory() as folder:
        while len(found) < len(cases):
            pending = cases[len(found) :]
            if budget.left() < _LEAST:
                return found + [Answer(case, (), ("left out for want of time",)) for case in pending]
            file = Path(folder, f"answers{len(found)}")
            file.touch()
            again = Answer(WARM_UP, ()) in found
            why, output = _run(Job(tuple(pending), dry, budget, file, again), Path(folder))
            found += read(file)
            if len(found) < len(cases):
                found.append(Answer(cases[len(found)], (), (why,), {"its process": output}))
    return found


def _run(job: Job, caches: Path) -> tuple[str, str]:
    """Measure in a process of its own, with caches that were empty.

    Returns:
        Why it came to no end, if it did not, and all that it wrote.
    """
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "AOTDIST_CACHE_FOLDER": str(caches / "aotdist"),
    }
    environment |= {"TRITON_INTERPRET": "1"} if job.dry else {"OMP_NUM_THREADS": str(os.cpu_count())}
    timeout_s = max(_LEAST, job.budget.left()) + _SPARE
    try:
        workers.call(f"from {job.cases[0]}", measure, job, environment=environment, timeout_s=timeout_s)
    except subprocess.TimeoutExpired as error:
        return "left out: it took longer than all the time that there was", str(error.output)
    except RuntimeError as error:
        return f"its process ended: {what_ended(str(error))}", str(error)
    return "its process ended early", ""


def _record(answers: Sequence[Answer], *, dry: bool) -> Record:
    return Record(
        bench="gpu",
        command=shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        date=datetime.date.today().isoformat(),
        versions=versions() | _packages("triton", "torchao", "liger-kernel"),
        machine=machine() | described(Cpu() if dry else Gpu()),
        series=tuple(series for answer in answers for series in answer.series),
        failed=tuple(f"{answer.case}: {note}" for answer in answers for note in answer.notes),
        errors={
            f"{answer.case}: {where}": text for answer in answers for where, text in answer.errors.items()
        },
    )


def _packages(*names: str) -> dict[str, str]:
    found = {name: list(metadata.distributions(name=name)) for name in names}
    return {name: each[0].version if each else "none" for name, each in found.items()}


if __name__ == "__main__":
    main(options_of(sys.argv[1:]))
