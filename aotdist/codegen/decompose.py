"""Decomposes operators of a graph after the trace.

A decomposition is recorded on fakes once for each kind of arguments, and copied for the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from aotdist.aliasing.memory import by_stride
from aotdist.codegen.region_graph import Segment, kind_of
from aotdist.errors import UnsupportedProgram
from aotdist.passes.editing import emit
from aotdist.sizes import is_symbolic
from aotdist.torch_seam.functional import FakeTensor, FakeTensorMode, fake_of_its_own
from aotdist.torch_seam.nodes import Appender, all_nodes, copied_graph
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.proxies import graph_module, record_on_fakes
from aotdist.torch_seam.symbols import SYMBOLIC
from aotdist.torch_seam.trees import pytree

_ATEN = torch.ops.aten


def decompose(
    gm: GraphModule,
    table: Mapping[OpOverload, Callable[..., Any]],
    only: Container[OpOverload] | None = None,
) -> None:
    """Replace each call of an operator in `table`, in branches of `cond` too, by its decomposition, in place.

    Args:
        gm: a private copy of a graph, whose nodes carry `val`.
        table: operators and their decompositions; operators in these are decomposed by it, too.
        only: the operators to look for, of those in `table`; all of them if it is None.

    Raises:
        UnsupportedProgram: a decomposition fails.
    """
    recordings: dict[Hashable, GraphModule | None] = {}
    targets = set(table) if only is None else {op for op in table if op in only}
    for name, branch in gm.named_children():
        if isinstance(branch, GraphModule) and any(node.target in targets for node in all_nodes(branch)):
            own = graph_module(branch, copied_graph(branch.graph))  # other graphs hold the branch, too
            decompose(own, table, only)
            setattr(gm, name, own)
    for node in [node for node in gm.graph.nodes if node.target in targets and not _takes_numbers(node)]:
        kind = kind_of(Segment.of([node]), gm)
        if kind not in recordings:
            try:
                recordings[kind] = _recorded(node, table[node.target], table)
            except Exception as error:  # a decomposition raises what it likes
                reason = str(error).partition("\n")[0] or type(error).__name__
                raise UnsupportedProgram(
                    f"the decomposition of `{node.target}` fails: {reason}",
                    where=node.meta.get("source"),
                    stage="codegen",
                    fix='use backend="fx"; "auto" does for graphs that Inductor refuses',
                ) from error
        if (recorded := recordings[kind]) is not None:
            _put(gm.graph, node, recorded)
            gm.graph.erase_node(node)  # what draws random numbers would outlive the loss of its users
    gm.graph.eliminate_dead_code()


def _takes_numbers(node: Node) -> bool:
    """Whether a node takes a number of Python's that differs from call to call: none can be recorded."""
    return any(isinstance(source.meta.get("val"), (int, float)) for source in node.all_input_nodes)


def inline(
    graph: torch.fx.Graph,
    node: Node,
    decomposition: Callable[..., Any],
    table: Mapping[OpOverload, Callable[..., Any]],
) -> Any:
    """Replace the uses of a node by its decomposition, which is put before the node.

    Args:
        graph: the node's.
        node: a call of an operator or a function.
        decomposition: computes the same.
        table: decompositions of operators in there.

    Returns:
        the node, or the list of nodes, that replaces it; the node itself if it stays whole.
    """
    recorded = _recorded(node, decomposition, table)
    return node if recorded is None else _put(graph, node, recorded)


