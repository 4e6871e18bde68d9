"""Matrix products by oneDNN, on processors where MKL has slow ones.

PyTorch's float32 products on x86 are MKL's, which takes its AVX-512 kernels on Intel's processors only, and
half as wide ones elsewhere. On two cores of a Zen 5, products of 512 rows run at 205 GFLOP/s by MKL, and at
420 to 470 by oneDNN, which takes what the processor has: a step of the benchmarks' Llama takes 84 ms
instead of 151.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from aotdist.torch_seam.ambient import uses_onednn
from aotdist.torch_seam.operators import own_operator
from aotdist.torch_seam.symbols import estimate

_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_MM, _ADDMM, _ADD = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.add.Tensor
_CLONE = torch.ops.aten.clone.default

_LEAST_WORK = 1 << 22
"""Multiplications below which MKL is as fast: a call of oneDNN takes 12 us before it begins."""


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    return _LINEAR(left, _dense(right).t(), None, "none", [], "")


def _shape(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.size(0), right.size(1))


# It gets matrices with the strides that the graph says: else Inductor undoes what `_by_rows` asks for.
_PRODUCT = own_operator(
    "onednn_mm(Tensor left, Tensor right) -> Tensor",
    _multiply,
    _shape,
    tags=[torch.Tag.needs_fixed_stride_order],
)


def _dense(matrix: Tensor) -> Tensor:
    """The matrix, copied unless its rows or its columns lie one after the other: oneDNN reads no others."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    lies_well = (across == 1 and down >= columns) or (down == 1 and across >= rows)
    return matrix if lies_well else matrix.contiguous()


def products_by_onednn(gm: GraphModule) -> None:
    """Let oneDNN compute the large float32 products of a graph, in place, where it is faster.

    Args:
        gm: a private copy of a graph, whose nodes carry `val`.
    """
    if not (uses_onednn() and _mkl_is_slow()):
        return
    for node in gm.graph.find_nodes(op="call_function", target=_MM):
        left, right = node.all_input_nodes[0], node.all_input_nodes[-1]
        if _is_large(node, left):
            node.target, node.args = _PRODUCT, (_by_rows(left, node), right)
    for node in gm.graph.find_nodes(op="call_function", target=_ADDMM):
        added, left, right = node.args
        assert isinstance(left, Node), "a product is of matrices"
        if not node.kwargs and _is_large(node, left):
            with gm.graph.inserting_before(node):
                product = gm.graph.call_function(_PRODUCT, (_by_rows(left, node), right))
            product.meta = dict(node.meta)
            node.target, node.args = _ADD, (product, added)


def _is_large(product: Node, left: Node) -> bool:
    value = product.meta["val"]
    if value.device.type != "cpu" or value.dtype != torch.float32:
        return False
    return estimate(value.numel()) * estimate(left.meta["val"].size(1)) >= _LEAST_WORK


def _by_rows(left: Node, product: Node) -> Node:
    """`left`, row by row: the operator would copy it otherwise, and Inductor's copy is faster."""
    value = left.meta["val"]
    if value.stride(1) == 1:
        return left
    options: dict[str, Any] = {"memory_format": torch.contiguous_format}
    with product.graph.inserting_before(product):
        rows = product.graph.call_function(_CLONE, (left,), options)
    rows.meta = {**product.meta, "val": value.clone(**options), "original_aten": _CLONE}
    return rows


@functools.cache
def _mkl_is_slow() -> bool:
    """Whether products are MKL's, the processor has AVX-512, and is not Intel's."""
    if not torch.backends.mkl.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "vendor_id" in cpuinfo and "GenuineIntel" not in cpuinfo
