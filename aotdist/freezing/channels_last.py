"""Convolutions in channels-last memory format.

Weights are converted once, as constants. Activations are converted where the first convolution reads them,
and stay in that format through operators that preserve it (pointwise ones, pools, batch norms,
concatenations). Before any other operator, and for results, they get eager's strides back. So nothing is
converted between two convolutions. Sums are formed in another order: results differ from eager's by rounding.
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
"""Operators, beside pointwise ones, that preserve channels last."""


def lay_channels_last(gm: GraphModule, state: set[str]) -> None:
    """Let the convolutions of a graph compute in channels last; results keep their strides.

    Args:
        gm: the graph; it is edited.
        state: names of the inputs that are parameters and buffers.
    """
    _Layout(gm, constant_nodes(gm, state)).run()


class _Layout:
    """Edits one graph.

    Args:
        gm: the graph; it is edited.
    """

    def __init__(self, gm: GraphModule, constant: set[Node]) -> None:
        self._graph = gm.graph
        self._constant = constant
        self._converted: dict[Node, torch.Tensor] = {}
        """Nodes whose strides are no longer eager's, with the value (a fake tensor) that has these."""
        self._channels_last: dict[Node, Node] = {}
        """By node, its copy in channels last."""
        self._restored: dict[Node, Node] = {}
        """By converted node, its copy with eager's strides."""
        results = gm.graph.output_node().all_input_nodes
        self._in_results = {storage_root(node) for node in results} | set(results)

    def run(self) -> None:
        """Convert what can be converted, in the order of the graph."""
        for node in list(self._graph.nodes):
            if node.op != "call_function" or node in self._constant:
                continue
            if self._is_convolution(node):
                self._convert(node)
            elif not (_keeps_layout(node) and self._follow(node)):
                self._restore_arguments(node)
            if node in self._in_results and node in self._converted:
                self._restore_for_all(node)

    def _is_convolution(self, node: Node) -> bool:
        if node.target is not _CONVOLUTION:
            return False
        x, weight = node.args[0], node.args[1]
        return weight in self._constant and _val(x).dim() in _FORMATS and _val(node).is_contiguous()

    def _convert(self, node: Node) -> None:
        x, weight, *rest = node.args
        new = (self._with_channels_last(x, node), self._with_channels_last(weight, node), *rest)
        self._revalue(node, new)

    def _with_channels_last(self, source: Any, user: Node) -> Node:
        """`source` in channels last, converted before `user` if it is not."""
        layout = _FORMATS[_val(source).dim()]
        if _val(source).is_contiguous(memory_format=layout):
            return source
        if source not in self._channels_last:
            with self._graph.inserting_before(user):
                self._channels_last[source] = emit(
                    self._graph, _CLONE, (source,), like=user, kwargs={"memory_format": layout}
                )
        return self._channels_last[source]

    def _follow(self, node: Node) -> bool:
        """Compute a node on converted arguments; False if eager's strides could not be restored after it."""
        if not any(n in self._converted for n in node.all_input_nodes):
            return True
        before = node.meta["val"]
        parts = before if isinstance(before, (tuple, list)) else [before]
        if not all(part.is_contiguous() for part in parts if isinstance(part, torch.Tensor)):
            return False
        self._revalue(node, node.args)
        return True

    def _revalue(self, node: Node, args: Any) -> None:
        """Give a node other arguments, and propagate the strides of its value."""
        before, node.args = node.meta["val"], args
        given, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        target: Any = node.target
        with torch.no_grad(), no_modes():
            node.meta["val"] = target(*given, **kwargs)
        if not _same_strides(before, node.meta["val"]):
            self._converted[node] = before

    def _restore_arguments(self, node: Node) -> None:
        """Give a node's converted arguments eager's strides."""
        for source in node.all_input_nodes:
            if source in self._converted:
                if source not in self._restored:
                    with self._graph.inserting_before(node):
                        self._restored[source] = self._contiguous(source)
                node.replace_input_with(source, self._restored[source])

    def _contiguous(self, source: Node) -> Node:
        options = {"memory_format": torch.contiguous_format}
        return emit(self._graph, _CLONE, (source,), like=source, kwargs=options)

    def _restore_for_all(self, node: Node) -> None:
        """Give all users of a node eager's strides, since a result shares its memory."""
        users = list(node.users)
        with self._graph.inserting_after(node):
            restored = self._contiguous(node)
        for user in users:
            user.replace_input_with(node, restored)
        del self._converted[node]


def _keeps_layout(node: Node) -> bool:
    if node.target is operator.getitem:
        return not is_view(node)
    if not isinstance(node.target, OpOverload) or is_view(node):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target.name().partition(".")[0] in _KEEP_LAYOUT


def _same_strides(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return all(_same_strides(x, y) for x, y in zip(a, b, strict=True))
    return not isinstance(a, torch.Tensor) or a.stride() == b.stride()


def _val(node: Any) -> torch.Tensor:
    return node.meta["val"]
