"""The most memory that a piece of work has tensors in at once, as PyTorch's allocators report it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from aotdist.report.profile import trace_of
from aotdist.torch_seam.profiling import quiet_kineto

MIB = 2.0**20


def most_allocated_by(work: Callable[[], object]) -> float:
    """MiB, beyond what is allocated before; what `work` leaves behind counts. Of a GPU, if one is used."""
    gc.collect()
    return (_on_the_gpu(work) if torch.cuda.is_initialized() else _on_the_cpu(work)) / MIB


def _on_the_gpu(work: Callable[[], object]) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() - before


def _on_the_cpu(work: Callable[[], object]) -> int:
    quiet_kineto()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        work()
    changes = [event for event in trace_of(recorded)["traceEvents"] if event.get("name") == "[memory]"]
    # Not "Total Allocated": that goes on from what the process profiled before.
    sizes = (change["args"]["Bytes"] for change in sorted(changes, key=lambda event: event["ts"]))
    return max(itertools.accumulate(sizes), default=0)
