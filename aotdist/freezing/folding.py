"""Constant folding: what depends on state alone is computed once, by the operators of the graph itself.

A constant is identified by the expression that computes it, from operators down to names of parameters. So
another call of the same module (with another batch size) finds it again, without the parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from aotdist.codegen.fx import attribute_of
from aotdist.freezing.state import FrozenState
from aotdist.partition.builder import GraphBuilder
from aotdist.partition.traits import is_collective, is_effectful, is_wait, storage_root, value_bytes
from aotdist.torch_seam.ambient import autocast_off
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.proxies import graph_module
from aotdist.torch_seam.tensors import storage_id

FREE_BYTES = 2**20
"""A constant may take this much memory, however small the parameters are that it is computed from."""

_EMPTY = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
    }
)
"""Allocations, which other nodes fill."""


def constant_nodes(gm: GraphModule, state: Collection[str]) -> set[Node]:
    """Nodes whose value is the same in every call.

    Args:
        state: names of the inputs that are parameters and buffers.
    """
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            is_constant = node.name in state
        elif node.op == "get_attr":
            is_constant = isinstance(attribute_of(gm, node), torch.Tensor)
        else:
            is_constant = _computes_alone(node) and all(n in found for n in node.all_input_nodes)
        if is_constant:
            found.add(node)
    return found


def _computes_alone(node: Node) -> bool:
    """Whether the node is a pure function of its arguments."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target in _EMPTY:
        return False
    return not (is_effectful(node) or is_collective(node) or is_wait(node))


class Constants:
    """The constants of all calls of one module."""

    def __init__(self, state: FrozenState) -> None:
        self._state = state
        self._numbers: dict[Hashable, int] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._names: dict[int, str] = {}

    def num_bytes(self) -> int:
        """Bytes of memory that the constants hold; shared memory is counted once."""
        storages = {storage_id(value): value.untyped_storage().nbytes() for value in self._values.values()}
        return sum(storages.values())

    def fold(
        self, gm: GraphModule, state: Mapping[str, str]
    ) -> tuple[GraphModule, Mapping[str, torch.Tensor]]:
        """The graph with constants for what does not depend on arguments.

        Memory of results is allocated at each call, as in eager: the caller may write it.

        Args:
            state: names of parameters and buffers, by the input that each is.

        Returns:
            a graph that takes the arguments alone and reads the constants as attributes; the constants by
            name.

        Raises:
            UnsupportedProgram: a constant has to be computed from a parameter that was discarded.
        """
        constant = constant_nodes(gm, state.keys())
        numbers = self._numbered(gm, constant, state)
        folded = _worth_folding(gm, constant)
        edges = {node for node in folded if _is_edge(node, folded)}
        self._evaluate(gm, edges, numbers, state)
        builder = GraphBuilder(gm)
        held: dict[str, Any] = {}
        constants: dict[str, torch.Tensor] = {}
        for node in gm.graph.nodes:
            if node in edges:
                name = self._name(numbers[node], state.get(node.name, node.name))
                held[name] = constants[name] = self._values[numbers[node]]
                builder.env[node] = builder.graph.create_node("get_attr", name, name=name)
                builder.env[node].meta = dict(node.meta)
            elif node.op == "placeholder" and node not in folded:
                builder.placeholder(node)
            elif node.op != "output" and node not in folded:
                builder.copy(node)
                if node.op == "get_attr":
                    held[str(node.target)] = attribute_of(gm, node)
        builder.graph.output(map_arg(gm.graph.output_node().args[0], builder.env.__getitem__))
        return graph_module(held, builder.graph), constants

    def _numbered(self, gm: GraphModule, constant: set[Node], state: Mapping[str, str]) -> dict[Node, int]:
        """A number for each constant node; equal expressions have equal numbers in all graphs."""
        found: dict[Node, int] = {}
        for node in gm.graph.nodes:
            if node not in constant:
                continue
            if node.op == "placeholder":
                key: Hashable = ("state", state[node.name])
            elif node.op == "get_attr":
                key = ("literal", *_content(attribute_of(gm, node)))
            else:
                key = (node.target, _hashable(node.args, found), _hashable(node.kwargs, found))
            found[node] = self._numbers.setdefault(key, len(self._numbers))
        return found

    def _name(self, number: int, wanted: str) -> str:
        """A constant's attribute: named after the parameter that it is, or the node that computes it."""
        if number not in self._names:
            taken, stem = set(self._names.values()), "constant_" + wanted.replace(".", "_")
            candidates = (stem if k == 0 else f"{stem}_{k}" for k in range(len(taken) + 1))
            self._names[number] = next(name for name in candidates if name not in taken)
        return self._names[number]

    def _evaluate(
        self,
        gm: GraphModule,
        wanted: set[Node],
        numbers: Mapping[Node, int],
        state: Mapping[str, str],
    ) -> None:
        """Compute the constants that have no value yet; intermediates are freed after their last use."""
        values, order = self._values, list(gm.graph.nodes)
        # A view keeps its base in memory anyway: with a value of its own, other views find the base.
        kept = wanted | {root for root in map(storage_root, wanted) if root.op == "call_function"}
        needed = {node for node in wanted if numbers[node] not in values}
        for node in reversed(order):
            if node in needed and numbers[node] not in values:
                needed.update(node.all_input_nodes)
        builder, given, new = GraphBuilder(gm), list[torch.Tensor](), list[Node]()
        for node in filter(needed.__contains__, order):
            if numbers[node] in values:
                builder.placeholder(node)
                given.append(values[numbers[node]])
                continue
            if node.op == "placeholder":
                builder.placeholder(node)
                given.append(self._state.value(state[node.name]))
            else:
                builder.copy(node)
            new += [node] if node in kept else []
        part = builder.finish([builder.env[node] for node in new], (), ()).gm
        with torch.inference_mode(False), torch.no_grad(), autocast_off():
            computed = Interpreter(part).run(*given)
        values.update(zip((numbers[node] for node in new), computed, strict=True))


