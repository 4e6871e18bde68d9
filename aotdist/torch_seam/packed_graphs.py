"""Graphs in a twentieth of their memory, for as long as nobody looks at them.

A node costs a kilobyte, and what it says of its value another. Packed, a graph is what its nodes say,
compressed: 26 bytes a node of a 12-layer encoder. What is neither text nor number (operators, dtypes,
symbols, constants) is kept as it is, once each.
"""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import io
import pickle
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from aotdist.torch_seam.functional import FakeTensor, FakeTensorMode, new_fake
from aotdist.torch_seam.modes import torch_functions_off
from aotdist.torch_seam.nodes import add_node
from aotdist.torch_seam.proxies import graph_module


class HeldGraph:
    """A graph module, packed or not. The same object is given out for as long as anybody holds it."""

    __slots__ = ("_last", "_module", "_packed")

    def __init__(self, module: GraphModule) -> None:
        self._module: GraphModule | None = module
        self._packed: _Packed | None = None
        self._last = weakref.ref(module)

    def module(self) -> GraphModule:
        """The module; a packed one is made anew where nobody holds it."""
        found = self._module or self._last()
        if found is None:
            assert self._packed is not None, "packed, as nobody holds it"
            found = self._packed.unpacked()
            self._last = weakref.ref(found)
        return found

    def pack(self, places: Places | None = None) -> None:
        """Hold it packed from now on; `places` are for graphs that have values in common."""
        if self._module is not None:
            self._packed = self._packed or _Packed.of(self._module, places or Places())
            self._module = None

    def num_bytes(self) -> int:
        """Of what the nodes say, packed; 0 if it is not."""
        return 0 if self._packed is None else len(self._packed.nodes)

    def constants(self) -> list[torch.Tensor]:
        """The tensors that it holds, if it is packed."""
        held = () if self._packed is None else self._packed.held.values()
        return [value for value in held if isinstance(value, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A graph module as bytes.

    Args:
        nodes: what the nodes say.
        live: what these name by number.
        held: what `get_attr` nodes stand for, by name.
    """

    nodes: bytes
    live: tuple[Any, ...]
    held: dict[str, Any]

    @classmethod
    def of(cls, module: GraphModule, places: Places) -> _Packed:
        """`module`, packed."""
        nodes, written = list(module.graph.nodes), io.BytesIO()
        held = {node.target: attrgetter(node.target)(module) for node in nodes if node.op == "get_attr"}
        packer = _Packer(written, places)
        with torch_functions_off():  # fakes answer in two thirds of the time
            packer.dump(nodes)
        return cls(zlib.compress(written.getbuffer(), 1), tuple(packer.live), held)

    def unpacked(self) -> GraphModule:
        """The module, made anew."""
        graph = Graph()
        _Unpacker(io.BytesIO(zlib.decompress(self.nodes)), self.live, graph).load()
        return graph_module(self.held, graph)


class Places:
    """What makes fake tensors: one object where it is the same for several, which is written once a graph.

    The graphs of a program show the same fake tensors, of which each takes 10 us to ask.
    """

    def __init__(self) -> None:
        self._met: dict[int, tuple[FakeTensor, tuple[Any, ...] | None]] = {}
        self._equal: dict[tuple[Any, ...] | None, tuple[Any, ...] | None] = {}

    def of(self, fake: FakeTensor) -> tuple[Any, ...] | None:
        """What `_fake` is given to make a fake tensor; None where that does not say everything of it."""
        met = self._met.get(id(fake))
        if met is None:
            place = _place_of(fake)
            met = self._met[id(fake)] = fake, self._equal.setdefault(place, place)
        return met[1]


class _Packer(pickle.Pickler):
    """Writes what nodes say; what was written before, as the nodes that one is given, is named by number."""

    def __init__(self, file: io.BytesIO, places: Places) -> None:
        super().__init__(file, protocol=5)
        self._places = places
        self._known: dict[int, int] = {}
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.live: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        """How to write what is no number, text, list, tuple or dictionary."""
        cls = type(obj)
        if cls is Node:
            # FX's own dictionary would be asked for; few differ in what `meta` has, which takes a fifth less.
            names = tuple(obj.meta)
            names = self._names.setdefault(names, names)
            made_of = obj.op, obj.target, obj.args, dict(obj.kwargs), obj.name
            return _node, (names, tuple(obj.meta.values()), obj.type, *made_of)
        if cls is FakeTensor and (place := self._places.of(obj)) is not None:
            return _fake, place
        if cls is immutable_list:
            return list, (tuple(obj),)
        if cls is immutable_dict:
            return dict, (tuple(obj.items()),)
        if isinstance(obj, tuple):  # a named one, or a `torch.Size`
            return (_named, (cls, tuple(obj))) if hasattr(obj, "_make") else (cls, (tuple(obj),))
        if cls in (slice, torch.device) or any(obj is maker for maker in _MAKERS):
            return NotImplemented
        return _live, (self._number(obj),)

    def _number(self, obj: Any) -> int:
        if id(obj) not in self._known:
            self._known[id(obj)] = len(self.live)
            self.live.append(obj)
        return self._known[id(obj)]


class _Unpacker(pickle.Unpickler):
    """Reads it; nothing else can be named than what makes nodes and values."""

    def __init__(self, file: io.BytesIO, live: Sequence[Any], graph: Graph) -> None:
        super().__init__(file)
        self._makers = {maker.__name__: maker for maker in _MAKERS} | {"slice": slice, "device": torch.device}
        self._makers |= {
            _node.__name__: functools.partial(_added, graph),
            _live.__name__: live.__getitem__,
        }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """What is called to make nodes and values."""
        return self._makers[global_name]


def _place_of(fake: FakeTensor) -> tuple[Any, ...] | None:
    """What `_fake` is given to make a fake tensor, where that says everything of it."""
    size, stride, offset = tuple(fake.shape), fake.stride(), fake.storage_offset()
    is_plain = fake.layout is torch.strided and not (fake.is_conj() or fake.is_neg() or fake.requires_grad)
    if not is_plain or fake.constant is not None or any(type(n) is not int for n in (*size, *stride, offset)):
        return None
    return fake.fake_mode, size, stride, offset, fake.dtype, fake.fake_device


def _fake(
    mode: FakeTensorMode,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:
    """A fake tensor on a storage of its own."""
    return new_fake(mode, size, stride, dtype, device, offset=offset)


def _named(cls: Any, items: tuple[Any, ...]) -> Any:
    """A named tuple."""
    return cls._make(items)


def _added(graph: Graph, names: tuple[str, ...], values: tuple[Any, ...], kind: Any, *made_of: Any) -> Node:
    """The node that was written so, in a graph."""
    return add_node(graph, *made_of, meta=dict(zip(names, values, strict=True)), type_expr=kind)


def _node(*said: Any) -> NoReturn:
    """Written for a node, with what `add_node` is given; whoever reads it has the graph."""
    raise NotImplementedError


def _live(number: int) -> NoReturn:
    """Written for an object that is kept as it is; whoever reads it has them."""
    raise NotImplementedError


_MAKERS = (_fake, _named, _node, _live)
