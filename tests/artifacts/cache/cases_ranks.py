"""What the ranks of `test_backend.py` and `test_of_a_rank.py` run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import aotdist
from aotdist.codegen.inductor import InductorBackend
from aotdist.torch_seam.inductor import inductor_config
from tests.artifacts.cache.of_a_rank import OF_A_RANK, Program, gathering_twice, of_a_group
from tests.artifacts.programs import Made, sharded_evenly


def compiled_by(folder: str) -> int:
    """How many graphs this rank rewrote or emitted; its step is close to eager's."""
    return _compiled(sharded_evenly, folder)[0]


def in_layers(num_layers: int) -> Made:
    """FSDP2, each layer a unit."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(num_layers))
    model = nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model), (torch.randn(3, 8) + dist.get_rank(),)


def deeper_than_compiled(folder: str) -> tuple[int, int, str]:
    """How many graphs this rank emitted for four layers, and then for five; the report of these."""
    shallow, _ = _compiled(partial(in_layers, 4), folder, ("emit",))
    deep, report = _compiled(partial(in_layers, 5), folder, ("emit",))
    return shallow, deep, report


def _compiled(
    make: Callable[[], Made], folder: str, steps: tuple[str, ...] = ("prepare_joint", "emit")
) -> tuple[int, str]:
    """How often this rank took these steps, and the report; its step is close to eager's."""
    made = 0

    def counted(original: Any) -> Any:
        def counting(*args: Any) -> Any:
            nonlocal made
            made += 1
            return original(*args)

        return counting

    expected = _gradients(*make())
    model, args = make()
    with pytest.MonkeyPatch.context() as patch:
        for name in steps:
            patch.setattr(InductorBackend, name, counted(getattr(InductorBackend, name)))
        dist.barrier()
        aotdist.compile(model, backend="inductor", settings={"cache_folder": folder})
        for ours, theirs in zip(_gradients(model, args), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    return made, str(aotdist.explain(model))


def _gradients(model: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> list[Any]:
    model(*args).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def each_its_own(folder: str) -> dict[str, str]:
    """Whether a rank compiled each program or took it from the cache; its results are close to eager's.

    Rank 0 comes first with the program that does not communicate: the other one would find what it left.
    """
    rank, found = dist.get_rank(), dict[str, str]()
    found["a group"] = _found_by(of_a_group(rank), folder)
    with inductor_config(bucket_all_gathers_fx="all"):
        found["merged gathers"] = _found_by(gathering_twice, folder)
    for turn in range(dist.get_world_size()):
        if turn == rank:
            found["a tensor"] = _found_by(OF_A_RANK["a tensor"](rank), folder)
        dist.barrier()
    return found


def _found_by(program: Program, folder: str) -> str:
    compiled = aotdist.compile(program, backend="inductor", settings={"cache_folder": folder})
    x = torch.arange(12.0).reshape(4, 3) + dist.get_rank()
    torch.testing.assert_close(compiled(x), program(x))
    return "found" if "from the compile cache" in str(aotdist.explain(compiled)) else "compiled"
