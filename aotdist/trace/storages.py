"""Storages of traced tensors, as the program sees them: it can ask for their sizes, and set tensors to them.

A traced tensor has no memory that could be freed: a program that resizes a storage is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from aotdist.aliasing.memory import by_stride, extent
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


class Storages:
    """The storages that a program looked at."""

    def __init__(self, inputs: Inputs, log: ViewLog, strided: Strided) -> None:
        self._inputs, self._log, self._strided = inputs, log, strided
        self._looked_at: set[int] = set()
        log.part, log.follow = self.part, self.follow

    def of(self, tensor: FunctionalTensor) -> TracedStorage:
        """What the program is given for the storage of a tensor."""
        return TracedStorage(self, tensor)

    def nbytes(self, tensor: FunctionalTensor) -> int:
        """The bytes of the storage of a tensor; for an input, each call has to find as many."""
        with torch_functions_off():
            key = functional_storage_id(tensor)
            self._looked_at.add(key)
            count = self._real_bytes(key)
            return functional_value(tensor).untyped_storage().nbytes() if count is None else count

    def looked_at(self) -> Iterator[tuple[PrimalIdx, int]]:
        """Inputs, and positions of plain tensors beneath them, whose storage matters."""
        for idx, stand_in in self._inputs.row().enumerate():
            for leaf, plain in enumerate(stand_in.plains):
                if functional_storage_id(plain) in self._looked_at:
                    yield idx, leaf

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
        return self._storages.nbytes(self.tensor)

    def size(self) -> int:
        """Its bytes."""
        return self.nbytes()

    def __len__(self) -> int:
        return self.nbytes()

    def resize_(self, size: int) -> NoReturn:
        """Refuse to give it another size."""
        raise refuse_resize()


def refuse_resize() -> UnsupportedProgram:
    """An error for a program that resizes a storage."""
    return refusal(
        "the program resizes a tensor's storage, which has no memory while it is captured",
        fix="free and allocate memory outside of the compiled function; what it computes is freed after its "
        "last use by itself",
    )


def _refuse(how: str) -> UnsupportedProgram:
    return refusal(
        f"a tensor is set to a storage {how}",
        fix="set it to a tensor: `x.set_(y)`",
    )
