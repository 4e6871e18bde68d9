"""FSDP2 and DDP: what they know of a module."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from aotdist.torch_seam.trees import pytree


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], container: Any) -> Any:
    """`fn` on every tensor that FSDP2 finds in a container: dataclasses, packed sequences too."""
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(fn, container)


def replace_differentiable(
    container: Any, replace: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
) -> Any:
    """`container` with others in the place of the tensors in it that require grad, as FSDP2 finds them.

    Before torch 2.13 it finds them where pytrees do.
    """
    try:
        from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors
    except ImportError:
        leaves, spec = pytree.tree_flatten(container)
        found = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        others = iter(replace(tuple(itertools.compress(leaves, found))))
        mixed = [next(others) if is_one else leaf for leaf, is_one in zip(leaves, found, strict=True)]
        return pytree.tree_unflatten(mixed, spec)
    return replace_grad_tensors(container, iter(replace(collect_grad_tensors(container))))


def to_device(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A root's arguments on `device`, moved by the same rules as FSDP2 and DDP move them."""
    from torch.distributed.utils import _to_kwargs

    moved_args, moved_kwargs = _to_kwargs(args, kwargs, device, False)
    return moved_args[0], moved_kwargs[0]


def fsdp_divide_factors(*args: Any) -> tuple[float | None, float | None, Any, Any]:
    """FSDP2's own choice: divide before, divide after, operation of the reduce-scatter, of the all-reduce."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    return _get_gradient_divide_factors(*args)


def fsdp_default_comms() -> tuple[type[Any], type[Any]]:
    """The classes of FSDP2's own all-gather and reduce-scatter; any other was set by the user."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    return DefaultAllGather, DefaultReduceScatter


def fsdp_groups(state: Any) -> list[Any]:
    """The parameter groups of an FSDP state; torch 2.11 has one at most, under another name."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def fsdp_unsharded_spec(record: Any) -> Any | None:
    """The DTensor spec that a module's whole parameter has, if any; torch 2.11 calls it the TP spec.

    Those that `spmd_types` annotates (torch 2.14) are plain in the module, and DTensors to the optimizer.
    """
    if getattr(record, "is_spmd_types", False):
        return None
    return getattr(record, "_unsharded_dtensor_spec", None) or getattr(record, "_tp_spec", None)


def fsdp_data_axes(record: Any) -> frozenset[int]:
    """The axes of a parameter's own mesh that FSDP2 shards and reduces over (`dp_mesh_dims`), if any."""
    return getattr(record, "_dp_dim_indices", frozenset())


def fsdp_state(module: Any) -> Any:
    """What FSDP2 knows of a module that `fully_shard` was given."""
    return module._get_fsdp_state()


def is_fsdp_hook(hook: Any) -> bool:
    """Whether a module's hook is one that `fully_shard` registered; they are methods of its state."""
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")


def reduces_plainly(ddp: Any) -> bool:
    """Whether DDP's reducer averages gradients and does nothing else: no hooks, no `join()`."""
    return not (
        ddp._comm_hooks
        or ddp._delay_all_reduce_params
        or ddp._join_config.enable
        or ddp._use_python_reducer
        or ddp._get_ddp_logging_data().get("comm_hook")
    )
