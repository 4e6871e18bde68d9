"""Shards any model with FSDP2, and the state of its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from aotdist.errors import UnsupportedProgram


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The submodules whose parameters are gathered together.

    These are the elements of the outermost `nn.ModuleList`s, or of a model that is an `nn.Sequential` itself.
    """
    return _elements(model) if isinstance(model, nn.Sequential) else _listed(model)


def _listed(module: nn.Module) -> list[nn.Module]:
    if not isinstance(module, nn.ModuleList):
        return [block for child in module.children() for block in _listed(child)]
    # Lists and dictionaries are never called, so FSDP2 would not gather for them: their elements are blocks.
    return [
        block
        for child in _elements(module)
        for block in (_listed(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child])
    ]


def _elements(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if next(child.parameters(), None) is not None]


def chosen(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The submodules that a predicate chooses, inner ones first."""
    return [module for module in reversed(list(model.modules())) if module is not model and is_block(module)]


def same_on_all_ranks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all ranks the parameters and buffers of rank 0."""
    for tensor in (*model.parameters(), *model.buffers()):
        shared = tensor.detach().to(mesh.device_type)
        dist.broadcast(shared, 0)
        tensor.detach().copy_(shared)


def shard(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    precision: MixedPrecisionPolicy,
    reshard_after_forward: bool,
) -> None:
    """Shard a model in place, and the state of its optimizers.

    Args:
        model: the whole model, equal on all ranks.
        optimizers: of its parameters (see `require_own`); their state (moments) is sharded like the
            parameters.
        blocks: submodules that are gathered one by one, inner ones first; the rest is gathered together.
        mesh: of one axis.
        precision: dtypes of gathered parameters and reduced gradients.
        reshard_after_forward: whether blocks free their gathered parameters until the backward.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    shards = dict(model.named_parameters())
    for optimizer in optimizers:
        _point_to(optimizer, {parameter: shards[name] for parameter, name in names.items()})


def require_own(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer of other parameters than the model's.

    Raises:
        UnsupportedProgram: naming the parameter.
    """
    own = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(group["params"]):
            if parameter not in own:
                raise UnsupportedProgram(
                    f"parameter {at} of group {number} of the {type(optimizer).__name__}, of size "
                    f"{list(parameter.shape)}, is not the model's",
                    stage="launch",
                    fix="make the optimizer of `model.parameters()`, and hand both to one `aotdist.prepare`",
                )


def _point_to(optimizer: Optimizer, shards: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [shards[parameter] for parameter in group["params"]]
    for parameter in cast("list[nn.Parameter]", [*optimizer.state]):
        state = optimizer.state.pop(parameter)
        shard = shards[parameter]
        optimizer.state[shard] = {key: _sharded_as(shard, value) for key, value in state.items()}


def _sharded_as(shard: Tensor, value: Any) -> Any:
    """State of a parameter, sharded like the parameter if it has the parameter's size."""
    if not isinstance(shard, DTensor) or not isinstance(value, Tensor) or value.shape != shard.shape:
        return value
    value = value.to(shard.device)
    return distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None)
