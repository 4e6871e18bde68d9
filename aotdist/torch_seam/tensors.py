"""Tensors: storages, version counters, marked dimensions."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

# One C++ check for the metadata of many tensors.
from torch._C._dynamo.guards import TensorGuards as TensorGuards
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

# A weak reference to a storage: whether anybody holds the memory, without holding it.
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly when they share their storage."""
    return tensor.untyped_storage()._cdata


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Set the version counter of each tensor; 0.2 us, and 0.06 for each."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


def counter_of(wrapper: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the version counter of a wrapper, without its inner tensors; 3.5 us.

    The wrapper's `__torch_dispatch__` is not called: `detach` itself would take 130 us for a `TwoTensor`.
    """
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        return wrapper.detach()


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, for which `isinstance(_, nn.Parameter)` holds: it stands for a parameter."""
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor


def marked_dims(tensor: torch.Tensor) -> frozenset[int]:
    """Dimensions that `mark_dims`, or PyTorch's `mark_dynamic`, was called for."""
    return frozenset(getattr(tensor, "_dynamo_dynamic_indices", ()))


def mark_dims(tensor: torch.Tensor, dims: Collection[int]) -> None:
    """Mark dimensions of a tensor where PyTorch's own front end looks for marks too."""
    vars(tensor)["_dynamo_dynamic_indices"] = {*marked_dims(tensor), *dims}


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside of the wrappers of `torch.func` transforms, if there are any."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_unheard(value: object) -> bool:
    """Whether a value is a view of an efficient zero tensor, which formulas of autograd make (`sgn`).

    PyTorch makes views of these by kernels above all modes, so that no trace hears of them.
    """
    return type(value) is torch.Tensor and value._is_zerotensor()


def seen_by_modes(values: Sequence[Any] | None) -> Any:
    """`values`, where those that are unheard are replaced by zeros that modes hear of."""
    return values and tuple(
        torch._efficientzerotensor(v.size(), dtype=v.dtype, device=v.device) if is_unheard(v) else v
        for v in values
    )


def preserved_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Lets writes inside of the context leave the version counter of `tensor` alone."""
    return _unsafe_preserve_version_counter(tensor)


def another_storage(memory: torch.Tensor) -> torch.UntypedStorage:
    """A storage over the same bytes, which it keeps alive, with a reference count of its own.

    By DLPack's capsules in 0.7 us; `torch.from_dlpack` also synchronises streams, and takes 15.
    """
    return torch._C._from_dlpack(torch._C._to_dlpack(memory)).untyped_storage()


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """`copy_` for many tensors, in few launches on a GPU."""
    torch._foreach_copy_(targets, sources)
