"""Storages of traced tensors, as the program sees them: it can ask for their sizes.

A traced tensor has no memory that could be freed, or that another could lie in: a program that resizes a
storage, or sets a tensor to one, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.program import PrimalIdx
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.functional import FunctionalTensor, functional_storage_id, functional_value
from aotdist.torch_seam.modes import no_modes, torch_functions_off
from aotdist.trace.failures import refusal
from aotdist.trace.stand_ins import Inputs


class Storages:
    """The storages that a program looked at."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._looked_at: set[int] = set()

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
