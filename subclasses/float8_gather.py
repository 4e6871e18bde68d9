"""Weights that FSDP2 gathers in 8 bits: a quarter of the bytes of fp32, half of those of bf16.

A `Float8GatherWeight` has its full precision for the optimizer and for checkpoints. FSDP2's all-gather
extension (`fsdp_pre_all_gather`, `fsdp_post_all_gather`) casts it, shard by shard, and the module multiplies
with a Float8Tensor. The collective carries uint8, since not every backend of `torch.distributed` knows 8-bit
floats (gloo does not).

All shards of a weight need the same scale. When a weight has changed, `WeightScales` computes the scales of
all weights at once, with one reduction over each mesh axis that they are sharded over::

    shard ─ abs ─ amax ┐
    shard ─ abs ─ amax ┼─ stack ─ all_reduce(max) ─ scales        once after an optimizer step
    ...                ┘
    shard ─ / scale ─ to float8 ─ view(uint8) ─ all_gather ─ view(float8) ─► Float8Tensor     each gather

Source: torchao's `precompute_float8_dynamic_scale_for_fsdp`, which is called by hand after each step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.float8_tensor import E4M3, Float8Tensor, amax_of, on_local, quantise, scale_for
from aotdist.subclasses.protocol import is_real
from aotdist.torch_seam.dtensor import local_part, local_tensor, make_dtensor, retyped_spec
from aotdist.torch_seam.operators import writes_arguments, written_by
from aotdist.torch_seam.trees import pytree

aten = torch.ops.aten


class Float8GatherWeight(torch.Tensor):
    """A weight, or FSDP2's shard of one, that is gathered in 8 bits.

    Operators run on the weight itself and return plain tensors, but for those that FSDP2 shards it with.

    Args:
        weight: (out_features, in_features), of 16 or 32 bits.
        scale: fp32 scalar, see `WeightScales`; all shards and views of a weight share one object.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    scales: WeightScales

    @staticmethod
    def __new__(
        cls: type[Float8GatherWeight], weight: torch.Tensor, scale: torch.Tensor, scales: WeightScales
    ) -> Float8GatherWeight:
        """A wrapper laid out like `weight`."""
        tensor: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            weight.size(),
            strides=weight.stride(),
            storage_offset=weight.storage_offset(),
            dtype=weight.dtype,
            device=weight.device,
        )
        tensor.weight, tensor.scale, tensor.scales = weight, scale, scales
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Float8GatherWeight({self.weight!r}, scale={self.scale!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The names of the plain tensors, and the context."""
        return ["weight", "scale"], self.scales

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: Any, size: torch.Size, stride: tuple[int, ...]
    ) -> Float8GatherWeight:
        """The inverse of `__tensor_flatten__`."""
        return Float8GatherWeight(inner["weight"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func` on the weights themselves."""
        kwargs = kwargs or {}
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        written = [t.weight for t in written_by(func, args, kwargs) if isinstance(t, cls) and is_real(t)]
        bare_args, bare_kwargs = pytree.tree_map_only(cls, lambda t: t.weight, (args, kwargs))
        with _counted(written):
            result = func(*bare_args, **bare_kwargs)
        if writes_arguments(func):
            return args[0] if isinstance(args[0], torch.Tensor) else result
        if func not in _CUTS or (func is aten._to_copy.default and result.dtype != first.dtype):
            return result
        scale = first.scale.to(result[0].device if isinstance(result, list | tuple) else result.device)
        return pytree.tree_map_only(
            torch.Tensor, lambda t: Float8GatherWeight(t, scale, first.scales), result
        )

    def prepare_gather(self) -> None:
        """Update the scale, before a compiled call reads it."""
        self.scales.prepare(self)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], tuple[torch.Tensor]]:
        """The tensors that FSDP2 gathers, and what it passes to `fsdp_post_all_gather`.

        Shapes: this rank's rows -> uint8, padded to as many rows as every rank brings; the scale.

        Raises:
            UnsupportedProgram: the weight is sharded by columns.
        """
        if self.size(1) != outer_size[1]:
            raise UnsupportedProgram(
                "a weight that is gathered in float8 is sharded on dimension 1",
                fix="shard it on dimension 0 (`shard_placement_fn`), or leave out `float8_all_gather`",
            )
        if is_real(self):  # a stand-in's scale is an argument of the program
            self.prepare_gather()
        missing = -(-outer_size[0] // mesh.size()) - self.size(0)
        float8 = quantise(self.weight, self.scale, E4M3).view(torch.uint8)
        # A copy of the scale, which the next optimizer step changes.
        return (nn.functional.pad(float8, (0, 0, 0, missing)),), (self.scale.clone(),)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: tuple[torch.Tensor],
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The weight around the memory that FSDP2 gathered into; `out`, if given, wraps it already."""
        (gathered,), (scale,) = all_gather_outputs, metadata
        if out is None:
            return Float8Tensor(gathered.view(E4M3), scale, param_dtype), (gathered,)
        local: Any = local_part(out)
        local.scale = scale
        return None


_CUTS = frozenset(
    {
        aten._to_copy.default,
        aten.alias.default,
        aten.as_strided.default,
        aten.clone.default,
        aten.detach.default,
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.view.default,
    }
)
"""Operators whose results FSDP2, `distribute_tensor`, autograd and `Module.to` expect in the same class."""


@contextmanager
def _counted(written: Sequence[torch.Tensor]) -> Generator[None]:
    """Let version counters count the writes inside, also those of fused optimizers (torch 2.13 does not)."""
    before = [weight._version for weight in written]
    yield
    for weight, version in zip(written, before, strict=True):
        if weight._version == version:
            torch.autograd.graph.increment_version(weight)


class WeightScales:
    """The scales of all weights that one call of `to_float8` has converted.

    A weight has changed if its version counter did, or that of the tensor inside. After a write that no
    counter shows (`param.data.copy_`), call `refresh`.
    """

    def __init__(self) -> None:
        self._linears: list[nn.Linear] = []
        self._params: dict[nn.Linear, Any] = {}
        self._seen: dict[int, tuple[Any, int]] = {}
        """The parameter and its version at the latest pass, by the `id` of its local tensor."""

    def gathered_weight(self, linear: nn.Linear) -> nn.Parameter:
        """The weight of `linear` as one that is gathered in 8 bits; the layer is to have it from now on."""
        weight = linear.weight
        scale = scale_for(amax_of(weight), E4M3)
        wrapped = on_local(lambda part: Float8GatherWeight(part, scale, self), weight.detach())
        self._linears.append(linear)
        return nn.Parameter(wrapped, requires_grad=weight.requires_grad)

    def prepare(self, shard: Float8GatherWeight) -> None:
        """Recompute all scales if this weight has changed; it changes on all ranks or on none."""
        param, version = self._seen.get(id(shard), (None, None))
        if param is None or _version(param) != version:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute all scales; a collective."""
        # Modules whose weight FSDP2 has gathered do not hold their shard: it is known from before.
        self._params |= {linear: linear.weight for linear in self._linears if _is_sharded(linear.weight)}
        for groups, together in _by_groups(self._params.values()).items():
            _refresh(groups, together)
        params = self._params.values()
        self._seen = {id(local_tensor(param)): (param, _version(param)) for param in params}


def _is_sharded(param: Any) -> bool:
    return isinstance(param, DTensor) and isinstance(local_tensor(param), Float8GatherWeight)


def _version(param: Any) -> int:
    local: Any = local_tensor(param)
    return param._version + local._version + local.weight._version


def _by_groups(params: Iterable[Any]) -> dict[tuple[dist.ProcessGroup, ...], list[Any]]:
    """Parameters by the process groups that they are sharded over."""
    found: dict[tuple[dist.ProcessGroup, ...], list[Any]] = {}
    for param in params:
        sharded = [axis for axis, placement in enumerate(param.placements) if not placement.is_replicate()]
        groups = tuple(param.device_mesh.get_group(axis) for axis in sharded)
        found.setdefault(groups, []).append(param)
    return found


def _refresh(groups: tuple[dist.ProcessGroup, ...], params: Sequence[Any]) -> None:
    """Recompute the scales of parameters that are sharded over the same groups."""
    weights: list[Any] = [local_tensor(param) for param in params]
    amaxes = torch.stack([amax_of(weight.weight) for weight in weights])
    for group in groups:
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group)
    for weight, scale in zip(weights, scale_for(amaxes, E4M3).unbind(), strict=True):
        weight.scale.copy_(scale)


def precise_weight(weight: Any) -> torch.Tensor:
    """The weight inside of a `Float8GatherWeight`, for checkpoints; other weights as they are."""
    if isinstance(weight, Float8GatherWeight):
        return weight.weight
    if isinstance(weight, DTensor) and isinstance(local := local_tensor(weight), Float8GatherWeight):
        return make_dtensor(local.weight, retyped_spec(weight, local.dtype))
    return weight
