"""The most memory that a piece of work has tensors in at once, as PyTorch's CPU allocator reports it."""

from __future__ import annotations

import gc
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

MIB = 2.0**20


def most_allocated_by(work: Callable[[], object]) -> float:
    """MiB, beyond what is allocated before; what `work` leaves behind counts."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda event: event["ts"])
    # Not "Total Allocated": that goes on from what the process profiled before.
    return max(itertools.accumulate(change["args"]["Bytes"] for change in changes), default=0) / MIB
