"""Sparse COO and CSR matrices as wrappers around indices and values.

Layout and size are constants of a program. The number of values is the size of plain tensors, a symbol where
it changes from call to call. The number of rows of a sparse gradient is a symbol from the start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import Wrapper, WrapperRule, plain_tensors
from aotdist.subclasses.sparse_matrix import FIX, FORM_SOURCE, SparseMatrix, is_of_rows
from aotdist.subclasses.sparse_rows import SparseRows


class _SparseRule(WrapperRule):
    sized = False

    def owns(self, cls: type[torch.Tensor]) -> bool:
        return issubclass(cls, SparseMatrix)

    def refuse(self, tensor: torch.Tensor, path: str) -> None:
        what = None
        if isinstance(tensor, SparseMatrix):
            what = None if isinstance(tensor, SparseRows) else "is a result"
        elif tensor.requires_grad:
            what = "requires grad"
        elif not is_of_rows(tensor) and (tensor.dim() != 2 or plain_tensors(tensor)[-1].dim() != 1):
            what = "is no matrix of numbers"
        if what is not None:
            raise UnsupportedProgram(
                f"`{path}` has layout {tensor.layout}, and {what}", stage="capture", fix=FIX
            )

    def same_context_source(self, tensor: str, expected: str) -> str:
        return f"{FORM_SOURCE.format(tensor)} == {expected}"

    def compared(self, tensor: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
        return (*tensor.shape, len(plain_tensors(tensor)[-1])), (0, 0, 0)

    def ragged_dims(self, tensor: torch.Tensor) -> frozenset[int]:
        return frozenset({0} if is_of_rows(tensor) else ())

    def dims_inside(self, recipe: Wrapper, name: str, dims: frozenset[int]) -> frozenset[int]:
        match name:
            case _ if not dims:
                return dims
            case "crow_indices()":
                return frozenset()
            case "_indices()":
                return frozenset({1})
            case _:
                return frozenset({0})


WRAPPER_RULE = _SparseRule()
"""Sparse matrices (`torch.sparse_coo`, `torch.sparse_csr`) that dense ones are multiplied by; gradients."""
