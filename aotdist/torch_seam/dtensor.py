"""DTensor: specs, layouts, and what its dispatch keeps."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from aotdist.torch_seam.modes import no_modes, torch_functions_off
from aotdist.torch_seam.patches import all_replaced_here, replaced_here
from aotdist.torch_seam.symbols import SYMBOLIC
from aotdist.torch_seam.trees import pytree


def dtensor_spec(context: Any, mesh: DeviceMesh | None, size: torch.Size, stride: tuple[int, ...]) -> Any:
    """The spec that `DTensor.__tensor_unflatten__` makes, once instead of at every call.

    Before torch 2.13 the flatten context is `(spec, requires_grad)`; then it is spelled out, and the mesh is
    an attribute of its own.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    if mesh is None:
        old, _ = context
        metadata = TensorMeta(shape=size, stride=stride, dtype=old.tensor_meta.dtype)
        return DTensorSpec(old.mesh, old.placements, tensor_meta=metadata)
    placements, tensor_meta, shard_order, _ = context
    metadata = TensorMeta(shape=size, stride=stride, dtype=tensor_meta.dtype)
    # An order beside strided shards (views make such) says that these are no order; the context forgets that.
    options: dict[str, Any] = {"shard_order": shard_order}
    flag = "use_strided_shard_as_shard_order"
    if shard_order is not None and flag in DTensorSpec.__dataclass_fields__:
        options[flag] = False
    return DTensorSpec(mesh, placements, tensor_meta=metadata, **options)


def with_placements(context: Any, placements: tuple[Any, ...]) -> Any:
    """The flatten context of a DTensor with other placements."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    first, *rest = context
    if isinstance(first, DTensorSpec):
        return (DTensorSpec(first.mesh, placements, tensor_meta=first.tensor_meta), *rest)
    return (placements, *rest)


def retyped_spec(tensor: DTensor, dtype: torch.dtype) -> Any:
    """The spec of a DTensor placed like `tensor`, of another dtype."""
    return spec_of_dtype(tensor._spec, dtype)


def spec_of_dtype(spec: Any, dtype: torch.dtype) -> Any:
    """A spec of the same placements, for another dtype."""
    if spec.tensor_meta.dtype == dtype:
        return spec
    return dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))


def spec_summed_later(spec: Any, axes: frozenset[int]) -> Any:
    """A spec of the same placements, but for sums over `axes` of the mesh that are still to be taken."""
    placements = (Partial() if axis in axes else placed for axis, placed in enumerate(spec.placements))
    return dataclasses.replace(spec, placements=tuple(placements)) if axes else spec


def make_dtensor(local: torch.Tensor, spec: Any, *, requires_grad: bool = False) -> torch.Tensor:
    """A DTensor without history, without the decorated constructor: 1.1 us instead of 2.4."""
    return torch.Tensor._dtensor__new__(DTensor, local, spec, requires_grad=requires_grad)


_DISPATCHER: Any = DTensor._op_dispatcher


_OWN_HANDLERS = _DISPATCHER._custom_op_handlers


_NUM_OWN_HANDLERS = len(_OWN_HANDLERS)


def dtensor_dispatch() -> Hashable:
    """What contexts (`loss_parallel`, `context_parallel`, `implicit_replication`) make of DTensors.

    About 0.1 us where there is none.
    """
    handlers, implicit = _DISPATCHER._custom_op_handlers, _DISPATCHER._allow_implicit_replication
    if handlers is _OWN_HANDLERS and len(handlers) == _NUM_OWN_HANDLERS:
        return implicit
    return implicit, tuple(handlers.items()), _context_parallel_options()


def _context_parallel_options() -> Hashable:
    """How `context_parallel` goes round the ring, and over which mesh."""
    ring = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if ring is None:
        return None
    attention = torch.nn.functional.scaled_dot_product_attention
    patched = inspect.getclosurevars(attention).nonlocals if inspect.isfunction(attention) else {}
    return patched.get("device_mesh"), *dataclasses.astuple(ring._cp_options)


@contextmanager
def dtensor_traced() -> Generator[None]:
    """Around a trace through operators on DTensors, which keep things, and compute, besides the program."""
    with _handlers_kept(), _masks_apart(), _shards_measured_aside():
        yield


@contextmanager
def _handlers_kept() -> Generator[None]:
    """The table of handlers is that of before when the trace is over, however it ends.

    What `loss_parallel` puts there for the backward stays until then: where a program enters it for the
    forward, the backward is to run inside of it too, says its documentation.
    """
    from torch.distributed.tensor.parallel import loss

    handlers = _DISPATCHER._custom_op_handlers
    before = dict(handlers)

    def disable_for_forward(disable: Callable[[], None]) -> None:
        kept = {op: handlers[op] for op in loss.customized_loss_ops if "backward" in op.name()}
        disable()
        handlers.update(kept)

    try:
        with replaced_here(loss, "_disable_custom_loss_ops", disable_for_forward):
            yield
    finally:
        _DISPATCHER._custom_op_handlers = handlers
        handlers.clear()
        handlers.update(before)


@contextmanager
def _masks_apart() -> Generator[None]:
    """Placements remember which rows of a sharded vocabulary are whose; a trace's do so for itself alone."""
    from torch.distributed.tensor.placement_types import _MaskPartial

    before: dict[int, tuple[Any, Any, int]] = {}
    buffer_class = type(_MaskPartial().mask_buffer)

    def materialize_apart(materialize: Callable[..., None], buffer: Any, mask: torch.Tensor) -> None:
        if id(buffer) not in before:
            before[id(buffer)] = buffer, buffer.data, buffer.refcount
            buffer.data, buffer.refcount = None, 0
        materialize(buffer, mask)

    try:
        with replaced_here(buffer_class, "materialize_mask", materialize_apart):
            yield
    finally:
        for buffer, data, refcount in before.values():
            buffer.data, buffer.refcount = data, refcount


