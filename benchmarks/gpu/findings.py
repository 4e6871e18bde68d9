"""What first contact finds: a line of JSON for each case, and a JUnit file of all."""

from __future__ import annotations

import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

Outcome = Literal["ok", "failed", "skipped"]


class NotHere(Exception):
    """Raised by a case that needs what is not there; the message names it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a case.

    Args:
        step: the step that it belongs to.
        case: what was tried.
        outcome: how it went.
        seconds: that it took.
        numbers: what was measured.
        reason: the whole traceback of a failure; why it was skipped.
    """

    step: str
    case: str
    outcome: Outcome
    seconds: float
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Reporter:
    """Tries cases, and writes each finding at once, whatever becomes of the process.

    Args:
        step: that the cases belong to.
        file: where lines go.
    """

    step: str
    file: Path

    def check(self, case: str, tried: Callable[[], Mapping[str, Any] | None]) -> None:
        """Try a case; no failure goes further.

        Args:
            case: its name.
            tried: raises if it fails; returns what it measured.
        """
        started = time.perf_counter()
        outcome, numbers, reason = "ok", {}, ""
        try:
            numbers = tried() or {}
        except NotHere as missing:
            outcome, reason = "skipped", str(missing)
        except Exception:
            outcome, reason = "failed", traceback.format_exc()
        seconds = round(time.perf_counter() - started, 4)
        self.write(Finding(self.step, case, outcome, seconds, numbers, reason))

    def write(self, finding: Finding) -> None:
        """Add a line."""
        with self.file.open("a") as lines:
            lines.write(json.dumps(dataclasses.asdict(finding)) + "\n")


def read(file: Path) -> Iterator[Finding]:
    """The findings of a file; a last line that was cut off is none."""
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            yield Finding(**json.loads(line))
        except ValueError:
            return


def junit(findings: Sequence[Finding]) -> str:
    """The findings as test cases, for what reads test results."""
    counts = {name: str(sum(each.outcome == name for each in findings)) for name in ("failed", "skipped")}
    suite = ElementTree.Element(
        "testsuite", name="first contact", tests=str(len(findings)), failures=counts["failed"],
        skipped=counts["skipped"], errors="0",
    )  # fmt: skip
    for each in findings:
        case = ElementTree.SubElement(
            suite, "testcase", classname=each.step, name=each.case, time=str(each.seconds)
        )
        if each.outcome != "ok":
            kind = "failure" if each.outcome == "failed" else "skipped"
            last = each.reason.strip().splitlines()[-1] if each.reason.strip() else ""
            ElementTree.SubElement(case, kind, message=_printable(last)).text = _printable(each.reason)
    return ElementTree.tostring(suite, encoding="unicode")


def _printable(text: str) -> str:
    """`text` without what XML has no way to write."""
    return "".join(character for character in text if character >= " " or character in "\n\t")
