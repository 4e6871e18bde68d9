"""Breaks up operators that graph passes introduced after the trace, as the trace would have done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from aotdist.torch_seam import OpOverload, record_on_fakes


def decompose(gm: GraphModule, table: Mapping[OpOverload, Callable[..., Any]]) -> None:
    """Replace each call of an operator in `table` by what its decomposition does, in place.

    Args:
        gm: a private copy of a graph, whose nodes carry `val`.
        table: operators and their decompositions.
    """
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in table:
            _inline(gm.graph, node, table)
    gm.graph.eliminate_dead_code()


def _inline(graph: torch.fx.Graph, node: Node, table: Mapping[OpOverload, Callable[..., Any]]) -> None:
    """Record the decomposition on the node's fake inputs, and copy what it did before the node."""
    inputs = list(dict.fromkeys(node.all_input_nodes))
    fakes = [source.meta["val"] for source in inputs]
    decomposition = table[cast("OpOverload", node.target)]

    def call(*values: torch.Tensor) -> Any:
        value_of = dict(zip(inputs, values, strict=True))
        args = map_arg(node.args, lambda n: value_of[n])
        kwargs = map_arg(node.kwargs, lambda n: value_of[n])
        return decomposition(*args, **kwargs)

    if call(*fakes) is NotImplemented:  # it stays whole; asked first, as recording takes 1 ms for each matmul
        return
    recorded = record_on_fakes(call, fakes, table)
    copies = dict(zip(recorded.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(node):
        for step in recorded.graph.nodes:
            if step.op == "call_function":
                copies[step] = graph.node_copy(step, lambda n: copies[n])
                copies[step].meta = {**node.meta, "val": step.meta.get("val"), "original_aten": step.target}
    (result,) = recorded.graph.output_node().args
    _replace(node, map_arg(result, lambda n: copies[n]))


def _replace(node: Node, result: Any) -> None:
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
        return
    for pick in list(node.users):
        assert pick.args[0] is node, "several results are read one by one"
        pick.replace_all_uses_with(result[pick.args[1]])
