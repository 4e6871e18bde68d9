"""Seconds of each stage of a compilation, told to somebody who waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aotdist.report.logs import log_stage
from aotdist.report.progress import Progress


@dataclass(slots=True)
class StageTimes:
    """Seconds of each stage, in the order in which they ran.

    Args:
        seconds: how long each stage took, by its name.
        progress: told which stage runs, for somebody who waits for it.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    progress: Progress | None = None

    def counting(self, num_nodes: Callable[[], int]) -> None:
        """Let the progress line count nodes by `num_nodes`."""
        if self.progress is not None:
            self.progress.num_nodes = num_nodes

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Add the time spent inside to stage `name`."""
        if self.progress is not None:
            self.progress.stage = name
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            if self.progress is not None:
                log_stage(self.progress.name, name, seconds, self.progress.num_nodes)