def _shards_measured_aside() -> AbstractContextManager[None]:
    """Sizes and offsets of shards are found, with small tensors of numbers, as if nothing was traced."""
    from torch.distributed.tensor import _utils
    from torch.distributed.tensor.placement_types import _StridedShard

    def measured(measure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(number, SYMBOLIC) for number in pytree.tree_leaves((args, kwargs))):
            return measure(*args, **kwargs)
        with no_modes(), torch_functions_off():
            return measure(*args, **kwargs)

    return all_replaced_here(
        (_utils, "_compute_local_shape_and_global_offset", measured),
        (_StridedShard, "local_shard_size_and_offset", measured),
    )


def masks_rows(placement: Any) -> bool:
    """Whether the summands of a partial sum are still to be masked by who has the rows of a vocabulary."""
    from torch.distributed.tensor.placement_types import _MaskPartial

    return isinstance(placement, _MaskPartial)


def finished(tensor: DTensor) -> DTensor:
    """The same, around a plain tensor where it was around one whose collective still runs."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local = tensor._local_tensor
    if not isinstance(local, AsyncCollectiveTensor) or tensor.requires_grad:
        return tensor
    return make_dtensor(local.wait(), tensor._spec)  # type: ignore[return-value]


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, without a node in its autograd history (`to_local` makes one)."""
    return tensor._local_tensor


def local_part(tensor: Any) -> Any:
    """What this rank holds of a DTensor; any other tensor itself."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def forget_shardings() -> None:
    """Meshes of other ranks are equal, and so DTensor would find the sizes of another rank's shards."""
    _DISPATCHER.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def mesh_of_context(context: Any) -> DeviceMesh | None:
    """The mesh in the flatten context of a DTensor, before torch 2.13; since then it is an attribute."""
    first = context[0] if isinstance(context, tuple) and context else None
    return getattr(first, "mesh", None)


def parts_of_mesh(mesh: DeviceMesh) -> list[DeviceMesh]:
    """The axes of a mesh of several, as meshes of their own, and the mesh that it is itself a part of."""
    axes = mesh.mesh_dim_names or ()
    parts = [mesh[axis] for axis in axes] if len(axes) > 1 else []
    root: DeviceMesh | None = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else None
    return parts if root is None or root is mesh else [*parts, root]


def layout_kinds() -> dict[str, tuple[type[Any], dict[str, Any]]]:
    """The classes that say how a DTensor is laid out, by name, each with the types of its parts."""
    from torch.distributed.tensor import Partial, Replicate, Shard, placement_types
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    fields = {
        "mesh": DeviceMesh,
        "placements": tuple[placement_types.Placement, ...],
        "tensor_meta": TensorMeta | None,
        "shard_order": Any,
    }
    kinds: dict[str, tuple[type[Any], dict[str, Any]]] = {
        "Shard": (Shard, {"dim": int}),
        "Replicate": (Replicate, {}),
        "Partial": (Partial, {"reduce_op": Literal["sum", "avg", "product", "min", "max"]}),
        "TensorMeta": (
            TensorMeta,
            {"shape": torch.Size, "stride": tuple[int, ...], "dtype": torch.dtype},
        ),
        "DTensorSpec": (
            DTensorSpec,
            {name: hint for name, hint in fields.items() if name in DTensorSpec.__dataclass_fields__},
        ),
    }
    strided = getattr(placement_types, "_StridedShard", None)
    if strided is not None:
        kinds["_StridedShard"] = (strided, {"dim": int, "split_factor": int})
    try:
        from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
    except ImportError:  # not in every torch has a spec an order of its own
        return kinds
    return kinds | {"ShardOrderEntry": (ShardOrderEntry, {"tensor_dim": int, "mesh_dims": tuple[int, ...]})}


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    """Give `mesh` the product of some of its axes as one more, so that DTensor reduces over them at once."""
    mesh[axes]._flatten("_".join(axes))
