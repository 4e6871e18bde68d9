"""Custom operators of 2:4 tensors.

A graph has one node for choosing, packing and multiplying each, where the pointwise operators of
`sparse24_packing` would be a hundred nodes for every layer.

`mm_24` and `linear_24` choose their kernel when they run, by `choose_kernel`: the hardware's sparse product
where there is one for the device, dtype and size, else a dense product of the unpacked operand, which is
exact. The hardware takes the sparse operand on the left, with groups along the dimension that is summed over.
So `x @ W.T`, a linear layer's forward, is computed as `(W @ x.T).T`.

Shapes: R rows and C columns of a 2:4 matrix; N rows of the dense operand, O outputs, K the dimension that is
summed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch

from aotdist.subclasses.own_operators import capability_of, define
from aotdist.subclasses.sparse24_compressed import compressed
from aotdist.subclasses.sparse24_packing import (
    choose_by_slots,
    compress,
    compress_by_slots,
    cutlass_words,
    decode,
    encode,
    magnitude_mask,
    unpack,
)
from aotdist.torch_seam.operators import OpOverload

Kernel: TypeAlias = Literal["cutlass", "cusparselt", "dense"]

_aten = torch.ops.aten


def choose_kernel(
    capability: tuple[int, int] | None, dtype: torch.dtype, size: tuple[int, int], num_dense: int
) -> Kernel:
    """The kernel for a product of a 2:4 matrix of `size` with `num_dense` dense rows or columns.

    PyTorch's CUTLASS product exists for compute capability 8.x alone, and reads metadata that CUTLASS's own
    shuffle makes of ours. cuSPARSELt runs from 8.0 on; its layout is its own, see `sparse24_compressed`. Both
    are for 16-bit floats here.

    Args:
        capability: of the CUDA device; None for any other device.
        dtype: of both operands.
        size: rows and columns of the 2:4 matrix.
        num_dense: rows or columns of the dense operand, whichever is not summed over.
    """
    if capability is None or dtype not in (torch.float16, torch.bfloat16) or num_dense % 8:
        return "dense"
    rows, columns = size
    if capability[0] == 8 and rows % 32 == 0 and columns % 64 == 0:
        return "cutlass"
    if (
        capability >= (8, 0)
        and rows % 16 == 0
        and columns % 16 == 0
        and torch.backends.cusparselt.is_available()
    ):
        return "cusparselt"
    return "dense"


def _run_mm(packed: torch.Tensor, meta: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    match _kernel(packed, dense.size(1)):
        case "cutlass":
            return _aten._sparse_semi_structured_mm(packed, cutlass_words(meta), dense)
        case "cusparselt":
            return _aten._cslt_sparse_mm(compressed(packed, meta), dense)
        case "dense":
            return unpack(packed, meta) @ dense


def _run_linear(
    dense: torch.Tensor, packed: torch.Tensor, meta: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    match _kernel(packed, dense.size(0)):
        case "cutlass":
            words = cutlass_words(meta)
            product = _aten._sparse_semi_structured_mm(packed, words, dense.t()).t().contiguous()
            return product if bias is None else product + bias
        case "cusparselt":
            form = compressed(packed, meta)
            return _aten._cslt_sparse_mm(form, dense.t(), bias, transpose_result=True)
        case "dense":
            # Bit for bit what `linear` computes with the unpacked matrix.
            return torch.nn.functional.linear(dense, unpack(packed, meta), bias)


def _kernel(packed: torch.Tensor, num_dense: int) -> Kernel:
    capability = capability_of(packed.device)
    return choose_kernel(capability, packed.dtype, (packed.size(0), 2 * packed.size(1)), num_dense)


def _run_choose(dense: torch.Tensor, transposable: bool) -> torch.Tensor:
    return encode(magnitude_mask(dense, "transposable" if transposable else "row")).contiguous()


def _run_transpose(meta: torch.Tensor) -> torch.Tensor:
    return encode(decode(meta).t().contiguous())


def _run_compress(dense: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    return compress(dense.contiguous(), meta)  # the result has contiguous rows


def _like_choose(dense: torch.Tensor, transposable: bool) -> torch.Tensor:
    return dense.new_empty((dense.size(0), dense.size(1) // 8), dtype=torch.uint8)


def _like_transpose(meta: torch.Tensor) -> torch.Tensor:
    return meta.new_empty((meta.size(1) * 8, meta.size(0) // 8))


def _like_mask(meta: torch.Tensor) -> torch.Tensor:
    return meta.new_empty((meta.size(0), meta.size(1) * 8), dtype=torch.bool)


def _like_compress(dense: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    return dense.new_empty((dense.size(0), dense.size(1) // 2))


def _like_unpack(packed: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    return packed.new_empty((packed.size(0), packed.size(1) * 2))


def _like_mm(packed: torch.Tensor, meta: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    return dense.new_empty((packed.size(0), dense.size(1)))


def _like_linear(dense: torch.Tensor, packed: torch.Tensor, *_: Any) -> torch.Tensor:
    return dense.new_empty((dense.size(0), packed.size(0)))


choose_24 = define("choose_24(Tensor dense, bool transposable) -> Tensor", _run_choose, _like_choose)
"""Metadata of what `magnitude_mask` keeps. Shapes: (R, C) -> (R, C / 8) uint8."""
transpose_24 = define("transpose_24(Tensor meta) -> Tensor", _run_transpose, _like_transpose)
"""Metadata of the transposed matrix, which must be 2:4 too. Shapes: (R, C / 8) -> (C, R / 8) uint8."""
mask_24 = define("mask_24(Tensor meta) -> Tensor", decode, _like_mask)
"""What is kept. Shapes: (R, C / 8) uint8 -> (R, C) bool."""
compress_24 = define("compress_24(Tensor dense, Tensor meta) -> Tensor", _run_compress, _like_compress)
"""The kept values. Shapes: (R, C), (R, C / 8) uint8 -> (R, C / 2)."""
unpack_24 = define("unpack_24(Tensor packed, Tensor meta) -> Tensor", unpack, _like_unpack)
"""The dense matrix. Shapes: (R, C / 2), (R, C / 8) uint8 -> (R, C)."""
mm_24 = define("mm_24(Tensor packed, Tensor meta, Tensor dense) -> Tensor", _run_mm, _like_mm)
"""`S @ dense` for the 2:4 matrix S. Shapes: (O, K / 2), (O, K / 8) uint8, (K, N) -> (O, N)."""
linear_24 = define(
    "linear_24(Tensor dense, Tensor packed, Tensor meta, Tensor? bias) -> Tensor", _run_linear, _like_linear
)
"""`dense @ S.T + bias` for the 2:4 matrix S.

Shapes: (N, K), (O, K / 2), (O, K / 8) uint8, (O,) -> (N, O).
"""


def _made_of_choice(dense: torch.Tensor, transposable: bool) -> torch.Tensor:
    return NotImplemented if transposable else choose_by_slots(dense)


def _made_of_compression(dense: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    return compress_by_slots(dense.contiguous(), meta)


MADE_OF: Mapping[OpOverload, Callable[..., Any]] = {
    choose_24: _made_of_choice,
    mask_24: decode,
    compress_24: _made_of_compression,
    unpack_24: unpack,
}
"""Decompositions for a compiler that fuses: one kernel then chooses and packs."""
