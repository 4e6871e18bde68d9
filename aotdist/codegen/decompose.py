"""Decomposes operators of a graph after the trace, as the trace would have done."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from aotdist.torch_seam.functional import FakeTensor
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.proxies import record_on_fakes
from aotdist.torch_seam.symbols import SYMBOLIC


def decompose(
    gm: GraphModule,
    table: Mapping[OpOverload, Callable[..., Any]],
    only: Container[OpOverload] | None = None,
) -> None:
    """Replace each call of an operator in `table` by what its decomposition does, in place.

    Args:
        gm: a private copy of a graph, whose nodes carry `val`.
        table: operators and their decompositions; operators in these are decomposed by it, too.
        only: the operators to look for, of those in `table`; all of them if it is None.
    """
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in table and (only is None or node.target in only):
            if inline(gm.graph, node, table[node.target], table) is not node:
                gm.graph.erase_node(node)  # what draws random numbers would outlive the loss of its users
    gm.graph.eliminate_dead_code()


def inline(
    graph: torch.fx.Graph,
    node: Node,
    decomposition: Callable[..., Any],
    table: Mapping[OpOverload, Callable[..., Any]],
) -> Any:
    """Replace a node by its decomposition, recorded on the node's fake inputs and copied before the node.

    Args:
        graph: the node's.
        node: a call of an operator or a function.
        decomposition: computes the same.
        table: decompositions of operators in there.

    Returns:
        the node, or the list of nodes, that replaces it; the node itself if it stays whole.
    """
    inputs = list(dict.fromkeys(node.all_input_nodes))
    fakes = [source.meta["val"] for source in inputs]

    def call(*values: torch.Tensor) -> Any:
        value_of = dict(zip(inputs, values, strict=True))
        args = map_arg(node.args, lambda n: value_of[n])
        kwargs = map_arg(node.kwargs, lambda n: value_of[n])
        made = decomposition(*args, **kwargs)
        return tuple(made) if isinstance(made, tuple) else made  # a named one would be a node of its own

    modes = (fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))
    with next(modes, nullcontext()):  # for tensors that the decomposition creates
        # Asked first whether it stays whole, as recording takes 1 ms for each matmul.
        # A number (a size that data has decided) stays: what it is in the trace, it need not be in a call.
        if isinstance(call(*fakes), (type(NotImplemented), *SYMBOLIC, int, float)):
            return node
        recorded = record_on_fakes(call, fakes, table)
    copies = dict(zip(recorded.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(node):
        for step in recorded.graph.nodes:
            if step.op == "call_function":
                copies[step] = graph.node_copy(step, lambda n: copies[n])
                copies[step].meta = {**node.meta, "val": step.meta.get("val"), "original_aten": step.target}
    (result,) = recorded.graph.output_node().args
    replacement = map_arg(result, lambda n: copies[n])
    _replace(node, replacement)
    return replacement


def _replace(node: Node, result: Any) -> None:
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
        return
    for pick in list(node.users):
        assert pick.args[0] is node, "several results are read one by one"
        _replace(pick, result[pick.args[1]])
        node.graph.erase_node(pick)
