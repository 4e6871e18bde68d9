"""Storages of traced tensors, as the program sees them: it can ask for their sizes, and change them.

FSDP frees the memory of what it gathers by `x.untyped_storage().resize_(0)`, and gets it back by resizing
again. A traced tensor has nothing to free; the changes are noted, and repeated on the real tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from aotdist.aliasing.memory import by_stride, extent
from aotdist.aliasing.metadata import resize_storage
from aotdist.aliasing.naming import another_name
from aotdist.aliasing.view_log import ViewLog
from aotdist.errors import UnsupportedProgram
from aotdist.program import PrimalIdx
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.functional import FunctionalTensor, functional_storage_id, functional_value
from aotdist.torch_seam.modes import no_modes, torch_functions_off
from aotdist.torch_seam.tensors import storage_id
from aotdist.trace.failures import refusal
from aotdist.trace.stand_ins import Inputs
from aotdist.trace.strided import Strided


@dataclass(slots=True)
class _Memory:
    """One storage.

    Args:
        tensor: a traced tensor in it, held so that no other storage gets its id.
        before: bytes of the storage before the program ran.
        now: bytes of the storage now.
        changes: numbers, in the log, of the changes of its size.
    """

    tensor: FunctionalTensor
    before: int
    now: int
    changes: list[int] = field(default_factory=list)


class Storages:
    """The storages that a program looked at."""

    def __init__(self, inputs: Inputs, log: ViewLog, strided: Strided) -> None:
        self._inputs, self._log, self._strided = inputs, log, strided
        self._memories: dict[int, _Memory] = {}
        log.storages = self

    def of(self, tensor: FunctionalTensor) -> TracedStorage:
        """What the program is given for the storage of a tensor."""
        return TracedStorage(self, tensor)

    def memory(self, tensor: FunctionalTensor) -> _Memory:
        """The storage of a tensor."""
        with torch_functions_off():
            return self._memory(tensor)

    def _memory(self, tensor: FunctionalTensor) -> _Memory:
        key = functional_storage_id(tensor)
        if key not in self._memories:
            count = self._real_bytes(key)
            count = functional_value(tensor).untyped_storage().nbytes() if count is None else count
            self._memories[key] = _Memory(tensor, count, count)
        return self._memories[key]

    def resize(self, tensor: FunctionalTensor, num_bytes: int) -> None:
        """Give the storage of a tensor another size."""
        memory = self.memory(tensor)
        lacks = memory.now < bytes_to_hold(tensor) <= num_bytes
        memory.now = num_bytes
        base = self._log.root(tensor, ()).base
        refill = another_name(tensor) if lacks else None
        memory.changes.append(len(self._log.changes))
        self._log.resize_storage(base, resize_storage, num_bytes, refill)

    def passing(self) -> set[int]:
        """Numbers of the changes that leave nothing behind.

        These are all but the last, if the storage is freed in the end, or had room at first: its contents are
        then computed or written like those of any other. The last one, too, if the size is that of before.
        """
        found: set[int] = set()
        for memory in self._memories.values():
            needed = bytes_to_hold(memory.tensor)
            if memory.now < needed or memory.before >= needed:
                found.update(memory.changes if memory.now == memory.before else memory.changes[:-1])
        return found

    def looked_at(self) -> Iterator[tuple[PrimalIdx, int]]:
        """Inputs, and positions of plain tensors beneath them, whose storage matters."""
        for idx, stand_in in self._inputs.row().enumerate():
            for leaf, plain in enumerate(stand_in.plains):
                if functional_storage_id(plain) in self._memories:
                    yield idx, leaf

    def holds(self, plain: FunctionalTensor) -> bool:
        """Whether the storage of an input's plain tensor had room for it before, and has it now."""
        memory = self._memories.get(functional_storage_id(plain))
        return memory is None or min(memory.before, memory.now) >= bytes_to_hold(plain)

    def has_room(self, plain: FunctionalTensor) -> bool:
        """Whether the storage of an input's plain tensor has room for it now."""
        memory = self._memories.get(functional_storage_id(plain))
        return memory is None or memory.now >= bytes_to_hold(plain)

    def resized_since(self, before: Mapping[int, int]) -> Iterator[tuple[PrimalIdx, int, int]]:
        """Inputs, positions of plain tensors, and the bytes of their storages, where these have changed."""
        for idx, leaf in self.looked_at():
            key = functional_storage_id(self._inputs.row()[idx].plains[leaf])
            memory = self._memories[key]
            if memory.now != before.get(key, memory.before):
                yield idx, leaf, memory.now

    def sizes(self) -> Mapping[int, int]:
        """The bytes of each memory now."""
        return {key: memory.now for key, memory in self._memories.items()}

    def follow(self, view: torch.Tensor, base: torch.Tensor) -> bool:
        """Move a view to the memory that its base has grown to; False if that is not possible."""
        pairs = list(zip(plain_tensors(view), plain_tensors(base), strict=False))
        plain = all(isinstance(tensor, FunctionalTensor) for pair in pairs for tensor in pair)
        return plain and all(self._strided.follow(*pair) for pair in pairs)  # type: ignore[arg-type]

    def part(
        self, storage: Any, dtype: torch.dtype, offset: int = 0, size: Any = None, stride: Any = None
    ) -> torch.Tensor:
        """A tensor that lies in a storage as `set_` says.

        Raises:
            UnsupportedProgram: it is not known what lies in the storage, or the tensor leaves that.
        """
        whole = self._tensor_in(storage)
        if whole is None or whole.dtype != dtype or extent(whole) != whole.numel() or whole.storage_offset():
            raise _refuse("of which the program holds a part only, or which it holds as another dtype")
        flat = whole.permute(by_stride(whole.size(), whole.stride())).view(-1)
        size = (flat.numel(),) if size is None else tuple(size)
        numel = torch.Size(size).numel()
        shape = torch.empty(size, device="meta")
        if stride and tuple(stride) != shape.stride():
            if len(size) > 1:
                raise _refuse("with strides of its own")
            return flat[offset :: stride[0]][:numel]
        if offset + numel > flat.numel():
            raise _refuse("beyond what the program holds of it")
        return flat[offset : offset + numel].view(size)

    def _tensor_in(self, storage: Any) -> torch.Tensor | None:
        if isinstance(storage, TracedStorage):
            return self._log.root(storage.tensor, ()).base
        for stand_in in self._inputs.row():
            tensor = stand_in.tensor
            if isinstance(tensor, FunctionalTensor) and storage_id(tensor) == storage._cdata:
                return tensor
        return self._log.views.base_on(storage._cdata)

    def _real_bytes(self, key: int) -> int | None:
        for stand_in in self._inputs.row():
            for plain, real in zip(stand_in.plains, plain_tensors(stand_in.example), strict=True):
                if functional_storage_id(plain) == key:
                    with no_modes():
                        return real.untyped_storage().nbytes()
        return None


class TracedStorage(torch.UntypedStorage):
    """Stands for the storage of a traced tensor."""

    def __new__(cls, storages: Storages, tensor: FunctionalTensor) -> TracedStorage:
        """Make it without memory."""
        make: Any = super().__new__
        with no_modes():
            return make(cls, 0)

    def __init__(self, storages: Storages, tensor: FunctionalTensor) -> None:
        self.tensor = tensor
        self._storages = storages

    def nbytes(self) -> int:
        """Its bytes."""
        return self._storages.memory(self.tensor).now

    def size(self) -> int:
        """Its bytes."""
        return self.nbytes()

    def __len__(self) -> int:
        return self.nbytes()

    def resize_(self, size: int) -> TracedStorage:
        """Give it another size."""
        self._storages.resize(self.tensor, size)
        return self


def bytes_to_hold(tensor: torch.Tensor) -> int:
    """The size of a storage that holds a tensor."""
    return (int(tensor.storage_offset()) + extent(tensor)) * tensor.element_size()


def _refuse(how: str) -> UnsupportedProgram:
    return refusal(
        f"a tensor is set to a storage {how}",
        fix="set it to a tensor: `x.set_(y)`",
    )
