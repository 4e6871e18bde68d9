"""Keeps what a reporter is told: rank 0's run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from aotdist.launch.curve import draw_curve
from aotdist.launch.metrics import METRICS_FILE, MetricsLog, Record
from aotdist.launch.progress import Reporter


class RecordingReporter:
    """Writes everything into a run folder first and tells the others then.

    Records go to the metrics file, each section to a text file of its title, and closing draws the
    curve: of an interrupted run too, as far as it came.
    """

    def __init__(self, folder: Path, others: Sequence[Reporter]) -> None:
        self._folder = folder
        self._others = others
        self._log = MetricsLog(folder / METRICS_FILE)

    def start(self, facts: Mapping[str, str], num_steps: int) -> None:
        for other in self._others:
            other.start(facts, num_steps)

    def record(self, record: Record) -> None:
        self._log.record(record)
        for other in self._others:
            other.record(record)

    def section(self, title: str, text: str) -> None:
        (self._folder / f"{title}.txt").write_text(text + "\n")
        self._tell(title, text)

    def close(self) -> None:
        self._log.close()
        curve = draw_curve(self._folder)
        if curve is not None:
            self._tell("loss curve", str(curve))
        for other in self._others:
            other.close()

    def _tell(self, title: str, text: str) -> None:
        for other in self._others:
            other.section(title, text)


class SilentReporter:
    """For ranks other than 0."""

    def start(self, facts: Mapping[str, str], num_steps: int) -> None:
        pass

    def record(self, record: Record) -> None:
        pass

    def section(self, title: str, text: str) -> None:
        pass

    def close(self) -> None:
        pass
