"""From a graph to the same graph with kernels in it."""

from __future__ import annotations

import itertools
import linecache
import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from aotdist.kernels import triton_seam
from aotdist.kernels.assembly import assemble
from aotdist.kernels.bundling import bundles, one_launch
from aotdist.kernels.columns import cut_columns
from aotdist.kernels.device_functions import HELPERS
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.fusion import Plan, plan
from aotdist.kernels.in_place import overwritten, stored_over
from aotdist.kernels.launching import Launch, Result, blocks_of, config_of, is_persistent
from aotdist.kernels.online import online
from aotdist.kernels.printing import Printed, print_kernel
from aotdist.kernels.rule import val_of
from aotdist.kernels.running import Jitted
from aotdist.kernels.scheduling import Schedule, Step
from aotdist.kernels.space import Group
from aotdist.kernels.traffic import bytes_moved
from aotdist.program import Graph
from aotdist.torch_seam import graph_module

_serial = itertools.count()


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
    kernels = _launches(graph, kernels, fixed)
    schedule = Schedule(graph, kernels, fixed)
    source = "\n\n".join([HELPERS, *(one.printed.source for one in kernels)])
    functions = loaded(source, label)
    copies = _Copies(schedule.by_name, functions)
    for step in schedule.in_order():
        copies.add(step)
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
    fits_a_block = is_persistent(kernel)
    kernel = kernel if fits_a_block else online(kernel)
    printed = print_kernel(kernel, is_persistent=fits_a_block)
    config = config_of(kernel, is_interpreted=triton_seam.is_interpreting(), contracts=not keeps_casts)
    nodes = tuple(sorted(group.nodes()))
    return EmittedKernel((kernel,), printed, config, nodes, bytes_moved(kernel, num_elements))


def _launches(graph: Graph, kernels: Sequence[EmittedKernel], fixed: Sequence[Node]) -> list[EmittedKernel]:
    """Kernels, those that may as one launch, which store new values of inputs over the old ones."""
    found = bundles(Schedule(graph, kernels, fixed), kernels, fixed)
    schedule = Schedule(graph, [one_launch(bundle) for bundle in found], fixed)
    old_of = overwritten(graph, schedule, fixed)
    return [one_launch([stored_over(kernel, old_of) for kernel in bundle]) for bundle in found]


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


class _Copies:
    """A new graph, step by step."""

    def __init__(self, by_name: Mapping[str, Node], functions: Mapping[str, Any]) -> None:
        self.graph = torch.fx.Graph()
        self._by_name = by_name
        self._functions = functions
        self._copy_of: dict[Node, Node] = {}

    def add(self, step: Step) -> None:
        """Put a step at the end."""
        if isinstance(step, Node):
            self._copy_of[step] = self.graph.node_copy(step, self._copy_of.__getitem__)
            return
        written = [self._by_name[name] for name in step.printed.outputs]
        inputs = tuple(self._copy_of[self._by_name[name]] for name in step.printed.inputs)
        call = self.graph.create_node(
            "call_function",
            self._launch(step, written),
            inputs,
            name=written[0].name if len(written) == 1 else step.printed.name,
        )
        call.meta = {key: value for key, value in step.nodes[-1].meta.items() if key != "val"}
        picks = [call]
        if len(written) > 1:
            picks = [
                self.graph.create_node("call_function", operator.getitem, (call, at), name=node.name)
                for at, node in enumerate(written)
            ]
        for pick, node in zip(picks, written, strict=True):
            pick.meta = dict(node.meta)
            self._copy_of[node] = pick

    def _launch(self, step: EmittedKernel, written: Sequence[Node]) -> Launch:
        function, device = self._functions[step.printed.name], val_of(written[0]).device
        results = [_result(node, step.printed) for node in written]
        blocks, options = blocks_of(step.kernel, step.config), step.config.options
        runner = Jitted(function, blocks, options, device)
        return Launch(step.printed.name, runner, step.num_blocks, results, device)


def _result(node: Node, printed: Printed) -> Result:
    val, old = val_of(node), printed.over.get(node.name)
    into = None if old is None else printed.inputs.index(old)
    return Result(tuple(val.shape), tuple(val.stride()), val.dtype, into)