def _worth_folding(gm: GraphModule, constant: set[Node]) -> set[Node]:
    """Constant nodes but for memory of results, and what takes more memory than its parameters do."""
    results = [n for n in gm.graph.output_node().all_input_nodes if n in constant]
    own = {root for root in map(storage_root, results) if root.op == "call_function"}
    left = set(constant)
    sizes = _bytes_of_state(gm, constant)
    for node in reversed(list(gm.graph.nodes)):
        if node in left and node.op == "call_function" and _is_edge(node, left):
            root = storage_root(node)
            is_value = isinstance(node.meta.get("val"), torch.Tensor)
            num_bytes = 0 if root.op != "call_function" else value_bytes(root)
            if root in own or not is_value or num_bytes > max(FREE_BYTES, sizes[node]):
                left.discard(node)
    return left


def _is_edge(node: Node, constant: set[Node]) -> bool:
    """Whether a node that is not constant uses this constant node."""
    return node in constant and any(user not in constant for user in node.users)


def _bytes_of_state(gm: GraphModule, constant: set[Node]) -> dict[Node, int]:
    """Bytes of the parameters and buffers that each constant is computed from."""
    leaves: dict[Node, frozenset[Node]] = {}
    for node in gm.graph.nodes:
        if node in constant:
            own = frozenset([node]) if node.op != "call_function" else frozenset[Node]()
            leaves[node] = own.union(*(leaves[n] for n in node.all_input_nodes))
    return {node: sum(map(value_bytes, found)) for node, found in leaves.items()}


def _content(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """What identifies a literal tensor of the program."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return (tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), data)


def _hashable(argument: Any, numbers: Mapping[Node, int]) -> Hashable:
    if isinstance(argument, Node):
        return ("node", numbers[argument])
    if isinstance(argument, (list, tuple)):
        return tuple(_hashable(item, numbers) for item in argument)
    if isinstance(argument, Mapping):
        return tuple((key, _hashable(item, numbers)) for key, item in argument.items())
    if isinstance(argument, slice):
        return ("slice", argument.start, argument.stop, argument.step)
    return (type(argument), repr(argument) if isinstance(argument, float) else argument)
