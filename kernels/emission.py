"""From a graph to the same graph with kernels in it."""

from __future__ import annotations

import heapq
import itertools
import linecache
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from aotdist.kernels import triton_seam
from aotdist.kernels.assembly import assemble
from aotdist.kernels.columns import cut_columns
from aotdist.kernels.fusion import Plan, plan
from aotdist.kernels.helpers import HELPERS
from aotdist.kernels.ir import Kernel
from aotdist.kernels.launching import Config, Launch, Result, config_of, is_persistent, launch_of
from aotdist.kernels.online import online
from aotdist.kernels.printing import Printed, print_kernel
from aotdist.kernels.rule import val_of
from aotdist.kernels.space import Group
from aotdist.kernels.traffic import bytes_moved
from aotdist.program import Graph
from aotdist.torch_seam import graph_module

_serial = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class EmittedKernel:
    """One kernel of a graph.

    Args:
        kernel: what it computes.
        printed: its source.
        config: its blocks.
        nodes: the nodes that it computes, in order.
        num_bytes: what it reads and writes.
    """

    kernel: Kernel
    printed: Printed
    config: Config
    nodes: tuple[Node, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Fused:
    """A graph whose nodes are kernels, views and library calls.

    Args:
        graph: what to run.
        kernels: in the order of their last nodes; each runs when what it reads is there.
        source: the kernels, as a module that `triton.jit` compiles.
        reasons: why nodes are left to the library.
    """

    graph: Graph
    kernels: Sequence[EmittedKernel]
    source: str
    reasons: Mapping[Node, str]


def fuse(graph: Graph, fixed: Sequence[Node], *, keeps_casts: bool, label: str) -> Fused:
    """Put kernels in the place of nodes.

    Args:
        graph: a private copy, functional and decomposed.
        fixed: nodes that keep their order: what draws random numbers, collectives.
        keeps_casts: round to narrow floating point wherever the graph does.
        label: a word for the file name that tracebacks show.
    """
    chosen = _planned(graph.gm.graph, fixed)
    num_elements = {
        node.name: node.meta["val"].numel()
        for node in graph.gm.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    kernels = [
        _emit(chosen, group, at, num_elements, keeps_casts=keeps_casts)
        for at, group in enumerate(chosen.groups)
    ]
    source = "\n\n".join([HELPERS, *(one.printed.source for one in kernels)])
    functions = loaded(source, label)
    schedule = _Schedule(graph, kernels, fixed)
    copies = _Copies(schedule.by_name, functions)
    for unit in schedule.in_order():
        copies.add(unit)
    gm = graph_module(graph.gm, copies.graph)
    return Fused(Graph(gm, graph.ins, graph.outs), kernels, source, chosen.reasons)


def _planned(graph: torch.fx.Graph, fixed: Sequence[Node]) -> Plan:
    """The plan for a graph, whose sums of columns are cut in two where kernels take the first halves."""
    cuts = cut_columns(graph)
    while True:
        chosen = plan(graph, fixed)
        folded = frozenset[Node]().union(*(group.folds for group in chosen.groups))
        alone = [cut for cut in cuts if cut.first not in folded]
        if not alone:
            return chosen
        for cut in alone:
            cut.take_back(graph)
        cuts = [cut for cut in cuts if cut not in alone]


def _emit(
    chosen: Plan, group: Group, number: int, num_elements: Mapping[str, int], *, keeps_casts: bool
) -> EmittedKernel:
    kernel = assemble(chosen, group, number, keeps_casts=keeps_casts)
    if not is_persistent(kernel):
        kernel = online(kernel)
    printed = print_kernel(kernel, is_persistent=is_persistent(kernel))
    config = config_of(kernel, is_interpreted=triton_seam.is_interpreting(), contracts=not keeps_casts)
    nodes = tuple(sorted(group.nodes()))
    return EmittedKernel(kernel, printed, config, nodes, bytes_moved(kernel, num_elements))


def loaded(source: str, label: str) -> Mapping[str, Any]:
    """The functions of a module of kernels.

    Args:
        source: the module.
        label: a word for the file name that tracebacks show.
    """
    filename = f"<aotdist {label} kernels {next(_serial)}>"
    # Triton reads the source of a function through `linecache`, and an mtime of None keeps it there.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = triton_seam.namespace() | {"__name__": filename}  # Triton asks functions for their module
    exec(compile(source, filename, "exec"), namespace)
    weakref.finalize(namespace["product"], linecache.cache.pop, filename, None)  # gone with the rest
    return namespace


_Unit: TypeAlias = EmittedKernel | Node


class _Schedule:
    """What runs, in an order: as the nodes stood, a kernel at the place of its last node."""

    def __init__(self, graph: Graph, kernels: Sequence[EmittedKernel], fixed: Sequence[Node]) -> None:
        nodes = list(graph.gm.graph.nodes)
        self.by_name: dict[str, Node] = {node.name: node for node in nodes}
        self._position = {node: at for at, node in enumerate(nodes)}
        self._unit: dict[Node, _Unit] = {node: node for node in nodes}
        self._unit.update({self.by_name[name]: one for one in kernels for name in one.printed.outputs})
        self._after_fixed = dict(zip(fixed[1:], fixed, strict=False))
        arguments = [node for node in nodes if node.op in ("placeholder", "get_attr")]
        self._live = self._needed([*arguments, *fixed, graph.gm.graph.output_node()])

    def in_order(self) -> Iterator[_Unit]:
        """Every unit that is needed, after those that it needs."""
        waits = {unit: set(self._needs(unit)) for unit in self._live}
        users: dict[_Unit, list[_Unit]] = {}
        for unit, needed in waits.items():
            for other in needed:
                users.setdefault(other, []).append(unit)
        ready = [(self._place(unit), unit) for unit, needed in waits.items() if not needed]
        heapq.heapify(ready)
        left = len(self._live)
        while ready:
            _, unit = heapq.heappop(ready)
            yield unit
            left -= 1
            for user in users.get(unit, ()):
                waits[user].discard(unit)
                if not waits[user]:
                    heapq.heappush(ready, (self._place(user), user))
        assert left == 0, f"{left} units wait for each other"

    def _place(self, unit: _Unit) -> int:
        nodes = (unit,) if isinstance(unit, Node) else unit.nodes
        return max(self._position[node] for node in nodes)

    def _needs(self, unit: _Unit) -> list[_Unit]:
        if isinstance(unit, EmittedKernel):
            return [self._unit[self.by_name[name]] for name in unit.printed.inputs]
        before = [self._after_fixed[unit]] if unit in self._after_fixed else []
        return [self._unit[node] for node in (*unit.all_input_nodes, *before)]

    def _needed(self, roots: Iterable[Node]) -> dict[_Unit, None]:
        found: dict[_Unit, None] = {}
        stack = [self._unit[root] for root in reversed(list(roots))]
        while stack:
            unit = stack.pop()
            if unit not in found:
                found[unit] = None
                stack.extend(self._needs(unit))
        return found


class _Copies:
    """A new graph, unit by unit."""

    def __init__(self, by_name: Mapping[str, Node], functions: Mapping[str, Any]) -> None:
        self.graph = torch.fx.Graph()
        self._by_name = by_name
        self._functions = functions
        self._copy_of: dict[Node, Node] = {}

    def add(self, unit: _Unit) -> None:
        """Put a unit at the end."""
        if isinstance(unit, Node):
            self._copy_of[unit] = self.graph.node_copy(unit, self._copy_of.__getitem__)
            return
        written = [self._by_name[name] for name in unit.printed.outputs]
        inputs = tuple(self._copy_of[self._by_name[name]] for name in unit.printed.inputs)
        call = self.graph.create_node(
            "call_function",
            self._launch(unit, written),
            inputs,
            name=written[0].name if len(written) == 1 else unit.kernel.name,
        )
        call.meta = {key: value for key, value in unit.nodes[-1].meta.items() if key != "val"}
        picks = [call]
        if len(written) > 1:
            picks = [
                self.graph.create_node("call_function", operator.getitem, (call, at), name=node.name)
                for at, node in enumerate(written)
            ]
        for pick, node in zip(picks, written, strict=True):
            pick.meta = dict(node.meta)
            self._copy_of[node] = pick

    def _launch(self, unit: EmittedKernel, written: Sequence[Node]) -> Launch:
        results = [Result(tuple(v.shape), tuple(v.stride()), v.dtype) for v in map(val_of, written)]
        function = self._functions[unit.kernel.name]
        return launch_of(unit.kernel, function, unit.config, results, val_of(written[0]).device)
