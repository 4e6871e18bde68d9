"""Graphs as JSON: node by node, with the metadata of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from aotdist.artifacts.typed import NodeAt, Shape, damaged, is_name, is_plain, require
from aotdist.artifacts.values import Json, Values
from aotdist.codegen.ahead import PackedLaunch
from aotdist.codegen.fx import attribute_of
from aotdist.errors import UnsupportedProgram
from aotdist.program import Graph, Slot
from aotdist.torch_seam.functional import FakeTensorMode, new_fake
from aotdist.torch_seam.nodes import Appender
from aotdist.torch_seam.operators import HigherOrderOperator, OpOverload, argument_names
from aotdist.torch_seam.proxies import graph_module
from aotdist.torch_seam.symbols import is_open

META: Mapping[str, Any] = {
    "phase": Literal["forward", "backward"],
    **dict.fromkeys(("source", "module", "function", "unit"), str),
    **dict.fromkeys(("seq_nr", "serial"), int),
    **dict.fromkeys(("grad", "overwritten", "strides_asked"), bool),
    "policy": Literal["must_save", "must_recompute"],
}
"""The keys of `node.meta` that are written, besides `val` (see `aotdist.program.Graph`), with their types."""


class Graphs:
    """Writes the graphs of one program as JSON, and reads them.

    The metadata of equal tensors is written once, as a `Shape`, and read as one fake tensor.

    Args:
        values: writes and reads the constants in graphs.
        fake_mode: the mode of the fake tensors that are made.
        shapes: the shapes that were read.
        to_compile: whether the graphs go to a compiler of this machine. Process groups then keep PyTorch's
            names, and each node gets a fake tensor of its own, since compilers look which values share
            memory.
    """

    def __init__(
        self,
        values: Values,
        fake_mode: FakeTensorMode,
        shapes: Sequence[Shape] = (),
        *,
        to_compile: bool = False,
    ) -> None:
        self._values = values
        self._to_compile = to_compile
        self._fake_mode = fake_mode
        self._positions = {shape: at for at, shape in enumerate(shapes)}
        self._shapes = shapes
        self._fakes = [] if to_compile else [self._fake(shape) for shape in shapes]

    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of all tensors written so far, which reading the graphs takes."""
        return tuple(self._positions)

    def written(self, graph: Graph) -> Json:
        """`graph` as JSON.

        Raises:
            UnsupportedProgram: it holds something that cannot be written.
        """
        ins, outs = self._values.written(graph.ins, "a graph"), self._values.written(graph.outs, "a graph")
        return {"ins": ins, "outs": outs, "nodes": self._nodes(graph.gm)}

    def _nodes(self, gm: GraphModule) -> list[Json]:
        position = {node: at for at, node in enumerate(gm.graph.nodes)}
        return [self._node(gm, node, position) for node in gm.graph.nodes]

    def _node(self, gm: GraphModule, node: Node, position: Mapping[Node, int]) -> Json:
        where = f"the node `{node.name}`"
        json: dict[str, Json] = {"name": node.name, "op": node.op, "target": node.target}
        if node.op == "get_attr":
            held = attribute_of(gm, node)
            is_graph = isinstance(held, GraphModule)
            json["holds"] = {"nodes": self._nodes(held)} if is_graph else self._values.written(held, where)
        elif node.op == "call_function":
            json["target"] = self._values.written(node.target, where)

        def at(read: Node) -> Any:
            return NodeAt(position[read])

        arguments: Any = {"args": tuple(node.args), "kwargs": dict(node.kwargs)}
        for key, value in arguments.items():
            if value:
                json[key] = self._values.written(map_arg(value, at), where)
        self._name_group(node, json)
        json["meta"] = {key: node.meta[key] for key in META if node.meta.get(key) is not None}
        if "source" in json["meta"] and not self._to_compile:
            json["meta"]["source"] = without_folder(node.meta["source"])
        return json | {"val": self._val(node.meta.get("val"), where)}

    def _val(self, val: Any, where: str) -> Json:
        """The `val` of a node: the position of a shape, or a list of several."""
        if isinstance(val, (tuple, list)):
            return [self._val(part, where) for part in val]
        if isinstance(val, torch.Tensor):
            if any(map(is_open, (*val.shape, *val.stride()))):
                raise UnsupportedProgram(
                    f"{where} has symbolic sizes",
                    stage="store",
                    fix="write it with numbers for sizes: without `dynamic_shapes`, or `dynamic=True`",
                )
            # Sizes that were symbols may be numbers of SymPy's types.
            shape = Shape(tuple(map(int, val.shape)), tuple(map(int, val.stride())), val.dtype, val.device)
            return self._positions.setdefault(shape, len(self._positions))
        return None if val is None else {"other": self._values.written(val, where)}

    def _name_group(self, node: Node, json: dict[str, Json]) -> None:
        """Replace the name of a process group, which is this process's own, by a `GroupName`."""
        names = argument_names(node.target) if isinstance(node.target, OpOverload) else []
        if self._to_compile or "group_name" not in names or names.index("group_name") >= len(node.args):
            return
        position = names.index("group_name")
        known = self._values.live.groups.get(str(node.args[position]))
        if known is None:
            raise UnsupportedProgram(
                f"`{node.name}` communicates in a process group that is no axis of a tensor's mesh",
                stage="store",
                fix="communicate along a `DeviceMesh` that tensors of the call are on",
            )
        json["args"][position] = {"is": "group", "name": self._values.written(known, "a process group")}

    def read(self, json: Json) -> Graph:
        """The graph that was written as `json`.

        Raises:
            BadArtifact: `json` is no graph.
        """
        ins, outs = (
            require(self._values.read(json[key]), tuple[Slot, ...], "what a graph takes or returns")
            for key in ("ins", "outs")
        )
        return Graph(self._module(json["nodes"]), ins, outs)

    def _module(self, nodes: Sequence[Json]) -> GraphModule:
        graph, root = torch.fx.Graph(), torch.nn.Module()
        made: list[Node] = []
        for json in nodes:
            made.append(self._made(graph, root, json, made))
        return graph_module(root, graph)

    def _made(self, graph: torch.fx.Graph, root: torch.nn.Module, json: Json, before: Sequence[Node]) -> Node:
        name, op = json["name"], require(json["op"], _Op, "the kind of a node")
        target = self._values.read(json["target"])
        if op == "call_function":
            require(target, Callable[..., Any] | HigherOrderOperator | PackedLaunch, "what a node calls")
        elif not _is_target(target):
            raise damaged(f"a graph holds something as {target!r}")
        if op == "get_attr":
            held = json["holds"]
            nested = type(held) is dict and "nodes" in held
            value = self._module(held["nodes"]) if nested else self._values.read(held)
            setattr(root, target, require(value, GraphModule | torch.Tensor, "what a graph holds"))

        def linked(value: Any) -> Any:
            return before[value.position] if isinstance(value, NodeAt) else value

        args, kwargs = (
            map_aggregate(self._argument(json[key]) if key in json else none, linked)
            for key, none in (("args", ()), ("kwargs", {}))
        )
        meta = {**_read_meta(json["meta"]), "val": self._read_val(json["val"])}
        node = Appender(graph).add(op, target, args, kwargs, name, meta)  # type: ignore[arg-type]
        if node.name != name:
            raise damaged(f"a node is called {name!r}, which is no name or that of another")
        return node

    def _argument(self, json: Json) -> Any:
        """The arguments of a node: other nodes, numbers, texts, and names of PyTorch's."""
        value = self._values.read(json)
        if not _is_argument(value):
            raise damaged("a node is given what no graph of ours holds")
        return value

    def _read_val(self, json: Json, most_nested: int = 3) -> Any:
        if isinstance(json, list) and most_nested:
            return tuple(self._read_val(part, most_nested - 1) for part in json)
        if type(json) is int and 0 <= json < len(self._shapes):
            return self._fake(self._shapes[json]) if self._to_compile else self._fakes[json]
        if json is None:
            return None
        return require(self._values.read(require(json, dict, "a value")["other"]), int | float, "a value")

    def _fake(self, shape: Shape) -> torch.Tensor:
        return new_fake(self._fake_mode, shape.size, shape.stride, shape.dtype, shape.device)


