"""`make ranks`: the page says what was seen, nothing of it is what may not be, and the same is seen again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from aotdist.errors import AotdistError
from benchmarks.ranks.page import PAGE, page
from benchmarks.ranks.part import Diary, Part
from benchmarks.ranks.record import Rows
from benchmarks.ranks.run import RESULTS
from benchmarks.ranks.scenarios import SCENARIOS
from benchmarks.ranks.verdict import faults
from benchmarks.ranks.vocabulary import Row, Seen
from tests.ranks.harness import fresh_world

ROWS = Rows.load(RESULTS)
TOLD = (Seen("RankDivergence", "they differ", 0.5, 2),) * 2
WIDER = "its hidden layer is wider"
KILLED = "it is killed between steps"
SLOW = "each of its steps takes 1 s longer"
OTHER = Seen("finished", silent="loss of step 1: 2 for 1")


def test_every_scenario_was_run() -> None:
    assert len(SCENARIOS) >= 50
    assert {(row.scenario, row.way) for row in ROWS.rows} == {
        (scenario.name, way) for scenario in SCENARIOS.values() for way in scenario.ways
    }


def test_the_page_says_what_was_seen() -> None:
    assert PAGE.read_text() == page(ROWS)


def test_no_rank_hangs_is_aborted_or_computes_other_values() -> None:
    found = {(row.scenario, row.way): faults(row) for row in ROWS.rows}
    assert {place: fault for place, fault in found.items() if fault} == {}


def test_rows_outlive_their_file(tmp_path: Path) -> None:
    rows = Rows().with_row(Row(WIDER, "fx", TOLD, TOLD))
    rows.save(tmp_path)
    assert Rows.load(tmp_path) == rows
    assert Rows.load(tmp_path / "nowhere") == Rows()


@pytest.mark.parametrize(
    ("name", "ranks", "found"),
    [
        (WIDER, TOLD, ()),
        (WIDER, (Seen("finished"),) * 2, ()),
        (WIDER, (Seen("hang"), Seen("hang")), ("rank 0: hang", "rank 1: hang")),
        (WIDER, (TOLD[0], Seen("SIGABRT")), ("rank 1: abort", "rank 1: another end than its peers")),
        (WIDER, (TOLD[0], Seen("RankDivergence", seconds=20.4)), ("rank 1: hang",)),
        (WIDER, (OTHER, Seen("finished")), ("rank 0: silent: loss of step 1: 2 for 1",)),
        (KILLED, (Seen("RankLost"), Seen("SIGKILL")), ()),
        (KILLED, (Seen("RuntimeError"), Seen("SIGKILL")), ("rank 0: ends by RuntimeError",)),
        (KILLED, (Seen("SIGKILL"), Seen("SIGKILL")), ("rank 0: abort",)),
        (SLOW, (Seen("finished"), Seen("RankLost")), ("rank 1: ends by RankLost",)),
    ],
)  # fmt: skip
def test_what_may_not_be(name: str, ranks: tuple[Seen, ...], found: tuple[str, ...]) -> None:
    assert faults(Row(name, "fx", ranks, ())) == found


def test_the_page_shows_the_worst() -> None:
    text = page(Rows().with_row(Row(WIDER, "fx", TOLD, (OTHER, Seen("SIGABRT")))))
    ours = "RankDivergence, 0.5 s | RankDivergence, 0.5 s"
    eager = "**other values** (loss of step 1: 2 for 1) | **abort** (SIGABRT), 0.0 s"
    assert f"| {WIDER} | {ours} | {eager} |" in text
    assert "| an error within seconds | 1 | 0 |" in text and "| other values | 0 | 1 |" in text
    assert f"- {WIDER}: they differ" in text


SMALL = (
    "`train_step`: its model is wider",
    "it registers two weights of one size in the other order",
    "it calls two models of one size in the other order",
    "it evaluates where the other one trains; both have done both",
    "it leaves a backward out",
    "a long batch takes a branch that is new",
)
"""Some that end alike on both ranks, before anything is sent."""


def end_of(name: str, folder: str) -> str:
    """How a scenario ends on this rank."""
    scenario = SCENARIOS[name]
    try:
        scenario.act(
            Part(dist.get_rank() == scenario.odd_rank, "fx", Diary(Path(folder, str(dist.get_rank()))))
        )
    except AotdistError as error:
        return type(error).__name__
    return "finished"


@pytest.mark.ranks
@pytest.mark.parametrize("name", SMALL)
def test_differences_are_told_on_both_ranks(name: str, tmp_path: Path) -> None:
    with fresh_world(2) as world:
        assert world.run(end_of, name, str(tmp_path)) == ["RankDivergence"] * 2
