"""A device mesh of one process, for wrapper tensors that communicate with nobody."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One rank of gloo; gone again when the module's tests are over."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def sharded(mesh: DeviceMesh, local: torch.Tensor, placement: Placement | None = None) -> DTensor:
    """A leaf around `local`, sharded along its rows unless another placement is given."""
    return DTensor.from_local(local, mesh, [placement or Shard(0)]).detach()


def replicated(mesh: DeviceMesh, local: torch.Tensor) -> DTensor:
    return sharded(mesh, local, Replicate())
