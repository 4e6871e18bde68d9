"""Keeps what a reporter is told: rank 0's run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aotdist.launch.curve import draw_curve
from aotdist.launch.metrics import METRICS_FILE, MetricsLog, Record
from aotdist.launch.progress import Reporter


class RecordingReporter:
    """Writes everything into a run folder first and shows it then.

    Records go to the metrics file, each section to a text file of its title, and closing draws the
    curve: of an interrupted run too, as far as it came.
    """

    def __init__(self, folder: Path, shown: Reporter) -> None:
        self._folder = folder
        self._shown = shown
        self._log = MetricsLog(folder / METRICS_FILE)

    def start(self, facts: Mapping[str, str], num_steps: int) -> None:
        self._shown.start(facts, num_steps)

    def record(self, record: Record) -> None:
        self._log.record(record)
        self._shown.record(record)

    def section(self, title: str, text: str) -> None:
        (self._folder / f"{title}.txt").write_text(text + "\n")
        self._shown.section(title, text)

    def close(self) -> None:
        self._log.close()
        curve = draw_curve(self._folder)
        if curve is not None:
            self._shown.section("loss curve", str(curve))
        self._shown.close()


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
