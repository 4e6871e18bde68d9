"""What the cost of a kernel depends on, of the GPU that it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias, get_args

from aotdist.kernels import triton_seam

Target: TypeAlias = Literal["sm_80", "sm_90", "sm_100", "gfx942"]
"""A generation of GPUs: A100, H100 and H200, B200; MI300."""
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    Args:
        bandwidth: bytes a second that its memory moves at most.
        num_processors: how many multiprocessors it has.
    """

    bandwidth: float
    num_processors: int


GPUS: Mapping[Target, Gpu] = {
    "sm_80": Gpu(2.0e12, 108),
    "sm_90": Gpu(4.8e12, 132),
    "sm_100": Gpu(8.0e12, 148),
    "gfx942": Gpu(5.3e12, 304),
}
"""The quickest of each generation, by the data sheets of A100 (80 GB), H200, B200 and MI300X."""
USUAL = GPUS["sm_90"]
"""Where no GPU is named, and none is here."""


def gpu_here() -> Gpu:
    """The current GPU, by its driver; `USUAL` if there is none."""
    device = triton_seam.current_gpu()
    return USUAL if device is None else _gpu_at(device)


@cache
def _gpu_at(device: int) -> Gpu:
    properties = triton_seam.properties_of(device)
    # Bits of the bus; two a cycle, whose length is in kHz. A virtual GPU may say 0 to either.
    bandwidth = 2 * properties["mem_bus_width"] / 8 * properties["mem_clock_rate"] * 1e3
    return Gpu(bandwidth or USUAL.bandwidth, properties["multiprocessor_count"] or USUAL.num_processors)
