"""Profiles some steps: a trace of operators and kernels, a snapshot of a GPU's memory."""

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
    """Refuse memory snapshots on a CPU, before anything is written.

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
    """Profiles the steps that the options name, on this rank."""

    options: ProfileOptions
    folder: Path
    rank: int
    _trace: profile | None = field(default=None, init=False)

    @contextmanager
    def around(self, step: int) -> Generator[None]:
        """Around each step: starts profiling at the first of the steps, and writes after the last."""
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
        """Writes the trace if one was started, also when the run ends before the last step to profile."""
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
