"""Have ranks differ, and see what each of them sees: `make ranks`.

Runs every scenario in processes of its own, compiled and in eager, writes
`benchmarks/results/differences.json` after each, and at the end `docs/ranks.md`. Name some to run those anew
and keep the others: `make ranks ARGS="--scenarios killed barrier"` takes all whose names contain one of the
words.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import tyro

from benchmarks.ranks.page import PAGE, page
from benchmarks.ranks.record import Rows
from benchmarks.ranks.scenarios import SCENARIOS, Scenario
from benchmarks.ranks.verdict import faults
from benchmarks.ranks.vocabulary import Row, Way
from benchmarks.ranks.worlds import Values, Watched, compared, watched
from benchmarks.record import ROOT

RESULTS = ROOT / "results"


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Args:
        scenarios: words; those whose names hold one of them are run, or all if there are none.
        ways: some of the backends.
        missing: only what has not been run yet.
        at_once: scenarios that run at once.
        quick: into `results/quick/`, and the page is printed.
    """

    scenarios: tuple[str, ...] = ()
    ways: tuple[Way, ...] = ("fx", "inductor")
    missing: bool = False
    at_once: int = 2
    quick: bool = False


def main(options: Options) -> int:
    """Run them; the number of rows in which ranks see what they may not."""
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = RESULTS / "quick" if options.quick else RESULTS
    rows = Rows.load(folder)
    with ThreadPoolExecutor(options.at_once) as pool:  # they wait for most of the time
        jobs = [pool.submit(rows_of, *job) for job in _jobs(options, rows)]
        for job in as_completed(jobs):
            for row in job.result():
                rows = rows.with_row(row)
                said = "; ".join(faults(row)) or "fine"
                print(f"  {row.scenario}, {row.way}: {said}", flush=True)
            rows.save(folder)
    text = page(rows)
    if options.quick:
        print(text)
    else:
        PAGE.write_text(text)
    return sum(bool(faults(row)) for row in rows.rows)


def _jobs(options: Options, rows: Rows) -> Iterator[tuple[Scenario, list[Way]]]:
    """Scenarios with the ways in which to run them."""
    known = {(row.scenario, row.way) for row in rows.rows} if options.missing else set[tuple[str, Way]]()
    for scenario in SCENARIOS.values():
        ways: list[Way] = [
            way for way in scenario.ways if way in options.ways and (scenario.name, way) not in known
        ]
        named = not options.scenarios or any(word in scenario.name for word in options.scenarios)
        if ways and named:
            yield scenario, ways


def rows_of(scenario: Scenario, ways: Sequence[Way]) -> list[Row]:
    """Run a scenario in eager, and in some ways beside it."""
    eager = watched(scenario.name, "eager")
    ours: dict[Way, list[Watched]] = {way: watched(scenario.name, way) for way in ways}
    expected = _expected(scenario, [eager, *ours.values()])
    beside = compared(eager, expected, exactly=True)
    return [
        Row(scenario.name, way, compared(found, expected, exactly=way == "fx"), beside)
        for way, found in ours.items()
    ]


def _expected(scenario: Scenario, found: Sequence[Sequence[Watched]]) -> list[Values]:
    """What each rank computes in eager: were all ranks as it is, or beside the others where that runs."""
    eager, *_ = found
    if scenario.kind != "differs" or not any(each.values for ranks in found for each in ranks):
        return [each.values for each in eager]
    alike, odd = watched(scenario.name, "eager", "none"), watched(scenario.name, "eager", "all")
    return [(odd if rank == scenario.odd_rank else alike)[rank].values for rank in range(scenario.num_ranks)]


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
