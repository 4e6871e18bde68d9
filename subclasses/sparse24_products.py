"""Products with one 2:4 operand, as two operators that stay whole in a graph.

`aotdist::mm_24` and `aotdist::linear_24` choose their kernel when they run, by `choose_kernel`: the
hardware's sparse product where there is one for the device, dtype and size, else a dense product of the
unpacked operand, which is exact. A graph shows that a product is sparse; where it runs decides how.

The hardware takes the sparse operand on the left, its groups along the dimension that is summed over. So
`x @ W.T`, a linear layer's forward, is computed as `(W @ x.T).T`.

Shapes: N rows of the dense operand, O outputs, K the dimension that is summed over.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from aotdist.subclasses.sparse24_packing import cutlass_words, unpack

Kernel: TypeAlias = Literal["cutlass", "cusparselt", "dense"]

_aten = torch.ops.aten


def choose_kernel(
    capability: tuple[int, int] | None, dtype: torch.dtype, size: tuple[int, int], num_dense: int
) -> Kernel:
    """What computes a product of a 2:4 matrix of `size` with `num_dense` dense rows or columns.

    PyTorch's CUTLASS product exists for compute capability 8.x alone, and reads metadata that CUTLASS's own
    shuffle makes of ours. cuSPARSELt runs from 8.0 on; its layout is its own, so it compresses the unpacked
    matrix anew at every product. Both are for 16-bit floats here.

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


def mm_24(packed: torch.Tensor, meta: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """`S @ dense` for the 2:4 matrix S. Shapes: (O, K / 2), (O, K / 8) uint8, (K, N) -> (O, N)."""
    return torch.ops.aotdist.mm_24.default(packed, meta, dense)


def linear_24(
    dense: torch.Tensor, packed: torch.Tensor, meta: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`dense @ S.T + bias` for the 2:4 matrix S.

    Shapes: (N, K), (O, K / 2), (O, K / 8) uint8, (O,) -> (N, O).
    """
    return torch.ops.aotdist.linear_24.default(dense, packed, meta, bias)


def _run_mm(packed: torch.Tensor, meta: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    match _kernel(packed, dense.size(1)):
        case "cutlass":
            return _aten._sparse_semi_structured_mm(packed, cutlass_words(meta, packed.dtype), dense)
        case "cusparselt":
            return _aten._cslt_sparse_mm(_aten._cslt_compress(unpack(packed, meta)), dense)
        case "dense":
            return unpack(packed, meta) @ dense


def _run_linear(
    dense: torch.Tensor, packed: torch.Tensor, meta: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    match _kernel(packed, dense.size(0)):
        case "cutlass":
            product = _aten._sparse_semi_structured_mm(packed, cutlass_words(meta, packed.dtype), dense.t())
            return product.t().contiguous() if bias is None else product.t() + bias
        case "cusparselt":
            compressed = _aten._cslt_compress(unpack(packed, meta))
            return _aten._cslt_sparse_mm(compressed, dense.t(), bias, transpose_result=True)
        case "dense":
            # Of an unpacked matrix, this is what `linear` itself computes, bit for bit.
            return torch.nn.functional.linear(dense, unpack(packed, meta), bias)


def _kernel(packed: torch.Tensor, num_dense: int) -> Kernel:
    capability = torch.cuda.get_device_capability(packed.device) if packed.is_cuda else None
    return choose_kernel(capability, packed.dtype, (packed.size(0), 2 * packed.size(1)), num_dense)


def _like_mm(packed: torch.Tensor, meta: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    return dense.new_empty((packed.size(0), dense.size(1)))


def _like_linear(
    dense: torch.Tensor, packed: torch.Tensor, meta: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return dense.new_empty((dense.size(0), packed.size(0)))


torch.library.define("aotdist::mm_24", "(Tensor packed, Tensor meta, Tensor dense) -> Tensor")
torch.library.impl("aotdist::mm_24", "default", _run_mm)
torch.library.register_fake("aotdist::mm_24", _like_mm)

torch.library.define(
    "aotdist::linear_24", "(Tensor dense, Tensor packed, Tensor meta, Tensor? bias) -> Tensor"
)
torch.library.impl("aotdist::linear_24", "default", _run_linear)
torch.library.register_fake("aotdist::linear_24", _like_linear)
