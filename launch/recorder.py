"""Keeps what a reporter is told: rank 0's run folder."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from aotdist.files import AS_USUAL, write_whole
from aotdist.launch.curve import draw_curve
from aotdist.launch.metrics import METRICS_FILE, MetricsLog, Record
from aotdist.launch.progress import Reporter
from aotdist.launch.run_folder import CURVE_FILE


class RecordingReporter(Reporter):
    """Writes everything into a run folder first and tells the others then.

    Records go to the metrics file, each section to a text file of its title, and closing draws the
    curve: of an interrupted run too, as far as it came. What cannot be written (the disk is full) is a
    warning: training goes on without it, and an error that ends it is not hidden behind that.
    """

    def __init__(self, folder: Path, others: Sequence[Reporter]) -> None:
        self._folder = folder
        self._others = others
        self._log = MetricsLog(folder / METRICS_FILE)

    def start(self, facts: Mapping[str, str], num_steps: int) -> None:
        for other in self._others:
            other.start(facts, num_steps)

    def record(self, record: Record) -> None:
        with _warning(METRICS_FILE):
            self._log.record(record)
        for other in self._others:
            other.record(record)

    def section(self, title: str, text: str) -> None:
        with _warning(f"{title}.txt"):
            write_whole(self._folder / f"{title}.txt", [text.encode(), b"\n"], mode=AS_USUAL)
        self._tell(title, text)

    def close(self) -> None:
        self._log.close()
        curve = None
        with _warning(CURVE_FILE):
            curve = draw_curve(self._folder)
        if curve is not None:
            self._tell("loss curve", str(curve))
        for other in self._others:
            other.close()

    def _tell(self, title: str, text: str) -> None:
        for other in self._others:
            other.section(title, text)


@contextmanager
def _warning(name: str) -> Generator[None]:
    """What stands inside may fail to write the file of this name."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"aotdist: {name} of the run folder cannot be written: {error.strerror}", stacklevel=4)
