"""The ways to spread a model over ranks: FSDP2, tensor parallelism, both.

What to split is told by transformers' own plan where a family has one (`base_model_tp_plan`), and by one of
ours in the same words where it has none; the words become styles of `parallelize_module`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from benchmarks.zoo.families import blocks
from benchmarks.zoo.vocabulary import Layout

_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "*.attn": "local_split_size",
        "*.attn.c_attn": "packed_colwise",
        "*.attn.c_proj": "rowwise",
        "*.mlp.c_fc": "colwise",
        "*.mlp.c_proj": "rowwise",
    },
    "vit": {
        "*.q_proj": "colwise",
        "*.k_proj": "colwise",
        "*.v_proj": "colwise",
        "*.o_proj": "rowwise",
        "*.fc1": "colwise",
        "*.fc2": "rowwise",
    },
    "t5": {
        "*Attention": "local_num_heads",
        "*Attention.q": "colwise",
        "*Attention.k": "colwise",
        "*Attention.v": "colwise",
        "*Attention.o": "rowwise",
        "*.relative_attention_bias": "colwise",
        "*.wi": "colwise",
        "*.wo": "rowwise",
    },
}
"""For families without a plan of their own. Output heads that are tied to the embedding stay whole."""


def mesh_of(layout: Layout) -> DeviceMesh:
    """All ranks, on axes `dp` and `tp`."""
    shape = {"FSDP2": (2, 1), "TP": (1, 2), "2-D": (2, 2)}[layout]
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def spread(model: PreTrainedModel, layout: Layout, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Split `model` in place.

    Args:
        model: whole, the same on every rank.
        layout: how to split it.
        mesh: axes `dp` and `tp`.
        dtype: what to compute in, if it is not the parameters' own: under FSDP2 by its policy, else by
            conversion.
    """
    if layout == "TP" and dtype is not None:
        nn.Module.to(model, dtype)
    if layout != "FSDP2":
        _split_matrices(model, mesh["tp"])
    if layout != "TP":
        _shard(model, mesh["dp"], dtype)


def _shard(model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Every block a unit, the rest the root's; gradients are reduced in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _split_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    for path, style in _plan(model):
        module = model.get_submodule(path)
        parallelize_module(module, mesh, _STYLES[style](module))


def _plan(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Paths of modules, and the word for what is done to each."""
    theirs: Mapping[str, str] | None = model._tp_plan  # pyright: ignore[reportPrivateUsage]
    patterns = theirs or _PLANS[model.config.model_type]
    for path, _ in model.named_modules():
        for pattern, word in patterns.items():
            if fnmatchcase(path, pattern):
                yield path, word
                break


class _Conv1D(ParallelStyle):
    """GPT2's linear layer, whose weight lies transposed: split by output or by input features."""

    def __init__(self, out: bool) -> None:
        super().__init__()
        self._out = out

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight, bias = (Shard(1), Shard(0)) if self._out else (Shard(0), Replicate())
        features, sums = (Replicate(), Shard(-1)) if self._out else (Shard(-1), Replicate())

        def partition(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            _distribute(part, mesh, weight=weight, bias=bias)

        def take(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [features], run_check=False)

        def give(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.redistribute(placements=[sums]).to_local()

        return distribute_module(module, device_mesh, partition, take, give)


class _Experts(ParallelStyle):
    """Mixtral's experts: each rank has a part of every expert, and the parts' results are added up.

    The kernels see plain tensors, whose gradients are parts of a sum.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _interleave(module, "gate_up_proj", 1, 2, device_mesh.size())
        _distribute(module, device_mesh, gate_up_proj=Shard(1), down_proj=Shard(2))
        whole: Callable[..., Tensor] = module.forward

        def forward(hidden: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
            with _local_parameters(module):
                part = whole(
                    _to_every_part(hidden, device_mesh), choice, _to_every_part(weights, device_mesh)
                )
            sums = DTensor.from_local(part, device_mesh, [Partial()], run_check=False)
            return sums.redistribute(placements=[Replicate()]).to_local()

        module.forward = forward
        return module


def _to_every_part(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """`value`, which every rank uses a part of a layer on: its gradient is the sum over the ranks."""
    whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


@contextmanager
def _local_parameters(module: nn.Module) -> Generator[None]:
    """Plain tensors in the place of a module's DTensors."""
    registered: dict[str, Any] = module._parameters  # pyright: ignore[reportPrivateUsage]
    held = dict(registered)
    registered.update({name: value.to_local() for name, value in held.items()})
    try:
        yield
    finally:
        registered.update(held)


class _Packed(ParallelStyle):
    """Query, key and value in one linear layer: each rank has its heads of all three.

    Each rank's columns are laid side by side before they are split: the layer computes what it did.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        of_conv = isinstance(module, Conv1D)
        _interleave(module, "weight", 1 if of_conv else 0, 3, device_mesh.size())
        _interleave(module, "bias", 0, 3, device_mesh.size())
        return parallelize_module(module, device_mesh, _colwise(module))


class _Divided(ParallelStyle):
    """A number that a module keeps of itself, and that each rank has a part of."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        setattr(module, self._name, getattr(module, self._name) // device_mesh.size())
        return module


def _interleave(module: nn.Module, name: str, dim: int, num_packed: int, num_ranks: int) -> None:
    """Reorder a parameter of packed matrices so that an even split gives each rank its part of every one."""
    parameter = module.get_parameter(name)
    with torch.no_grad():
        packed = parameter.unflatten(dim, (num_packed, num_ranks, -1))
        parameter.copy_(packed.transpose(dim, dim + 1).flatten(dim, dim + 2).clone())


def _distribute(module: nn.Module, mesh: DeviceMesh, **placements: Shard | Replicate) -> None:
    for name, placement in placements.items():
        parameter = nn.Parameter(distribute_tensor(module.get_parameter(name), mesh, [placement]))
        module.register_parameter(name, parameter)


def _colwise(module: nn.Module) -> ParallelStyle:
    return _Conv1D(out=True) if isinstance(module, Conv1D) else ColwiseParallel()


def _rowwise(module: nn.Module) -> ParallelStyle:
    return _Conv1D(out=False) if isinstance(module, Conv1D) else RowwiseParallel()


_STYLES: Mapping[str, Callable[[nn.Module], ParallelStyle]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "embedding_rowwise": lambda _: RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": lambda _: ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda _: SequenceParallel(sequence_dim=2, use_local_output=True),
    "moe_tp_experts": lambda _: _Experts(),
    "packed_colwise": lambda _: _Packed(),
    "local_split_size": lambda _: _Divided("split_size"),
    "local_num_heads": lambda _: _Divided("n_heads"),
}
"""The words of a plan. A norm of each head, Qwen3's, is split as a sequence is: along the heads."""
