"""Measure aotdist beside its peers: `python -m benchmarks.run`, or `step call --quick`.

Writes `benchmarks/results/<bench>.json` and rebuilds `benchmarks/RESULTS.md` from all of them. A quick
run only shows that everything runs: it writes to `results/quick/` and prints its tables.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from benchmarks import (
    bench_cache,
    bench_call,
    bench_capture,
    bench_compile,
    bench_launch,
    bench_lengths,
    bench_memory,
    bench_ranks,
    bench_step,
    bench_train_step,
    bench_worlds,
)
from benchmarks.effort import Case, Effort
from benchmarks.record import ROOT, Record, record
from benchmarks.tables import page, section
from benchmarks.timing import Series
from benchmarks.verdicts import Target

Name = Literal[
    "step",
    "train_step",
    "memory",
    "capture",
    "worlds",
    "ranks",
    "lengths",
    "compile",
    "cache",
    "call",
    "launch",
]


@dataclass(frozen=True, slots=True)
class Bench:
    """What a `bench_*.py` has: what it is about, what it consists of, what was to be reached."""

    purpose: str | None
    cases: Callable[[Effort], list[Case]]
    targets: Sequence[Target]


BENCHES: dict[str, Bench] = {
    "step": Bench(bench_step.__doc__, bench_step.cases, bench_step.TARGETS),
    "train_step": Bench(bench_train_step.__doc__, bench_train_step.cases, bench_train_step.TARGETS),
    "memory": Bench(bench_memory.__doc__, bench_memory.cases, bench_memory.TARGETS),
    "capture": Bench(bench_capture.__doc__, bench_capture.cases, bench_capture.TARGETS),
    "worlds": Bench(bench_worlds.__doc__, bench_worlds.cases, bench_worlds.TARGETS),
    "ranks": Bench(bench_ranks.__doc__, bench_ranks.cases, bench_ranks.TARGETS),
    "lengths": Bench(bench_lengths.__doc__, bench_lengths.cases, bench_lengths.TARGETS),
    "compile": Bench(bench_compile.__doc__, bench_compile.cases, bench_compile.TARGETS),
    "cache": Bench(bench_cache.__doc__, bench_cache.cases, bench_cache.TARGETS),
    "call": Bench(bench_call.__doc__, bench_call.cases, bench_call.TARGETS),
    "launch": Bench(bench_launch.__doc__, bench_launch.cases, bench_launch.TARGETS),
}
RESULTS = ROOT / "results"


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Args:
        benches: some of the benches; all of them when none is named.
        quick: a small model and few rounds, to see that everything runs.
    """

    benches: tyro.conf.Positional[tuple[Name, ...]] = ()
    quick: bool = False


def main(options: Options) -> int:
    """Run, write and show; the number of cases that failed."""
    names = options.benches or tuple(BENCHES)
    with tempfile.TemporaryDirectory() as cache:
        effort = Effort(options.quick, Path(cache))
        failed = sum(_run_one(name, effort) for name in names)
    if not options.quick:
        (ROOT / "RESULTS.md").write_text(_page())
    return failed


def _run_one(name: str, effort: Effort) -> int:
    """Measure, save and show one bench; the number of its cases that failed."""
    start, load = time.perf_counter(), os.getloadavg()[0]
    print(f"{name} ...", flush=True)
    found, failed = _measure(BENCHES[name].cases(effort))
    recorded = record(name, found, failed, load)
    recorded.save(RESULTS / "quick" if effort.quick else RESULTS)
    print(f"{name}: {time.perf_counter() - start:.0f} s\n\n{_section(recorded)}", flush=True)
    return len(failed)


def _measure(cases: Sequence[Case]) -> tuple[list[Series], list[str]]:
    """What the cases measured, and the names of those that failed."""
    found: list[Series] = []
    failed: list[str] = []
    for case in cases:
        try:
            found += case.measure()
        except Exception:
            traceback.print_exc()
            failed.append(case.name)
    return found, failed


def _page() -> str:
    files = {name: RESULTS / f"{name}.json" for name in BENCHES}
    return page([_section(Record.load(file)) for file in files.values() if file.exists()])


def _section(found: Record) -> str:
    bench = BENCHES[found.bench]
    return section(found, (bench.purpose or "").strip(), bench.targets)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
