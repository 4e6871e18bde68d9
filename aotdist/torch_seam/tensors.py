"""Tensors: storages, version counters, hooks, marked dimensions."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import copyreg
import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

# One C++ check for the metadata of many tensors.
from torch._C._dynamo.guards import TensorGuards as TensorGuards
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

# A weak reference to a storage: whether anybody holds the memory, without holding it.
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef

from aotdist.torch_seam.autograd import backward_task
from aotdist.torch_seam.patches import replaced_here


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
    """Mark a tensor so that `isinstance(tensor, nn.Parameter)` holds: it replaces a parameter; returns it."""
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


def is_zero_tensor(value: object) -> bool:
    """Whether a value is a view of an efficient zero tensor, which formulas of autograd make (`sgn`).

    PyTorch makes views of these by kernels above all modes, so no trace sees them.
    """
    return type(value) is torch.Tensor and value._is_zerotensor()


def seen_by_modes(values: Sequence[Any] | None) -> Any:
    """`values`, with views of efficient zero tensors replaced by new ones, which modes do see."""
    return values and tuple(
        torch._efficientzerotensor(v.size(), dtype=v.dtype, device=v.device) if is_zero_tensor(v) else v
        for v in values
    )


preserved_version: Callable[[torch.Tensor], AbstractContextManager[None]] = _unsafe_preserve_version_counter
"""Lets writes inside of the context leave the version counter of `tensor` alone."""


def another_storage(memory: torch.Tensor) -> torch.UntypedStorage:
    """A storage over the same bytes, which it keeps alive, with a reference count of its own.

    By DLPack's capsules in 0.7 us; `torch.from_dlpack` also synchronises streams, and takes 15.
    """
    return torch._C._from_dlpack(torch._C._to_dlpack(memory)).untyped_storage()


copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""`copy_` for many tensors, in few launches on a GPU."""


def cutlass_word_places(words: torch.Tensor) -> torch.Tensor:
    """Where CUTLASS keeps each word of 2:4 metadata. Shapes: (R, W) int16 or int32 -> (R * W,) int64."""
    from torch.sparse._semi_structured_conversions import _calculate_meta_reordering_scatter_offsets

    rows, columns = words.shape
    return _calculate_meta_reordering_scatter_offsets(rows, columns, words.dtype, words.device)


def intercept_swaps(callback: Callable[[torch.Tensor, torch.Tensor], None]) -> AbstractContextManager[None]:
    """In this context and thread, `torch.utils.swap_tensors` calls `callback` in place of its last step.

    The last step exchanges the two C++ tensors. By then the checks are done, and the Python state of the two
    has been exchanged.
    """
    return replaced_here(torch._C, "_swap_tensor_impl", lambda _, first, second: callback(first, second))


_swap_bodies = torch._C._swap_tensor_impl


def swap_attributes(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange the Python state of two tensors: class, attributes, slots."""
    slots = copyreg._slotnames(type(first))
    held = [{name: getattr(t, name) for name in slots if hasattr(t, name)} for t in (first, second)]
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    for tensor, before, now in ((first, *held), (second, *reversed(held))):
        for name in before:
            delattr(tensor, name)
        for name, value in now.items():
            setattr(tensor, name, value)


def swap_histories(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange the autograd state (history, base, views) of two tensors that are equal in all else."""
    _swap_bodies(first, second)


hooks_of_gradient: Callable[[torch.Tensor], Any] = operator.attrgetter("_backward_hooks")
"""What `register_hook` registered, if anything."""
hooks_after_accumulation: Callable[[torch.Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
"""What `register_post_accumulate_grad_hook` registered, if anything."""


def with_hooks(positions: Iterable[int], tensors: Sequence[Any]) -> list[int]:
    """Those of the positions whose tensors have hooks of either kind; 0.06 us for each tensor."""
    if not any(map(hooks_of_gradient, tensors)) and not any(map(hooks_after_accumulation, tensors)):
        return []
    return [k for k in positions if tensors[k]._backward_hooks or tensors[k]._post_accumulate_grad_hooks]


def set_hooks_of_gradient(leaf: torch.Tensor, hooks: Any) -> None:
    """Set the hooks of a leaf's gradient to what `hooks_of_gradient` returned, or to none."""
    leaf._backward_hooks = hooks


def has_grad_hooks(param: torch.Tensor) -> bool:
    """Whether a leaf has hooks of its gradient, called before or after it is accumulated."""
    return bool(param._backward_hooks) or bool(getattr(param, "_post_accumulate_grad_hooks", None))


def gradients_heard(hook: Callable[..., Any]) -> int | None:
    """How many gradients a hook of `register_multi_grad_hook` has got in the running backward.

    None for any other hook. The hooks that one such registration makes count together.
    """
    waits = "register_multi_grad_hook.<locals>.get_inner_hook.<locals>"
    if not getattr(hook, "__qualname__", "").startswith(waits):
        return None
    return inspect.getclosurevars(hook).nonlocals["count"].get(backward_task(), 0)


def hooks_of(tensor: torch.Tensor) -> Mapping[int, Callable[..., Any]]:
    """The dictionary of hooks of a tensor with history, to which `register_hook` will add others.

    It does not keep the tensor alive. If there is none yet, it is made as `register_hook` makes it.
    """
    if tensor.grad_fn is not None and tensor._backward_hooks is None:
        set_hooks(tensor, OrderedDict())
    hooks: Any = tensor._backward_hooks
    return hooks


def set_hooks(tensor: torch.Tensor, hooks: OrderedDict[int, Callable[..., Any]]) -> None:
    """Make `hooks` the dictionary to which `register_hook` of a tensor with history adds."""
    node = tensor.grad_fn  # that of a view whose base was written is made now, which forgets hooks
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)  # type: ignore[union-attr]
