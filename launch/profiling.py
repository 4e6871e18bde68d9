"""Looks at some steps closely: a trace of what ran when, a snapshot of what lay in a GPU's memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from aotdist.errors import BadSettings
from aotdist.launch.config import ProfileOptions
from aotdist.report.lanes import STEP_MARK
from aotdist.report.profile import profile_of, torch_profiler
from aotdist.torch_seam.profiling import dump_memory_snapshot, record_memory_history

PROFILE_FOLDER = "profile"


def require_gpu_for_snapshots(options: ProfileOptions, device: torch.device) -> None:
    """Asks for what a snapshot is of, before anything is written.

    Raises:
        BadSettings: the model is on a CPU.
    """
    if options.memory and device.type != "cuda":
        raise BadSettings(
            f"--profile.memory: the model is on {device.type}, and snapshots are of a GPU's memory",
            fix="leave it out; metrics.jsonl has the peak of each step",
        )


@dataclass(slots=True)
class StepProfiler:
    """Profiles the steps that the options name, on this rank.

    Args:
        options: which steps, and what of them.
        folder: where traces and snapshots go.
        rank: of this process, for their names.
    """

    options: ProfileOptions
    folder: Path
    rank: int
    _trace: profile | None = field(default=None, init=False)

    @contextmanager
    def around(self, step: int) -> Generator[None]:
        """Around a step: begins with the first that is profiled, and writes after the last."""
        first, num_steps = self.options.first_step, self.options.steps
        if not first <= step < first + num_steps:
            yield
            return
        if step == first:
            if self.options.memory:
                record_memory_history(True)
            self._trace = torch_profiler()
            self._trace.start()
        with record_function(f"{STEP_MARK}{step}"):
            yield
        if step == first + num_steps - 1:
            self.close()

    def close(self) -> None:
        """Writes what was traced, if anything: also of a run that ends in the midst of it."""
        if self._trace is None:
            return
        self._trace.stop()
        self.folder.mkdir(exist_ok=True)
        found = profile_of(self._trace, self.folder / f"trace-rank{self.rank}.json.gz")
        (self.folder / f"times-rank{self.rank}.txt").write_text(f"{found}\n", encoding="utf-8")
        self._trace = None
        if self.options.memory:
            dump_memory_snapshot(self.folder / f"memory-rank{self.rank}.pickle")
            record_memory_history(False)
