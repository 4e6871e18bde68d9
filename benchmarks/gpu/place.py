"""Where contenders run, and how time and memory are read there."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.timing import Contender

_FLUSHED = 2**28
"""Bytes that are written before a kernel runs: five times the second-level cache of an H100."""
_SLEEP = 2_000_000
"""Cycles, a millisecond, in which the CPU queues a contender's launches: what is timed is the GPU's work."""


class Place(Protocol):
    """A device with a clock."""

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""
        ...

    def seconds_of(self, contender: Contender, *, cold: bool) -> float:
        """Run a contender once.

        Args:
            contender: whom; its preparation is not timed.
            cold: empty the cache before; what kernels read then comes from memory.
        """
        ...

    def finish(self) -> None:
        """Wait for all that was launched."""
        ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """The most bytes that tensors have at once while `work` runs, beyond those that are there before."""
        ...


@dataclass(frozen=True, slots=True)
class Gpu:
    """The current GPU; its own events tell the time."""

    device: torch.device = torch.device("cuda")

    def seconds_of(self, contender: Contender, *, cold: bool) -> float:
        """Between two events around the contender's launches."""
        contender.prepare()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if cold:
            torch.empty(_FLUSHED, dtype=torch.int8, device=self.device).zero_()
            torch.cuda._sleep(_SLEEP)  # pyright: ignore[reportPrivateUsage]
        else:
            self.finish()
        start.record()
        contender.run()
        end.record()
        self.finish()
        return start.elapsed_time(end) / 1e3

    def finish(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)

    def peak_of(self, work: Callable[[], object]) -> int:
        """By the allocator's count."""
        gc.collect()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        self.finish()
        return torch.cuda.max_memory_allocated(self.device) - before


@dataclass(frozen=True, slots=True)
class Cpu:
    """Stands in for a GPU where there is none: shows that everything runs, and what it says means nothing."""

    device: torch.device = torch.device("cpu")

    def seconds_of(self, contender: Contender, *, cold: bool) -> float:
        """By the clock on the wall."""
        contender.prepare()
        start = time.perf_counter()
        contender.run()
        return time.perf_counter() - start

    def finish(self) -> None:
        """Nothing runs elsewhere."""

    def peak_of(self, work: Callable[[], object]) -> int:
        """Nobody counts."""
        work()
        return 0


def described(place: Place) -> dict[str, str]:
    """What the place is."""
    if place.device.type == "cpu":
        return {"gpu": "none"}
    found: Any = torch.cuda.get_device_properties(place.device)
    return {
        "gpu": str(found.name),
        "gpu memory": f"{found.total_memory / 2**30:.0f} GiB",
        "cuda": str(torch.version.cuda),
    }
