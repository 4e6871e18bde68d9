"""Worlds of 64 and of 1,024 ranks, of which there is one: the group is PyTorch's fake one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import Node

import aotdist
from aotdist.launch.config import ModelOptions
from aotdist.launch.model import build_decoder
from aotdist.trace.blocks.functions import Functions
from tests.subclasses.llama_meshes import SEQUENCE, Llama, batch, shard_parameters, split_sequence

TP = 8


@contextmanager
def world_of(num_ranks: int) -> Generator[None]:
    """The first of so many ranks."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(num_ranks: int, *, tensor_parallel: bool) -> DeviceMesh:
    """Data parallel, and tensor parallel as far as that is asked for."""
    tp = TP if tensor_parallel else 1
    return init_device_mesh("cpu", (num_ranks // tp, tp), mesh_dim_names=("dp", "tp"))


def model_on(mesh: DeviceMesh, num_layers: int, *, checkpointed: bool = False) -> Llama:
    """A Llama, spread over the ranks."""
    model = Llama()
    options = ModelOptions(
        dim=32, num_layers=num_layers, num_heads=TP, num_kv_heads=TP, hidden_dim=32, tie_head=False
    )
    model.decoder = build_decoder(options, seq_len=SEQUENCE, seed=0)
    if mesh.size(1) > 1:
        split_sequence(model, mesh)
    blocks = model.decoder.blocks
    for number, block in enumerate(blocks if checkpointed else ()):
        blocks[number] = checkpoint_wrapper(block)
    shard_parameters(model, mesh)
    return model


def collectives_of_a_step(num_ranks: int, *, tensor_parallel: bool) -> Counter[str]:
    """Compile and run a step; what it would have communicated."""
    model = model_on(mesh_of(num_ranks, tensor_parallel=tensor_parallel), num_layers=2)
    aotdist.compile(model, backend="fx")
    model(*batch(0)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.placements == parameter.placements, name
    (graphs,) = model.graphs
    nodes = [node for half in ("forward", "backward") for node in graphs[half].graph.nodes]
    return Counter(node.target._opname for node in nodes if "_c10d_functional" in str(node.target))


@pytest.mark.parametrize("tensor_parallel", [False, True], ids=["FSDP2", "FSDP2 and TP"])
def test_capture(tensor_parallel: bool) -> None:
    """No other rank answers, and none is waited for; the step is the same however many there would be."""
    found = []
    for num_ranks in (64, 1024):
        with world_of(num_ranks):
            found.append(collectives_of_a_step(num_ranks, tensor_parallel=tensor_parallel))
    assert found[0] == found[1]
    assert found[0]["all_gather_into_tensor"] and found[0]["reduce_scatter_tensor"]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("tensor_parallel", [False, True], ids=["FSDP2", "FSDP2 and TP"])
def test_blocks_are_traced_once(tensor_parallel: bool, checkpointed: bool) -> None:
    """The graph is that of a trace of each block; `tests/trace/test_blocks.py` has models of one process.

    So are the chains around parameters, which hooks of units record outside of blocks.
    """
    copy = Functions._copied  # pyright: ignore[reportPrivateUsage]
    with world_of(64):
        mesh = mesh_of(64, tensor_parallel=tensor_parallel)
        once, each = (
            step_on(mesh, aotdist.Settings(instantiate=copies), checkpointed=checkpointed)
            for copies in (True, False)
        )
        with mock.patch.object(Functions, "_copied", autospec=True, side_effect=copy) as copying:
            step_on(mesh, aotdist.Settings())
    assert [*map(_shown, once.graphs[0]["joint"].graph.nodes)] == [
        *map(_shown, each.graphs[0]["joint"].graph.nodes)
    ]
    assert "traced once for equal blocks: `decoder.blocks.0` for 3 more" in str(once.explain())
    assert "traced once" not in str(each.explain())
    copied = Counter(call.args[1].steps[-1].node.meta["phase"] for call in copying.call_args_list)
    assert copied["forward"] > 30 and copied["backward"] > 30


def step_on(mesh: DeviceMesh, settings: aotdist.Settings, *, checkpointed: bool = False) -> Llama:
    """A model of five layers that was compiled, and has run forward and backward."""
    model = model_on(mesh, num_layers=5, checkpointed=checkpointed)
    aotdist.compile(model, backend="fx", settings=settings)
    model(*batch(0)).backward()
    return model


def _shown(node: Node) -> tuple[Any, ...]:
    origins = ("phase", "source", "module", "function", "seq_nr", "serial", "unit", "policy", "grad")
    return str(node), str(node.args), *(node.meta.get(name) for name in origins)
