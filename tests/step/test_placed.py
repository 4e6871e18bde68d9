"""Every whole step of this folder with its models sharded: FSDP2, tensor parallel, and both, for ten steps.

A step that eager cannot do with such a model is named here, and shown to fail there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.ranks.harness import World
from tests.step.test_trainers import PROGRAMS, MaskedAutoencoder
from tests.step.test_whole import STEPS, named, training
from tests.step.written import Build, compiled_beside_eager, placing

pytestmark = pytest.mark.ranks

FOREACH = {
    name: (lambda name=name: training(named(name, foreach=True)))
    for name in ("SGD", "Adam", "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
}
FUSED = {name: (lambda name=name: training(named(name, fused=True))) for name in ("SGD", "Adam", "Adagrad")}
BUILDS: dict[str, Build] = {
    **{name: build for name, (build, _) in STEPS.items()},
    **PROGRAMS,
    **{f"{name} foreach": build for name, build in FOREACH.items()},
    **{f"{name} fused": build for name, build in FUSED.items()},
}
KINDS = ("FSDP2", "TP", "2-D")


@functools.cache
def mesh_of(kind: str) -> DeviceMesh:
    if kind == "2-D":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp" if kind == "FSDP2" else "tp",))


def place(kind: str, model: nn.Module) -> None:
    mesh = mesh_of(kind)
    if kind != "FSDP2":
        split(model, mesh["tp"])
    if kind != "TP":
        shard(model, mesh["dp"])


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """A unit for each layer, and one for what is left; one for all, if layers share parameters."""
    are_tied = len(list(model.named_parameters())) < len(list(model.named_parameters(remove_duplicate=False)))
    for layer in () if are_tied else model.children():
        if any(True for _ in layer.parameters()):
            if isinstance(layer, nn.ModuleList):
                shard(layer, mesh)
            else:
                fully_shard(layer, mesh=mesh)
    if not isinstance(model, nn.ModuleList):
        fully_shard(model, mesh=mesh)


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Products and embeddings by their columns; norms and single parameters are on each rank."""
    for layer in model.modules():
        if type(layer) in (nn.Linear, nn.Embedding):
            rows, columns = (
                RowwiseParallel(input_layouts=Replicate()),
                ColwiseParallel(output_layouts=Replicate()),
            )
            parallelize_module(layer, mesh, rows if getattr(layer, "out_features", 0) == 1 else columns)
        elif type(layer).__name__.endswith(("LayerNorm", "RMSNorm")):
            distribute_module(layer, mesh, None, _given, _whole)  # type: ignore[arg-type]
        elif isinstance(layer, MaskedAutoencoder):
            token = distribute_tensor(layer.mask_token.data, mesh, [Replicate()])
            layer.mask_token = nn.Parameter(token)


def _given(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return tuple(DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in inputs)


def _whole(module: nn.Module, output: Any, mesh: DeviceMesh) -> torch.Tensor:
    return output.to_local()


def _data_rank(kind: str) -> int:
    """Ranks that a layer is split over share a batch."""
    return 0 if kind == "TP" else mesh_of(kind)["dp"].get_local_rank()


def beside_eager(kind: str, name: str) -> int:
    with placing(functools.partial(place, kind), _data_rank(kind)):
        return len(compiled_beside_eager(BUILDS[name], num_steps=10).graphs)


def fails_in_eager(kind: str, name: str) -> None:
    with placing(functools.partial(place, kind), _data_rank(kind)), pytest.raises(Exception):  # noqa: B017
        made = BUILDS[name]()
        for at in range(3):
            made.step(*made.batch(at))
            made.between(at)


BY_DTENSOR = frozenset({"Rprop", "Adafactor", "Rprop foreach", "SGD fused", "Adagrad fused"})
"""Optimizers for which DTensor has no operators."""
NOT_IN_EAGER: Mapping[str, frozenset[str]] = {
    "FSDP2": BY_DTENSOR
    | {
        "gradients by autograd.grad, assigned and returned",  # of shards, which the loss does not know
        "MAML, by functional_call",
        "WGAN-GP",  # what was gathered is freed before the second backward
    },
    "TP": BY_DTENSOR | {"GPT2"},  # it has layers of its own, which `split` leaves alone
    "2-D": BY_DTENSOR
    | {"gradients by autograd.grad, assigned and returned", "MAML, by functional_call", "GPT2"},
}


@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BUILDS)
def test_steps(request: pytest.FixtureRequest, name: str, kind: str) -> None:
    world: World = request.getfixturevalue("world4" if kind == "2-D" else "world2")
    world.run(fails_in_eager if name in NOT_IN_EAGER[kind] else beside_eager, kind, name)
