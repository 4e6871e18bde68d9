"""The profiler and the history of a GPU's memory."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

from pathlib import Path

import torch

RecordFunctionFast = torch._C._profiler._RecordFunctionFast
"""A mark around what a block runs, in C++: `record_function` takes twenty times as long."""


def is_profiling() -> bool:
    """Whether a profiler of PyTorch's records in this process."""
    return torch.autograd.profiler._is_profiler_enabled


def record_memory_history(enabled: bool) -> None:
    """Begin, or end, to note where a GPU's memory is taken."""
    torch.cuda.memory._record_memory_history(enabled="all" if enabled else None)


def dump_memory_snapshot(path: Path) -> None:
    """Write what was noted, for PyTorch's memory viewer."""
    torch.cuda.memory._dump_snapshot(str(path))
