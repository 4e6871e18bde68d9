"""Moves functional tensors to other memory: `set_`, `resize_`, `.data =`.

A functional tensor is a shell around the tensor that owns the memory. The program and autograd hold the
shell, which stays; its content is replaced by that of another shell, made by a view or by an allocation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from aotdist.aliasing.memory import by_stride, extent
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.functional import (
    FunctionalTensor,
    functional_storage_id,
    functional_value,
    rebind,
    second_shell,
)
from aotdist.torch_seam.operators import OpOverload
from aotdist.trace.failures import refusal
from aotdist.trace.strided import Strided

_ATEN = torch.ops.aten


class Rebinding:
    """Implements these operators; called with the functionalisation mode on.

    Args:
        strided: makes views of the tensors that own memory.
    """

    def __init__(self, strided: Strided) -> None:
        self._strided = strided
        self._whole: dict[int, tuple[FunctionalTensor, FunctionalTensor]] = {}
        self.larger_storages: set[int] = set()
        """Storages that are larger than the tensors of the program in them."""
        self.does: dict[OpOverload, Callable[..., None]] = {
            _ATEN.set_.default: self.set_to_nothing,
            _ATEN.set_.source_Tensor: self.set_to,
            _ATEN.resize_.default: self.resize,
            _ATEN.resize_as_.default: self.resize_as,
        }
        """What implements each operator."""

    def set_to(self, tensor: FunctionalTensor, source: FunctionalTensor) -> None:
        """Move `tensor` to the memory of `source`, with its sizes and strides."""
        if source.dtype != tensor.dtype:
            raise RuntimeError(
                f"Could not set tensor of type {source.dtype} to a tensor of type {tensor.dtype}"
            )
        self._whole.pop(id(tensor), None)
        rebind(tensor, _ATEN.detach.default(source))

    def set_to_nothing(self, tensor: FunctionalTensor) -> None:
        """Make `tensor` empty."""
        self._whole.pop(id(tensor), None)
        rebind(tensor, torch.empty(0, dtype=tensor.dtype, device=tensor.device))  # type: ignore[arg-type]

    def resize_as(
        self,
        tensor: FunctionalTensor,
        template: torch.Tensor,
        memory_format: torch.memory_format | None = None,
    ) -> None:
        """Give `tensor` the size of `template`."""
        if memory_format is torch.preserve_format:
            return self.resize_to(tensor, template.size(), template.stride())
        return self.resize(tensor, template.size(), memory_format=memory_format)

    def resize(
        self,
        tensor: FunctionalTensor,
        size: Sequence[int],
        memory_format: torch.memory_format | None = None,
    ) -> None:
        """Give `tensor` another size, in its storage, which grows if need be."""
        if tensor.size() != torch.Size(size):
            shape = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
            self.resize_to(tensor, size, shape.stride())

    def resize_to(self, tensor: FunctionalTensor, size: Sequence[int], stride: Sequence[int]) -> None:
        """Give `tensor` another size and other, dense, strides."""
        whole = self._whole.get(id(tensor), (tensor, tensor))[1]
        numel, room = math.prod(size), whole.numel()
        grows_around = numel > room and not self._is_all_of_its_storage(whole)
        if extent(whole) != room or grows_around:
            part = self._strided.resized(tensor, size, stride)
            if part is None:
                raise _refuse("it grows into memory around it" if grows_around else "it has gaps")
            rebind(tensor, part())
            self._whole.pop(id(tensor), None)
            return
        whole = second_shell(whole)
        flat = _flat(whole)
        if numel > room:
            flat = torch.cat([flat, torch.empty(numel - room, dtype=tensor.dtype, device=tensor.device)])
            whole = second_shell(flat)  # type: ignore[arg-type]
        rebind(tensor, _shaped(flat[:numel], size, stride))  # type: ignore[arg-type]
        self._whole[id(tensor)] = tensor, whole

    def _is_all_of_its_storage(self, whole: FunctionalTensor) -> bool:
        if functional_storage_id(whole) in self.larger_storages:
            return False
        value = functional_value(whole)
        start = value.storage_offset() * value.element_size()
        return value.untyped_storage().nbytes() == start + whole.numel() * whole.element_size()


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """A dense tensor as one row, as it lies in memory.

    Not by `as_strided`, through which functionalisation writes only where no other view comes before.
    """
    return dense.permute(by_stride(dense.size(), dense.stride())).view(-1)


def _shaped(flat: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The inverse of `_flat`."""
    order = by_stride(size, stride)
    return flat.view([size[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


def _refuse(why: str) -> UnsupportedProgram:
    return refusal(
        f"a tensor is resized in place, and {why}",
        fix="clone it first, or make a tensor of the size that you need",
    )
