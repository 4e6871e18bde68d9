"""A graph of Dynamo as a function of named tensors and constants, which `capture` can take.

Dynamo passes dynamic sizes as numbers, beside the tensors that have them: each is read off its tensor
instead. Other integers become the size of an empty tensor. Dynamic floats come as tensors and become numbers
again, since eager computes with numbers. Objects (meshes) become constants, compared by identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import GraphModule, Node

from aotdist.capture.constants import is_constant
from aotdist.dynamo.replay import Replay, as_written, distinct
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.dynamo import (
    dynamo_source,
    grad_mode_left_by,
    is_of_hooks,
    is_wrapped_number,
)
from aotdist.torch_seam.operators import HigherOrderOperator
from aotdist.torch_seam.symbols import expression, open_sizes

Kind = Literal["tensors", "size", "integer", "float", "other"]


SizePlace: TypeAlias = tuple[int, int, int]
"""Where a size is read: position of the input, position of the tensor in it, dimension."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a graph.

    Args:
        name: as the user would write it.
        kind: `tensors`: a tensor, or a list of them; `size`: of one of the tensors; `integer`: any other;
            `float`, which comes as a tensor; `other`: a constant or an object.
        dims: the dynamic dimensions of each of its tensors.
        place: where a `size` is read.
    """

    name: str
    kind: Kind
    dims: tuple[frozenset[int], ...] = ()
    place: SizePlace | None = None


@dataclass(frozen=True, slots=True)
class DynamoGraph:
    """A graph, and its inputs.

    Args:
        gm: the graph.
        inputs: of the graph, in order.
        left_grad_mode: the grad mode that the graph leaves behind; None if it does not set it.
        objects: arguments that are neither tensors nor constants, by a unique name. They are kept alive, so
            that no other object gets their address.
    """

    gm: GraphModule
    inputs: tuple[Input, ...]
    left_grad_mode: bool | None
    objects: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, gm: GraphModule) -> DynamoGraph:
        """Read the inputs of a graph.

        Raises:
            UnsupportedProgram: it has hooks, which differ from call to call.
        """
        nodes = gm.graph.find_nodes(op="placeholder")
        names = distinct(as_written(dynamo_source(node) or str(node.target)) for node in nodes)
        sizes = _first_places([node.meta.get("example_value") for node in nodes])
        inputs = tuple(_input(name, node, sizes) for name, node in zip(names, nodes, strict=True))
        return cls(gm, inputs, grad_mode_left_by(gm))

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        """The arguments of a call of the graph as tensors and constants, by name; sizes are left out."""
        return {
            each.name: self._argument(each.kind, value)
            for each, value in zip(self.inputs, values, strict=True)
            if each.kind != "size"
        }

    def open_dims(self, named: Mapping[str, Any]) -> dict[int, frozenset[int]]:
        """The dynamic dimensions of these arguments, by the `id` of the tensor."""
        found: dict[int, frozenset[int]] = {}
        for each in self.inputs:
            if each.kind == "tensors":
                for tensor, dims in zip(_tensors(named[each.name]), each.dims, strict=True):
                    found[id(tensor)] = found.get(id(tensor), frozenset()) | dims
            elif each.kind == "integer" and isinstance(named[each.name], torch.Tensor):
                found[id(named[each.name])] = frozenset((0,))
        return {identity: dims for identity, dims in found.items() if dims}

    def run(self, **named: Any) -> Any:
        """Run the graph node by node, in a trace or eagerly."""
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # see `left_grad_mode`
            return Replay(self.gm).run(*(self._value(each, named) for each in self.inputs))

    def _argument(self, kind: Kind, value: Any) -> Any:
        match kind:
            case "float":
                return value.item()
            case "integer" if value >= 0:
                return torch.empty(value, 0)
            case "other" if not is_constant(value):
                name = f"{type(value).__name__} at {id(value):#x}"
                self.objects[name] = value
                return name
            case _:
                return value

    def _value(self, each: Input, named: Mapping[str, Any]) -> Any:
        """The value of an input; the inverse of `_argument`."""
        if each.place is not None:
            owner, number, dim = each.place
            return _tensors(named[self.inputs[owner].name])[number].size(dim)
        value = named[each.name]
        match each.kind:
            case "integer" if isinstance(value, torch.Tensor):
                return value.size(0)
            case "other" if isinstance(value, str):
                return self.objects.get(value, value)
            case _:
                return value


def _tensors(value: Any) -> Sequence[Any]:
    """The tensors of an input: itself, or those of a list, which tapes take."""
    return value if isinstance(value, (list, tuple)) else (value,)


def _first_places(examples: Sequence[Any]) -> dict[str, SizePlace]:
    """For each symbol, the first tensor and dimension of that size."""
    found: dict[str, SizePlace] = {}
    for position, example in enumerate(examples):
        for number, tensor in enumerate(_tensors(example) if _is_of_tensors(example) else ()):
            for dim, size in open_sizes(tensor):
                found.setdefault(expression(size), (position, number, dim))
    return found


def _is_of_tensors(example: Any) -> bool:
    return all(isinstance(each, torch.Tensor) for each in _tensors(example))


def _input(name: str, node: Node, places: Mapping[str, SizePlace]) -> Input:
    example = node.meta.get("example_value")
    if isinstance(example, torch.SymInt):
        place = places.get(expression(example))
        return Input(name, "integer") if place is None else Input(name, "size", place=place)
    if is_of_hooks(example):
        raise UnsupportedProgram(
            "Dynamo compiles a hook together with the program that registers it, for a compiled backward",
            stage="capture",
            fix="call the program before `compile_backward()`: Dynamo breaks the graph at the hook then",
        )
    if not _is_of_tensors(example):
        return Input(name, "other")
    if is_wrapped_number(node) and all(_reads_number(user) for user in node.users):
        return Input(name, "float")
    dims = tuple(frozenset(dim for dim, _ in open_sizes(tensor)) for tensor in _tensors(example))
    return Input(name, "tensors", dims)


def _reads_number(node: Node) -> bool:
    """Whether a node reads the number inside of a tensor (`item`), itself or in a body that it calls."""
    if isinstance(node.target, HigherOrderOperator):
        return True
    return node.op == "call_method" and node.target == "item"
