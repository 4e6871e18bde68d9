"""Views that count from the storage: `as_strided`, and `unfold` where it leaves elements out or repeats them.

Functionalisation writes through `as_strided` only if no other view precedes it, and through `unfold` only if
each element is shown once. So both are made as `as_strided` of the tensor that owns the memory.

A trace has only the part of an input's storage that the input shows. A program may read outside of that part
as long as nothing is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.aliasing.memory import extent, shows
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

_AS_STRIDED = torch.ops.aten.as_strided.default
_UNFOLD = torch.ops.aten.unfold.default
_IN_PLACE: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.t_.default: torch.ops.aten.t.default,
    torch.ops.aten.transpose_.default: torch.ops.aten.transpose.int,
    torch.ops.aten.unsqueeze_.default: torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze_.default: torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze_.dim: torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze_.dims: torch.ops.aten.squeeze.dims,
}
"""What makes the view that each of these makes in place."""


@dataclass(frozen=True, slots=True)
class _Place:
    size: Sequence[int]
    stride: Sequence[int]
    offset: int | None = None


class Strided:
    """Makes views that count from the storage, of the tensors that own memory.

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

    def lies_in(self, span: FunctionalTensor, part: FunctionalTensor, offset: int) -> None:
        """Note that `part`, which is a view of `span`, stands for a tensor that starts at `offset`.

        Args:
            span: the memory that inputs share.
            part: an input in it.
            offset: where the input starts in its storage, in elements.
        """
        self._owners[functional_storage_id(span)] = span, offset - int(part.storage_offset())

    def note_input(self, plain: FunctionalTensor) -> None:
        """Note that a plain tensor stands for one beneath an input, whose storage may be larger."""
        self._inputs.add(functional_storage_id(plain))

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

    def resized(
        self, tensor: FunctionalTensor, size: Sequence[int], stride: Sequence[int]
    ) -> Callable[[], FunctionalTensor] | None:
        """What makes `tensor` in another size, at the offset that it has; None if there is no room for it."""
        return None if is_functional_base(tensor) else self._part(tensor, _Place(size, stride))

    def _of_base(
        self, func: OpOverload, tensor: FunctionalTensor, place: _Place
    ) -> Callable[[], FunctionalTensor] | None:
        value = functional_value(tensor)
        if place.offset is not None and tensor.storage_offset() != value.storage_offset():
            self.refuse_lost_offset(func, tensor)
        if not shows(value, place.size, place.stride, place.offset):
            if func is _UNFOLD:
                return None
            self._look_around(func, tensor)
        return lambda: tensor.as_strided(place.size, place.stride, place.offset)  # type: ignore[return-value]

    def _part(self, tensor: FunctionalTensor, place: _Place) -> Callable[[], FunctionalTensor] | None:
        """What makes a view of the memory's owner; None if there is no owner, or it is too short."""
        memory, start = self._owners.get(functional_storage_id(tensor), (None, 0))
        if (
            memory is None
            or not (is_functional_base(memory) and _is_whole(memory))
            or memory.dtype != tensor.dtype
        ):
            return None
        first = int(tensor.storage_offset()) if place.offset is None else place.offset - start
        if first < 0 or first + _extent(place) > memory.numel():
            return None
        return lambda: part_of(memory, place.size, place.stride, first)

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
        return _Place(*[*args[1:], *kwargs.values()]) if len(kwargs) < 2 else _Place(**kwargs)
    return None


def _unfolded(tensor: torch.Tensor, dimension: int, size: int, step: int) -> _Place | None:
    """Size and stride of what `unfold` shows, if it leaves elements out, or repeats some."""
    if tensor.dim() == 0 or (step == size and tensor.size(dimension) % size == 0):
        return None
    dim = dimension % tensor.dim()
    sizes, strides = [*tensor.size(), size], [*tensor.stride(), tensor.stride(dim)]
    sizes[dim] = (sizes[dim] - size) // step + 1
    strides[dim] *= step
    return _Place(sizes, strides)


def _extent(place: _Place) -> int:
    """Number of elements from the first to the last in memory."""
    if 0 in place.size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(place.size, place.stride, strict=True))


def _is_whole(memory: FunctionalTensor) -> bool:
    """Whether a tensor is dense, and lies at the beginning of its storage, as its values do."""
    value = functional_value(memory)
    return memory.storage_offset() == value.storage_offset() == 0 and extent(memory) == memory.numel()