_Op: TypeAlias = Literal["placeholder", "get_attr", "call_function", "output"]


def _is_target(target: Any) -> bool:
    return is_name(target) and not target.startswith("__")


def _is_argument(value: Any) -> bool:
    match value:
        case tuple() | list():
            return all(map(_is_argument, value))
        case dict():
            return all(is_name(key) and _is_argument(part) for key, part in value.items())
        case slice():
            return all(map(_is_argument, (value.start, value.stop, value.step)))
        case _:
            return isinstance(value, NodeAt) or value is ... or is_plain(value)


def _read_meta(json: Json) -> dict[str, Any]:
    """The `meta` of a node: numbers and texts under the keys in `META`."""
    meta = require(json, dict, "what a node carries")
    for key, value in meta.items():
        if key not in META:
            raise damaged(f"a node carries {key!r}")
        require(value, META[key], f"`{key}` of a node")
    return meta


def without_folder(source: str) -> str:
    """A line of source (`file:line   code`), its file relative to the package's or program's folder."""
    path, line, code = source.partition(":")
    if not os.path.isabs(path):
        return source
    folders = sorted((*sys.path, str(Path.cwd())), key=len, reverse=True)
    inside = next((folder for folder in folders if folder and path.startswith(folder + os.sep)), None)
    return (os.path.relpath(path, inside) if inside else os.path.basename(path)) + line + code
