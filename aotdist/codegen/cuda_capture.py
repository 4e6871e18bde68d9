"""The seam to CUDA graphs: runs that warm up, runs that are recorded, and what replays them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

Results: TypeAlias = Sequence[Any]


class GraphCapture(Protocol):
    """Records what runs on a device."""

    @property
    def device_type(self) -> str:
        """The type of device that it records."""
        ...

    def place(self, device: torch.device) -> Hashable:
        """What replays must agree about to come one after the other: the current stream."""
        ...

    def warm(self, run: Callable[[], Results], device: torch.device) -> Results:
        """Run for real, where recordings are made: libraries and kernels set themselves up."""
        ...

    def record(self, run: Callable[[], Results], device: torch.device) -> tuple[Callable[[], None], Results]:
        """Record a run, and compute nothing.

        Returns:
            what computes it, again and again, and the tensors in which results then lie.
        """
        ...


@dataclass(frozen=True, slots=True)
class CudaGraphCapture:
    """The capture of NVIDIA's GPUs, by `torch.cuda.CUDAGraph`.

    All recordings share one pool of memory: what one needs while it runs, and does not return, the next may
    use. That is sound for replays that come one after the other. The default generator is registered by
    PyTorch: a replay draws the numbers that a run would draw.
    """

    device_type: str = "cuda"

    def place(self, device: torch.device) -> Hashable:
        """The current stream."""
        return torch.cuda.current_stream(device).cuda_stream

    def warm(self, run: Callable[[], Results], device: torch.device) -> Results:
        """Run on the stream that records, after the current one and before what follows in it."""
        with torch.cuda.device(device):
            current, side = torch.cuda.current_stream(), _side_stream(device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                results = run()
            current.wait_stream(side)
        for result in results:
            if isinstance(result, torch.Tensor):
                result.record_stream(current)
        return results

    def record(self, run: Callable[[], Results], device: torch.device) -> tuple[Callable[[], None], Results]:
        """Record on the side stream; what other threads do meanwhile is not looked at."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, _pool(device), _side_stream(device), capture_error_mode="thread_local"),
        ):
            results = run()

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return replay, results


@functools.cache
def _pool(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
