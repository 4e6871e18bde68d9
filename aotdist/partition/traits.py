"""What an operator is, read off its schema and tags: view, random, collective, effect.

And which nodes share memory, and how many bytes of it there are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from aotdist.torch_seam.nodes import inputs_of
from aotdist.torch_seam.operators import OpOverload, cached_by_operator
from aotdist.torch_seam.symbols import SYMBOLIC, estimate

_COLLECTIVES = "_c10d_functional"
WAIT = torch.ops._c10d_functional.wait_tensor.default
"""Waits for a collective."""

_VIEWS_IN_FACT = frozenset({"aten::_unsafe_view"})
"""Operators whose result shares its argument's storage although their schema does not say so."""

_CHECKS = frozenset({torch.ops.aten._linalg_check_errors.default})
"""Operators that do nothing but raise."""

_SOMETIMES_VIEWS = frozenset({"aten::reshape", "aten::contiguous", "aten::to", "aten::flatten"})
"""Operators whose schema promises a view but which copy when the layout asks for it."""


@cached_by_operator
def op_is_view(op: OpOverload) -> bool:
    """Whether the operator's results are views of its first argument, see `is_view`."""
    name = op.name().partition(".")[0]
    if name in _SOMETIMES_VIEWS:
        return False
    return name in _VIEWS_IN_FACT or op.is_view


def is_view(node: Node) -> bool:
    """Whether the result shares storage with `node.args[0]` and costs nothing to make again."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return isinstance(node.target, OpOverload) and op_is_view(node.target)


def may_share(node: Node) -> bool:
    """Whether the result may share memory with an argument, or is of a collective that still reads it."""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    name = node.target.name().partition(".")[0]
    return op_is_view(node.target) or name in _SOMETIMES_VIEWS or node.target.namespace == _COLLECTIVES


def is_size(node: Node) -> bool:
    """Whether the node is an argument that is a symbolic number: both halves take it."""
    return node.op == "placeholder" and isinstance(node.meta.get("val"), SYMBOLIC)


def is_getitem(node: Node) -> bool:
    """Whether the node picks one result of an operator that has several."""
    return node.target is operator.getitem


def is_wait(node: Node) -> bool:
    """Whether the node waits for a collective."""
    return node.target is WAIT


@cached_by_operator
def _op_is_collective(op: OpOverload) -> bool:
    return op.namespace == _COLLECTIVES and op is not WAIT


def is_collective(node: Node) -> bool:
    """Whether the node starts a collective."""
    return isinstance(node.target, OpOverload) and _op_is_collective(node.target)


@cached_by_operator
def _op_is_random(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def is_late(node: Node) -> bool:
    """Whether a node was recorded in the backward."""
    return node.meta.get("phase") == "backward"


def phase_of(node: Node) -> str | None:
    """Whether a node belongs to the forward or to a backward, that of the program itself included."""
    return "backward" if "function" in node.meta else node.meta.get("phase")


def is_random(node: Node) -> bool:
    """Whether the node draws from a random generator."""
    return isinstance(node.target, OpOverload) and _op_is_random(node.target)


@cached_by_operator
def op_is_effectful(op: OpOverload) -> bool:
    """Whether the operator runs for more than its results, see `is_effectful`."""
    probe = torch.fx.Graph().create_node("call_function", op)
    return op is not WAIT and (op in _CHECKS or probe.is_impure())


def is_effectful(node: Node) -> bool:
    """Whether the node must run even when nothing uses its result.

    Random operators do: eager advances the generator. Waits do not: a collective that nobody
    reads is dropped together with its wait.
    """
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return op_is_effectful(node.target)
    return node.target is not operator.getitem and node.is_impure()


def is_copy_back(node: Node) -> bool:
    """Whether the node is `copy_` into a graph argument, the one mutation that graphs may hold."""
    if node.target is not torch.ops.aten.copy_.default:
        return False
    target: Any = node.args[0]
    return isinstance(target, Node) and target.op == "placeholder"


_SCALAR_BYTES = 8
"""What a saved Python or symbolic number is taken to cost."""


def view_base(node: Node) -> Node:
    """The node that `node` is a view of, directly or through other views; itself if it is none."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def storage_root(node: Node) -> Node:
    """The node that allocated the memory which `node`'s result lives in; waiting allocates none."""
    while (is_view(node) or is_wait(node)) and (inputs := inputs_of(node)):
        node = next(iter(inputs))
    return node


def value_bytes(node: Node) -> int:
    """Bytes of the node's own result; of all its results when it has several."""
    return _bytes_of(node.meta.get("val"))


def _bytes_of(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return estimate(value.numel()) * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(_bytes_of(item) for item in value)
    return 0 if value is None else _SCALAR_BYTES


def storage_bytes(nodes: Iterable[Node], free: Iterable[Node]) -> int:
    """Bytes that keeping `nodes` costs: shared storage once, storage of `free` nodes not at all."""
    roots = {storage_root(node) for node in nodes} - {storage_root(node) for node in free}
    return sum(value_bytes(root) for root in roots if root.op != "get_attr")
