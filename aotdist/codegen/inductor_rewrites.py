"""Rewrites of graphs for Inductor: of what it has no kernels for, compiles wrongly, or loses track of.

Each rewrite says what Inductor does otherwise, and in which release of torch it was seen.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from aotdist.aliasing.memory import may_repeat
from aotdist.partition.traits import view_base
from aotdist.program import Graph
from aotdist.sizes import is_symbolic
from aotdist.torch_seam.ambient import uses_onednn
from aotdist.torch_seam.inductor import EAGER_ARGUMENTS, needs_exact_strides
from aotdist.torch_seam.operators import OpOverload, operator_name, own_operator, schema_of, training_rnn
from aotdist.torch_seam.symbols import estimate
from aotdist.trace.operators import functions_of_data
from aotdist.trace.operators.fakes import GROUPED

_ATEN = torch.ops.aten


# Operators that Inductor compiles wrongly, or for one size only: it calls them instead.
#
# It knows nothing about an operator of our own, and so calls that. Each is a copy of PyTorch's (torch 2.13,
# where `torch.compile` has the same faults):
#
# - Scatters of complex numbers, for which Inductor has no kernels. It does not know that a view of complex
#   numbers shows the memory of what it is made of: where it wrote a scatter in place, through such a view,
#   what reads the result might run before. The gradient of a complex `qr` was wrong by 1.
# - Backwards of convolutions on a CPU whose input has symbolic sizes. The lowering specializes on the strides
#   of the input, and so on its sizes: each size of images would be a program of its own.
# - Gradients of average pools with `ceil_mode`, whose last window may hang over: eager divides its gradient
#   by the number of elements that it averaged, Inductor by the size of a whole window.
# - Gradients of nearest interpolation by other factors than whole numbers: Inductor reads the sizes, not the
#   scales. Where 5 rows are scaled by 1.5 to 7, gradients came to the wrong rows.


def call_library(gm: GraphModule) -> None:
    """Replace operators that Inductor gets wrong by copies, which it calls as they are, in place."""
    for op, (copy, is_wrong) in _BY_LIBRARY.items():
        for node in gm.graph.find_nodes(op="call_function", target=op):
            if is_wrong(node):
                node.target = copy


def _copy_of(
    op: OpOverload, prefix: str, tags: Sequence[torch.Tag] = (), like: Callable[..., Any] | None = None
) -> OpOverload:
    return own_operator(f"{prefix}{operator_name(op)}({schema_of(op).partition('(')[2]}", op, like, tags)


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _has_symbolic_sizes_on_cpu(node: Node) -> bool:
    convolved = node.args[1]
    assert isinstance(convolved, Node), "a convolution is of a tensor"
    value = convolved.meta["val"]
    return value.device.type == "cpu" and is_symbolic(tuple(value.shape))


def _hangs_over(node: Node) -> bool:
    ceil, *counted = node.args[5:]
    return bool(ceil) and counted in ([True], [True, None])


def _is_no_repetition(node: Node) -> bool:
    to, size, *scales = cast("Any", node.args[1:])
    if is_symbolic((tuple(to), tuple(size))):
        return True
    times = [divmod(after, before) for after, before in zip(to, size[2:], strict=True)]
    asked = (scale for scale in scales if scale is not None)
    return any(rest for _, rest in times) or any(
        scale != n for scale, (n, _) in zip(asked, times, strict=False)
    )


def _is_on_cpu(product: Node) -> bool:
    """Where the kernel of grouped products takes any dtype, PyTorch's fake bfloat16 alone."""
    return product.meta["val"].device.type == "cpu"


_GROUPED_MM = _ATEN._grouped_mm.default
_BY_LIBRARY: Mapping[OpOverload, tuple[OpOverload, Callable[[Node], bool]]] = {
    _GROUPED_MM: (
        _copy_of(_GROUPED_MM, "library", like=functools.partial(GROUPED[_GROUPED_MM], _GROUPED_MM)),
        _is_on_cpu,
    ),
    **{
        getattr(_ATEN, name).default: (_copy_of(getattr(_ATEN, name).default, "complex_"), _is_complex)
        for name in ("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")
    },
    _ATEN.convolution_backward.default: (
        _copy_of(_ATEN.convolution_backward.default, "", [torch.Tag.flexible_layout]),
        _has_symbolic_sizes_on_cpu,
    ),
    **{
        op: (_copy_of(op, "library_"), is_wrong)
        for op, is_wrong in (
            (_ATEN.avg_pool2d_backward.default, _hangs_over),
            (_ATEN.avg_pool3d_backward.default, _hangs_over),
            (_ATEN.upsample_nearest2d_backward.default, _is_no_repetition),
        )
    },
}
"""Operators, the copy of each, and whether Inductor gets a call of it wrong."""

