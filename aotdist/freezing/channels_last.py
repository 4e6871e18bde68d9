"""Convolutions with channels last: in memory, the channels of one pixel are neighbours.

Weights are laid out once, as constants. Activations are laid out where the first convolution reads them, and
stay so through operators that keep a layout (pointwise ones, pools, batch norms, concatenations); before any
other operator, and in results, they are laid out as eager has them. So there is nothing to convert between
two convolutions. Sums are added up in another order: results differ from eager's by rounding.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from aotdist.freezing.folding import constant_nodes
from aotdist.partition.traits import is_view, storage_root
from aotdist.passes.editing import emit
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.operators import OpOverload

_ATEN = torch.ops.aten
_CONVOLUTION = _ATEN.convolution.default
_CLONE = _ATEN.clone.default
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

_KEEP_LAYOUT = frozenset(
    {
        "aten::max_pool2d_with_indices",
        "aten::avg_pool2d",
        "aten::_adaptive_avg_pool2d",
        "aten::upsample_nearest2d",
        "aten::upsample_bilinear2d",
        "aten::cat",
        "aten::clone",
        "aten::_to_copy",
        "aten::constant_pad_nd",
        "aten::mean",
        "aten::_native_batch_norm_legit_no_training",
    }
)
"""Operators that take channels last, and say what they make of it, beside pointwise ones."""


def lay_channels_last(gm: GraphModule, state: set[str]) -> None:
    """Edit a graph so that its convolutions have channels last; results are laid out as before.

    Args:
        gm: the graph.
        state: names of the inputs that are parameters and buffers.
    """
    _Layout(gm, constant_nodes(gm, state)).run()


class _Layout:
    """Lays out one graph.

    Args:
        gm: the graph; it is edited.
        constant: its constant nodes.
    """

    def __init__(self, gm: GraphModule, constant: set[Node]) -> None:
        self._graph = gm.graph
        self._constant = constant
        self._before: dict[Node, torch.Tensor] = {}
        self._last: dict[Node, Node] = {}
        self._restored: dict[Node, Node] = {}
        results = gm.graph.output_node().all_input_nodes
        self._of_results = {storage_root(node) for node in results} | set(results)

    def run(self) -> None:
        """Lay it out."""
        for node in list(self._graph.nodes):
            if node.op != "call_function" or node in self._constant:
                continue
            if self._is_convolution(node):
                self._lay_out(node)
            elif not (_keeps_layout(node) and self._follow(node)):
                self._restore_arguments(node)
            if node in self._of_results and node in self._before:
                self._restore_at_once(node)

    def _is_convolution(self, node: Node) -> bool:
        if node.target is not _CONVOLUTION:
            return False
        x, weight = node.args[0], node.args[1]
        return weight in self._constant and _val(x).dim() in _FORMATS and _val(node).is_contiguous()

    def _lay_out(self, node: Node) -> None:
        x, weight, *rest = node.args
        new = (self._with_channels_last(x, node), self._with_channels_last(weight, node), *rest)
        self._revalue(node, new)

    def _with_channels_last(self, source: Any, user: Node) -> Node:
        """`source` with channels last."""
        layout = _FORMATS[_val(source).dim()]
        if _val(source).is_contiguous(memory_format=layout):
            return source
        if source not in self._last:
            with self._graph.inserting_before(user):
                self._last[source] = emit(
                    self._graph, _CLONE, (source,), like=user, kwargs={"memory_format": layout}
                )
        return self._last[source]

    def _follow(self, node: Node) -> bool:
        """Let a node keep the layouts that its arguments have now, unless nobody could take it back."""
        if not any(n in self._before for n in node.all_input_nodes):
            return True
        before = node.meta["val"]
        parts = before if isinstance(before, (tuple, list)) else [before]
        if not all(part.is_contiguous() for part in parts if isinstance(part, torch.Tensor)):
            return False
        self._revalue(node, node.args)
        return True

    def _revalue(self, node: Node, args: Any) -> None:
        """Give a node other arguments, and let it say what it makes of them."""
        before, node.args = node.meta["val"], args
        given, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        target: Any = node.target
        with torch.no_grad(), no_modes():
            node.meta["val"] = target(*given, **kwargs)
        if not _laid_out_alike(before, node.meta["val"]):
            self._before[node] = before

    def _restore_arguments(self, node: Node) -> None:
        """Let a node read what eager would."""
        for source in node.all_input_nodes:
            if source in self._before:
                node.replace_input_with(source, self._restore(source, node))

    def _restore(self, source: Node, user: Node) -> Node:
        if source not in self._restored:
            with self._graph.inserting_before(user):
                self._restored[source] = self._contiguous(source)
        return self._restored[source]

    def _contiguous(self, source: Node) -> Node:
        options = {"memory_format": torch.contiguous_format}
        return emit(self._graph, _CLONE, (source,), like=source, kwargs=options)

    def _restore_at_once(self, node: Node) -> None:
        """Let everything read a node as eager has it, for a result lives in it."""
        users = list(node.users)
        with self._graph.inserting_after(node):
            restored = self._contiguous(node)
        for user in users:
            user.replace_input_with(node, restored)
        del self._before[node]


def _keeps_layout(node: Node) -> bool:
    if node.target is operator.getitem:
        return not is_view(node)
    if not isinstance(node.target, OpOverload) or is_view(node):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target.name().partition(".")[0] in _KEEP_LAYOUT


def _laid_out_alike(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return all(_laid_out_alike(x, y) for x, y in zip(a, b, strict=True))
    return not isinstance(a, torch.Tensor) or a.stride() == b.stride()


def _val(node: Any) -> torch.Tensor:
    return node.meta["val"]
