"""First contact runs to its end on a CPU, keeps what it found, and fails where something is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.gpu import first_contact
from benchmarks.gpu.contact_page import page
from benchmarks.gpu.findings import Finding, NotHere, Reporter, junit, read
from benchmarks.gpu.first_contact import IN_SHORT, STEPS, Options, main

RESULTS = Path(first_contact.__file__).parents[1] / "results"


def run(folder: Path, *steps: str, seconds: float = 300) -> tuple[int, list[Finding]]:
    """A dry run's exit status and findings."""
    status = main(Options(seconds, folder, steps, dry=True, workers=2))
    return status, [Finding(**each) for each in json.loads((folder / "first_contact.json").read_text())]


@pytest.mark.slow
def test_a_step_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    status, found = run(tmp_path, "environment")
    assert status == 0 and [each.outcome for each in found] == ["ok"] * 4
    assert "| environment | 4 |" in (tmp_path / "FIRST_CONTACT.md").read_text()


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_every_step_runs_on_a_cpu(tmp_path: Path) -> None:
    status, found = run(tmp_path, seconds=900)
    assert {each.step for each in found} == set(STEPS)
    assert not [each for each in found if each.outcome == "failed"] and status == 0
    skipped = {each.reason for each in found if each.outcome == "skipped"}
    assert skipped <= {"needs a GPU", "needs torchao"}


def test_without_time_nothing_is_started_and_nothing_passes(tmp_path: Path) -> None:
    status, found = run(tmp_path, "environment", "launchers", seconds=1)
    assert [each.reason for each in found] == ["left out for want of time"] * 2
    assert status == 1


def test_a_failure_is_whole_and_costs_its_case_alone(tmp_path: Path) -> None:
    report = Reporter("a step", tmp_path / "findings")

    def breaks() -> None:
        raise ValueError("of two\nlines")

    def is_missing() -> None:
        raise NotHere("needs a GPU")

    report.check("breaks", breaks)
    report.check("is missing", is_missing)
    report.check("measures", lambda: {"us": 1.5})
    found = list(read(tmp_path / "findings"))
    assert [each.outcome for each in found] == ["failed", "skipped", "ok"]
    assert "in breaks" in found[0].reason and "of two\nlines" in found[0].reason
    suite = ElementTree.fromstring(junit(found))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    assert "of two" in suite.findall("testcase/failure")[0].text  # type: ignore[operator]


def test_what_was_cut_off_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "findings"
    Reporter("a step", file).check("one", dict)
    file.write_text(file.read_text() + '{"step": "a st')
    assert [each.case for each in read(file)] == ["one"]


def test_the_short_form_fits_into_its_time() -> None:
    assert set(IN_SHORT) < set(STEPS)


def test_the_page_is_that_of_what_was_found() -> None:
    found = [Finding(**each) for each in json.loads((RESULTS / "first_contact_h200.json").read_text())]
    written = (RESULTS.parent / "FIRST_CONTACT.md").read_text()
    command = written.split("`")[3]
    assert page(found, command) == written