_LINEAR_ALGEBRA = re.compile(r"linalg|^(cholesky|lu_|svd|qr|ormqr|geqrf|triangular_solve)")


def linear_algebra(gm: GraphModule) -> Iterator[Node]:
    """The nodes that are linear algebra of complex numbers: Inductor gets strides of their results wrong."""
    for node in gm.graph.nodes:
        name = operator_name(node.target)
        if name and _LINEAR_ALGEBRA.search(name) and any(map(_is_complex, node.all_input_nodes)):
            yield node


# Operators that depend on the strides of their arguments, while Inductor chooses those of its results.
#
# Products in 8 bits take one matrix by rows and the other by columns, and a user's operator may read memory
# as it lies. Inductor keeps eager's strides for such operators if nodes say which these are.


def tell_strides(gm: GraphModule) -> None:
    """Note the arguments that stride-bound operators get in eager, for Inductor, in place."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and needs_exact_strides(node.target):
            node.meta[EAGER_ARGUMENTS] = map_arg((node.args, node.kwargs), _val)


def _val(node: Node) -> Any:
    return node.meta.get("val")


# Writes into tensors whose elements share memory (expanded ones, windows), for Inductor.
#
# Inductor lets a scatter write where its argument lies if nothing reads that later, also where one element of
# it is many (torch 2.13, `torch.compile` too): of `zeros(()).expand(3).index_put(...)` every element becomes
# the last one that was put. So what is written gets memory of its own first.

_SCATTERS = {
    _ATEN.index_put.default: False,
    _ATEN._unsafe_index_put.default: False,
    _ATEN.slice_scatter.default: True,
    _ATEN.select_scatter.default: True,
    _ATEN.diagonal_scatter.default: True,
    _ATEN.as_strided_scatter.default: True,
}
"""Scatters that Inductor runs in place, or makes others of; whether eager keeps windows as they are."""


def lay_out_what_is_written(gm: GraphModule) -> None:
    """Copy tensors whose elements overlap before scatters write them, in place."""
    for scatter, keeps_windows in _SCATTERS.items():
        for node in gm.graph.find_nodes(op="call_function", target=scatter):
            written = node.args[0]
            if isinstance(written, Node) and _overlaps(written.meta["val"], windows=not keeps_windows):
                with gm.graph.inserting_before(node):
                    copy = gm.graph.call_function(
                        _ATEN.clone.default, (written,), {"memory_format": torch.contiguous_format}
                    )
                copy.meta = {**written.meta, "val": written.meta["val"].contiguous()}
                node.update_arg(0, copy)


def _overlaps(tensor: torch.Tensor, *, windows: bool) -> bool:
    """Whether a tensor is expanded, or, if `windows` count, whether elements share memory in another way.

    Where sizes are symbols, they do if a stride occurs twice.
    """
    strides = [stride for stride in tensor.stride() if not is_symbolic(stride)]
    if 0 in strides or not windows:
        return 0 in strides
    if is_symbolic((*tensor.size(), *tensor.stride())):
        return len(strides) > len(set(strides))
    return may_repeat(tensor)


# Outputs keep memory of their own, as in the user's program, whatever a rewrite of the graph did.
#
# Inductor drops operators that change nothing: `x + zeros` becomes `x`. An output that was computed so would
# share memory with another output, an argument or a saved value, and change when that is written.

_CLONE = torch.ops.aten.clone.default


def keeping_own_memory(graph: Graph) -> Callable[[Graph], None]:
    """Called before a rewrite: a function that then clones outputs which lost memory of their own, in place.

    These now lie in the memory of a node with other uses. A node that the rewrite added owns its memory. An
    owner without other uses can be returned: nobody can tell.
    """
    nodes_before, owners_before = frozenset(graph.gm.graph.nodes), tuple(map(_owner, graph.results()))

    def restore(rewritten: Graph) -> None:
        results = list(rewritten.results())
        owners = [_owner(node) for node in results]
        for at, (slot, owner, owned) in enumerate(zip(rewritten.outs, owners, owners_before, strict=True)):
            if slot.role != "output" or owner is None or owner is owned or owner not in nodes_before:
                continue
            if owner.op != "call_function" or len(owner.users) > 1 or owners.count(owner) > 1:
                results[at] = _copied(rewritten, cast("Node", results[at]))
        rewritten.gm.graph.output_node().args = (tuple(results),)

    return restore


def _owner(node: Node | None) -> Node | None:
    return None if node is None else view_base(node)


def _copied(graph: Graph, node: Node) -> Node:
    with graph.gm.graph.inserting_before(graph.gm.graph.output_node()):
        copy = graph.gm.graph.call_function(_CLONE, (node,))
    copy.meta = dict(node.meta)
    return copy


# Recurrent layers by oneDNN for a compiler that runs its graphs without grad mode.
#
# `mkldnn_rnn_layer` asks grad mode whether it is to keep what its backward needs. A forward of ours runs
# without, so the operator stands in the graph as one of our own, which runs with grad mode on, as eager does.

_RNN = torch.ops.aten.mkldnn_rnn_layer.default
_RNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default

_TRAINING_RNN = own_operator(
    schema_of(_RNN).replace("aten::mkldnn_rnn_layer", "training_rnn"), training_rnn, like=_RNN
)


def keep_for_backward(gm: GraphModule) -> None:
    """Let recurrent layers that have a backward keep what it needs, in place."""
    for node in gm.graph.find_nodes(op="call_function", target=_RNN):
        if node.meta.get("grad", True):
            node.target = _TRAINING_RNN


def has_unknown_sizes(gm: GraphModule) -> bool:
    """Whether a graph holds results whose sizes nobody knows before they are computed."""
    targets = (_TRAINING_RNN, _RNN_BACKWARD, *functions_of_data.OF_OUR_OWN.values())
    return any(gm.graph.find_nodes(op="call_function", target=target) for target in targets)


# Where nodes come from, after a rewrite that did not keep track of it.

_INHERITED = ("source", "module", "seq_nr")


def restore_provenance(graph: Graph) -> None:
    """Give nodes without a `phase` the phase, source line, module and `seq_nr` of their neighbours, in place.

    A new node belongs to the backward if anything that it is computed from does. It takes the rest from
    the nearest node of its phase that it reads, else from the first that reads it.
    """
    tangents = {node for slot, node in graph.named_placeholders().items() if slot.role == "tangent"}
    orphans = [
        node for node in graph.gm.graph.nodes if node.op == "call_function" and "phase" not in node.meta
    ]
    for node in orphans:  # in order of the graph, so that what a node reads is settled before it
        backward = any(
            read in tangents or read.meta.get("phase") == "backward" for read in node.all_input_nodes
        )
        node.meta["phase"] = "backward" if backward else "forward"
        _inherit(node, reversed(node.all_input_nodes))
    for node in reversed(orphans):
        _inherit(node, node.users)


def _inherit(node: Node, neighbours: Iterable[Node]) -> None:
    for neighbour in neighbours:
        if neighbour.meta.get("phase") == node.meta["phase"]:
            for key in _INHERITED:
                if key in neighbour.meta:
                    node.meta.setdefault(key, neighbour.meta[key])


# Matrix products by oneDNN, on processors where MKL has slow ones.
#
# PyTorch's float32 products on x86 are MKL's, which takes its AVX-512 kernels on Intel's processors only, and
# half as wide ones elsewhere. On two cores of a Zen 5, products of 512 rows run at 205 GFLOP/s by MKL, and at
# 420 to 470 by oneDNN: a step of the benchmarks' Llama takes 84 ms instead of 151.

_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_MM, _ADDMM, _ADD = _ATEN.mm.default, _ATEN.addmm.default, _ATEN.add.Tensor

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