def _recorded(
    node: Node, decomposition: Callable[..., Any], table: Mapping[OpOverload, Callable[..., Any]]
) -> GraphModule | None:
    """The graph of a decomposition, which takes the node's inputs; None if the node stays whole."""
    inputs = node.all_input_nodes
    fakes = [source.meta["val"] for source in inputs]

    def call(*values: torch.Tensor) -> Any:
        value_of = dict(zip(inputs, values, strict=True))
        args = map_arg(node.args, lambda n: value_of[n])
        kwargs = map_arg(node.kwargs, lambda n: value_of[n])
        made = decomposition(*args, **kwargs)
        return tuple(made) if isinstance(made, tuple) else made  # a named one would be a node of its own

    with _fake_mode_of(node):  # for tensors that the decomposition creates
        # Asked first whether it stays whole, as recording takes 1 ms for each matmul.
        # A number (a size that data has decided) stays: what it is in the trace, it need not be in a call.
        if isinstance(call(*fakes), (type(NotImplemented), *SYMBOLIC, int, float)):
            return None
        return record_on_fakes(call, fakes, table)


def _fake_mode_of(node: Node) -> AbstractContextManager[Any]:
    values = pytree.tree_leaves([each.meta.get("val") for each in (node, *node.all_input_nodes)])
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), nullcontext())


def _put(graph: torch.fx.Graph, node: Node, recorded: GraphModule) -> Any:
    """Copy a decomposition of a node before it, and let the copies replace it; returns them."""
    copies = dict(zip(recorded.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with graph.inserting_before(node), _fake_mode_of(node) as mode:
        for step in recorded.graph.nodes:
            if step.op == "get_attr":
                copies[step] = _constant(graph, node, getattr(recorded, step.target), mode)
            elif step.op == "call_function":
                args, kwargs = map_arg((step.args, step.kwargs), copies.__getitem__)
                copies[step] = _like(node, emit(graph, step.target, args, node, kwargs=kwargs))
        (result,) = recorded.graph.output_node().args
        return _replace(node, map_arg(result, copies.__getitem__))


def _constant(graph: torch.fx.Graph, node: Node, held: torch.Tensor, mode: FakeTensorMode | None) -> Node:
    """A tensor that the decomposition of a node makes of numbers, as an attribute of the graph's module."""
    owner = graph.owning_module
    name = next(name for at in itertools.count() if not hasattr(owner, name := f"constant_{at}"))
    setattr(owner, name, held)
    meta = {**node.meta, "val": held if mode is None else fake_of_its_own(mode, held)}
    return Appender(graph).add("get_attr", name, (), {}, name, meta)


def _like(node: Node, made: Node) -> Node:
    made.meta = {**node.meta, "val": made.meta["val"], "original_aten": made.target}
    return made


def _replace(node: Node, result: Any) -> Any:
    """Replace the uses of a node; returns what replaces it."""
    if isinstance(result, Node):
        replacement = _with_strides_of(node, result)
        node.replace_all_uses_with(replacement)
        return replacement
    replacements = list(result)
    for pick in list(node.users):
        assert pick.args[0] is node, "several results are read one by one"
        position: Any = pick.args[1]
        replacements[position] = _replace(pick, result[position])
        node.graph.erase_node(pick)
    return replacements


def _with_strides_of(node: Node, result: Node) -> Node:
    """`result` with the dimensions and strides of what it replaces: what follows relies on them."""
    traced, made = node.meta.get("val"), result.meta.get("val")
    if not isinstance(traced, torch.Tensor) or not isinstance(made, torch.Tensor):
        return result
    if traced.dim() == 0 != made.dim():  # the loss of one sample, not reduced
        return _like(node, emit(node.graph, _ATEN.view.default, (result, ()), node))
    if is_symbolic((*traced.shape, *traced.stride())) or _strides_of(traced) == _strides_of(made):
        return result
    order = by_stride(traced.shape, traced.stride())
    if not traced.permute(order).is_contiguous():  # no operator copies into gaps
        return result
    back = [order.index(dim) for dim in range(traced.dim())]
    options = {"memory_format": torch.contiguous_format}
    permuted = _like(node, emit(node.graph, _ATEN.permute.default, (result, order), node))
    copied = _like(node, emit(node.graph, _ATEN.clone.default, (permuted,), node, kwargs=options))
    return _like(node, emit(node.graph, _ATEN.permute.default, (copied, back), node))


def _strides_of(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
