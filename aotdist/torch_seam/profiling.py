"""The profiler and the history of a GPU's memory."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

RecordFunctionFast = torch._C._profiler._RecordFunctionFast
"""A mark around what a block runs, in C++: `record_function` takes twenty times as long."""


is_profiling: Callable[[], bool] = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")
"""Whether a profiler of PyTorch's records in this process."""


def quiet_kineto() -> None:
    """Keep PyTorch's profiler from logging that it starts and stops, if it has not started before.

    It reads the level once. With a GPU it goes on: what keeps the GPU from being traced is logged, too.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above all that it has


def record_memory_history(enabled: bool) -> None:
    """Begin, or end, to note where a GPU's memory is taken."""
    torch.cuda.memory._record_memory_history(enabled="all" if enabled else None)


def dump_memory_snapshot(path: Path) -> None:
    """Write what was noted, for PyTorch's memory viewer."""
    torch.cuda.memory._dump_snapshot(str(path))
