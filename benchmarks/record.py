"""What a run leaves behind: one JSON file a bench, with what it takes to repeat it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import aotdist
from benchmarks import workers
from benchmarks.timing import Series

ROOT = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Record:
    """One bench, measured.

    Args:
        bench: its name.
        command: what was typed.
        date: day of the run.
        versions: of everything that the numbers depend on.
        machine: what it ran on; nothing that names it.
        series: the samples.
        failed: cases that came to no end.
        errors: what ended them, whole, by where it happened.
    """

    bench: str
    command: str
    date: str
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    series: tuple[Series, ...]
    failed: tuple[str, ...]
    errors: Mapping[str, str] = field(default_factory=dict[str, str])

    def save(self, folder: Path) -> None:
        """Write `<folder>/<bench>.json`, and errors to `<folder>/<bench>.log`, too."""
        folder.mkdir(parents=True, exist_ok=True)
        fields = dataclasses.asdict(self)
        for series in fields["series"]:
            series["samples"] = [float(f"{sample:.6g}") for sample in series["samples"]]
        (folder / f"{self.bench}.json").write_text(json.dumps(fields, indent=1) + "\n")
        log = folder / f"{self.bench}.log"
        log.unlink(missing_ok=True)
        if self.errors:
            log.write_text("\n".join(f"=== {where}\n{text}\n" for where, text in self.errors.items()))

    @classmethod
    def load(cls, file: Path) -> Record:
        """Read what `save` wrote."""
        fields: dict[str, Any] = json.loads(file.read_text())
        fields["series"] = tuple(
            Series(**each | {"samples": tuple(each["samples"])}) for each in fields["series"]
        )
        fields["failed"] = tuple(fields["failed"])
        return cls(**fields)


def record(bench: str, series: Sequence[Series], failed: Sequence[str], load_before: float) -> Record:
    """`series` with the circumstances of this process.

    Args:
        bench: its name.
        series: what it measured.
        failed: the cases that it could not measure.
        load_before: the machine's load average when it began; far from 0 means that others were at work.
    """
    return Record(
        bench=bench,
        command=shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]]),
        date=datetime.date.today().isoformat(),
        versions=versions(),
        machine=machine() | {"load before": f"{load_before:.1f}"},
        series=tuple(series),
        failed=tuple(failed),
    )


def versions() -> dict[str, str]:
    """Of everything that numbers depend on."""
    compiler = _first_line(["g++", "-dumpfullversion"])
    commit = _first_line(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])
    return {
        "aotdist": f"{aotdist.__version__} ({commit})",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "g++": compiler,
    }


def machine() -> dict[str, str]:
    """What they are measured on; nothing that names it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": _cpu_model(),
        "cores": str(workers.NUM_CORES),
        "memory": f"{memory:.0f} GiB",
        "threads": f"{workers.threads_per_rank(1)} alone, {workers.threads_per_rank(2)} a rank of 2",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _first_line(command: list[str]) -> str:
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return output.strip().splitlines()[0]
