"""Views that count from the storage, and tensors that are moved in it, or to another.

The views are those of `as_strided`, and of `unfold` where it leaves elements out or repeats them.
Functionalisation writes through `as_strided` only if no other view precedes it, and through `unfold` only if
each element is shown once. So both are made as `as_strided` of the tensor that owns the memory.

A trace has only the part of an input's storage that the input shows. A program may read outside of that part
as long as nothing is written.

A functional tensor is a shell around the tensor that owns the memory, which the program and autograd hold.
Where the program moves a tensor (`set_`, `resize_`, `.data =`), the shell stays, and gets the content of
another shell, made by a view or by an allocation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from aotdist.aliasing.memory import by_stride, extent, extent_of, shows
from aotdist.errors import UnsupportedProgram
from aotdist.sizes import is_symbolic
from aotdist.torch_seam.functional import (
    FunctionalTensor,
    FunctionalTensorMode,
    data_writes,
    functional_storage_id,
    functional_value,
    is_functional_base,
    part_of,
    rebind,
    second_shell,
)
from aotdist.torch_seam.operators import OpOverload
from aotdist.trace.failures import refusal

_ATEN = torch.ops.aten
_AS_STRIDED = _ATEN.as_strided.default
_UNFOLD = _ATEN.unfold.default
_IN_PLACE: Mapping[Any, Callable[..., torch.Tensor]] = {
    _ATEN.t_.default: _ATEN.t.default,
    _ATEN.transpose_.default: _ATEN.transpose.int,
    _ATEN.unsqueeze_.default: _ATEN.unsqueeze.default,
    _ATEN.squeeze_.default: _ATEN.squeeze.default,
    _ATEN.squeeze_.dim: _ATEN.squeeze.dim,
    _ATEN.squeeze_.dims: _ATEN.squeeze.dims,
}
"""What makes the view that each of these makes in place."""


_Place: TypeAlias = tuple[Sequence[int], Sequence[int], int | None]
"""Size, stride and offset in the storage; None for the offset that a tensor has."""


class Strided:
    """Makes views that count from the storage, of the tensors that own memory, and moves tensors.

    Args:
        mode: the functionalisation mode.
    """

    def __init__(self, mode: FunctionalTensorMode) -> None:
        self._mode = mode
        self._owners: dict[int, tuple[FunctionalTensor, int]] = {}
        """By storage: the tensor that all others in it are views of, and at which element it begins."""
        self._inputs: set[int] = set()
        self._looked_around: set[int] = set()
        self._not_through_views: set[int] = set()
        self._larger_storages: set[int] = set()
        self.moves: Mapping[OpOverload, Callable[..., None]] = {
            _ATEN.set_.default: _set_to_nothing,
            _ATEN.set_.source_Tensor: _set_to,
            _ATEN.resize_.default: self._resize,
            _ATEN.resize_as_.default: self._resize_as,
        }
        """What moves a tensor in the place of each operator; called with the functionalisation mode on."""

    def lies_in(self, span: FunctionalTensor, part: FunctionalTensor, offset: int) -> None:
        """Note that `part`, which is a view of `span`, stands for a tensor that starts at `offset`.

        Args:
            span: the memory that inputs share.
            part: an input in it.
            offset: where the input starts in its storage, in elements.
        """
        self._owners[functional_storage_id(span)] = span, offset - int(part.storage_offset())

    def note_storage(self, plain: FunctionalTensor, *, of_input: bool, is_larger: bool) -> None:
        """Note of the storage of a plain tensor whether it is an input's, and larger than the tensor."""
        key = functional_storage_id(plain)
        self._inputs.update([key] if of_input else [])
        self._larger_storages.update([key] if is_larger else [])

    def note_owner(self, tensor: FunctionalTensor) -> None:
        """Note that a tensor of which a view is made owns its memory, if it does."""
        key = functional_storage_id(tensor)
        if key not in self._owners and is_functional_base(tensor):
            with self._mode:
                self._owners[key] = second_shell(tensor), 0

    def instead(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[], torch.Tensor] | None:
        """What makes a view; None for views that PyTorch's mode makes right."""
        if func in _IN_PLACE and not is_symbolic((tuple(args[0].size()), args[0].stride())):  # see `rebind`
            view = functools.partial(_IN_PLACE[func], *args, **kwargs)
            return functools.partial(self._in_place, args[0], view)
        place = _place(func, args, kwargs)
        if place is None:
            return None
        tensor: FunctionalTensor = args[0]
        make = self._of_base(func, tensor, place) if is_functional_base(tensor) else self._part(tensor, place)
        if make is None:
            self._look_around(func, tensor)
            return None
        if func is _AS_STRIDED and is_functional_base(tensor):
            return None
        return make

    def _in_place(self, tensor: FunctionalTensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Let `tensor` be a view of what it is; with PyTorch's own operator, none would own the memory."""
        self.note_owner(tensor)
        rebind(tensor, make())  # type: ignore[arg-type]
        return tensor

    def _resize_as(
        self,
        tensor: FunctionalTensor,
        template: torch.Tensor,
        memory_format: torch.memory_format | None = None,
    ) -> None:
        """Give `tensor` the size of `template`."""
        if memory_format is torch.preserve_format:
            return self._resize_to(tensor, template.size(), template.stride())
        return self._resize(tensor, template.size(), memory_format=memory_format)

    def _resize(
        self,
        tensor: FunctionalTensor,
        size: Sequence[int],
        memory_format: torch.memory_format | None = None,
    ) -> None:
        """Give `tensor` another size, in its storage, which grows if need be."""
        if tensor.size() != torch.Size(size):
            shape = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
            self._resize_to(tensor, size, shape.stride())

    def _resize_to(self, tensor: FunctionalTensor, size: Sequence[int], stride: Sequence[int]) -> None:
        """Give `tensor` another size and other, dense, strides."""
        numel, room = math.prod(size), tensor.numel()
        grows_around = numel > room and not self._is_all_of_its_storage(tensor)
        if extent(tensor) != room or grows_around:
            part = None if is_functional_base(tensor) else self._part(tensor, (size, stride, None))
            if part is None:
                why = "it grows into memory around it" if grows_around else "it has gaps"
                raise refusal(
                    f"a tensor is resized in place, and {why}",
                    fix="clone it first, or make a tensor of the size that you need",
                )
            rebind(tensor, part())
            return
        flat = _flat(second_shell(tensor))
        if numel > room:
            flat = torch.cat([flat, torch.empty(numel - room, dtype=tensor.dtype, device=tensor.device)])
        rebind(tensor, _shaped(flat[:numel], size, stride))  # type: ignore[arg-type]

    def _is_all_of_its_storage(self, tensor: FunctionalTensor) -> bool:
        if functional_storage_id(tensor) in self._larger_storages:
            return False
        value = functional_value(tensor)
        start = value.storage_offset() * value.element_size()
        return value.untyped_storage().nbytes() == start + tensor.numel() * tensor.element_size()

    def _of_base(
        self, func: OpOverload, tensor: FunctionalTensor, place: _Place
    ) -> Callable[[], FunctionalTensor] | None:
        value, (size, stride, offset) = functional_value(tensor), place
        if offset is not None and tensor.storage_offset() != value.storage_offset():
            self.refuse_lost_offset(func, tensor)
        if not shows(value, size, stride, offset):
            if func is _UNFOLD:
                return None
            self._look_around(func, tensor)
        return lambda: tensor.as_strided(size, stride, offset)  # type: ignore[return-value]

    def _part(self, tensor: FunctionalTensor, place: _Place) -> Callable[[], FunctionalTensor] | None:
        """What makes a view of the memory's owner; None if there is no owner, or it is too short."""
        memory, start = self._owners.get(functional_storage_id(tensor), (None, 0))
        if (
            memory is None
            or not (is_functional_base(memory) and _is_whole(memory))
            or memory.dtype != tensor.dtype
        ):
            return None
        size, stride, offset = place
        first = int(tensor.storage_offset()) if offset is None else offset - start
        if first < 0 or first + extent_of(size, stride) > memory.numel():
            return None
        return lambda: part_of(memory, size, stride, first)

    def _look_around(self, func: OpOverload, tensor: FunctionalTensor) -> None:
        """Note that a view shows memory which the trace does not have, or cannot be written through."""
        key = functional_storage_id(tensor)
        if key in self._inputs and func is not _UNFOLD:  # which shows nothing around a tensor
            if data_writes(tensor):
                raise _writes_around(func)
            self._looked_around.add(key)
        self._not_through_views.add(key)

    def refuse_lost_offset(self, func: OpOverload, tensor: FunctionalTensor) -> None:
        """Raise for a view of a tensor whose offset in its storage was lost by a write."""
        raise refusal(
            f"`{func}` is called on a part of a storage that was written before",
            "use `select`, `diagonal` or slices, which count from the tensor",
        )

    def refuse_write(self, func: OpOverload, tensor: FunctionalTensor) -> None:
        """Raise for a write to memory of which the program made views that show more than the trace has.

        Also for one that goes through a view, where some views would write to a copy.
        """
        key = functional_storage_id(tensor)
        if key in self._looked_around:
            raise _writes_around(func)
        if key in self._not_through_views and not is_functional_base(tensor):
            raise refusal(
                f"`{func}` writes memory that `as_strided` shows, and what it was called on does not; "
                "`unfold` of a part shows memory like that",
                "call them on a tensor that owns all of that memory",
            )


def _writes_around(func: OpOverload) -> UnsupportedProgram:
    return refusal(
        f"the program writes an input, and meets memory around it that only `as_strided` shows (at `{func}`)",
        "pass the tensor that shows all of that memory, and take the view inside",
    )


def _place(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Place | None:
    """Size, stride and offset of a view that counts from the storage; None for other operators."""
    if func is _UNFOLD:
        return _unfolded(*args, **kwargs)
    if func is _AS_STRIDED:
        return _place_of(*args[1:], **kwargs)
    return None


def _place_of(size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> _Place:
    return size, stride, storage_offset


def _unfolded(tensor: torch.Tensor, dimension: int, size: int, step: int) -> _Place | None:
    """Size and stride of what `unfold` shows, if it leaves elements out, or repeats some."""
    if tensor.dim() == 0 or (step == size and tensor.size(dimension) % size == 0):
        return None
    dim = dimension % tensor.dim()
    sizes, strides = [*tensor.size(), size], [*tensor.stride(), tensor.stride(dim)]
    sizes[dim] = (sizes[dim] - size) // step + 1
    strides[dim] *= step
    return sizes, strides, None


def _set_to(tensor: FunctionalTensor, source: FunctionalTensor) -> None:
    """Move `tensor` to the memory of `source`, with its sizes and strides."""
    if source.dtype != tensor.dtype:
        raise RuntimeError(f"Could not set tensor of type {source.dtype} to a tensor of type {tensor.dtype}")
    rebind(tensor, _ATEN.detach.default(source))


def _set_to_nothing(tensor: FunctionalTensor) -> None:
    """Make `tensor` empty."""
    rebind(tensor, torch.empty(0, dtype=tensor.dtype, device=tensor.device))  # type: ignore[arg-type]


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """A dense tensor as one row, as it lies in memory.

    Not by `as_strided`, through which functionalisation writes only where no other view comes before.
    """
    return dense.permute(by_stride(dense.size(), dense.stride())).view(-1)


def _shaped(flat: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The inverse of `_flat`."""
    order = by_stride(size, stride)
    return flat.view([size[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


def _is_whole(memory: FunctionalTensor) -> bool:
    """Whether a tensor is dense, and lies at the beginning of its storage, as its values do."""
    value = functional_value(memory)
    return memory.storage_offset() == value.storage_offset() == 0 and extent(memory) == memory.numel()
