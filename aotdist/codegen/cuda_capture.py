"""The seam to CUDA graphs: runs that warm up, runs that are recorded, and what replays them.

Tests that need no GPU put a class of their own in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import torch

Results: TypeAlias = Sequence[Any]


class CudaGraphCapture:
    """The capture of NVIDIA's GPUs, by `torch.cuda.CUDAGraph`.

    All recordings share one pool of memory: what one needs while it runs, and does not return, the next may
    use. That is sound for replays that come one after the other. The default generator is registered by
    PyTorch: a replay draws the numbers that a run would draw.

    Attributes:
        device_type: the type of device that it records.
    """

    device_type = "cuda"

    def place(self, device: torch.device) -> Hashable:
        """The current stream: what replays must agree about to come one after the other."""
        return torch.cuda.current_stream(device).cuda_stream

    def warm(self, run: Callable[[], Results], device: torch.device) -> Results:
        """Run for real, on the stream that records: libraries and kernels set themselves up there.

        It runs after the current stream, and before what follows in that.
        """
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
        """Record a run on the side stream, and compute nothing; other threads do what they like meanwhile.

        Returns:
            what computes it, again and again, and the tensors in which results then lie.
        """
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
