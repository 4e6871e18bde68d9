"""From a graph to the same graph with kernels in it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from aotdist.kernels import triton_seam
from aotdist.kernels.accumulation import online
from aotdist.kernels.assembly import assemble
from aotdist.kernels.background import Background
from aotdist.kernels.bundling import bundles, one_launch
from aotdist.kernels.columns import cut_columns
from aotdist.kernels.costs import configurations
from aotdist.kernels.emitted import EmittedKernel, Schedule, Step
from aotdist.kernels.few_results import is_better_cut
from aotdist.kernels.fusion import Plan, plan
from aotdist.kernels.gpus import Gpu
from aotdist.kernels.in_place import overwritten, stored_over
from aotdist.kernels.index import num_places
from aotdist.kernels.ir import Kernel
from aotdist.kernels.launching import Config, Launch, Result, blocks_of, config_of, is_persistent
from aotdist.kernels.polynomial import Polynomial, hint_of
from aotdist.kernels.printing import Printed, print_kernel
from aotdist.kernels.rule import sizes_of, strides_of, val_of
from aotdist.kernels.running import Jitted, Runner, nothing_compiled
from aotdist.kernels.sized import SizedLaunch, SizedResult, names_needed
from aotdist.kernels.space import Group
from aotdist.kernels.spelling import HELPERS
from aotdist.kernels.symbols import arguments_for
from aotdist.kernels.triton_seam import loaded
from aotdist.kernels.tuning import Tuned, Tuner, nameless_source
from aotdist.kernels.uses import num_elements
from aotdist.program import Graph
from aotdist.torch_seam.proxies import graph_module


@dataclass(frozen=True, slots=True)
class Fused:
    """A graph whose nodes are kernels, views and library calls.

    Args:
        graph: what to run.
        kernels: in the order of their last nodes.
        source: the kernels, as a module that `triton.jit` compiles.
        reasons: why nodes are left to the library.
    """

    graph: Graph
    kernels: Sequence[EmittedKernel]
    source: str
    reasons: Mapping[Node, str]


def fuse(
    graph: Graph,
    fixed: Sequence[Node],
    *,
    keeps_casts: bool,
    label: str,
    gpu: Gpu,
    tuner: Tuner | None = None,
    background: Background | None = None,
) -> Fused:
    """Put kernels in the place of nodes.

    Args:
        graph: a private copy, functional and decomposed.
        fixed: nodes that keep their order: what draws random numbers, collectives.
        keeps_casts: round to narrow floating point wherever the graph does.
        label: a word for the file name that tracebacks show.
        gpu: which it is for.
        tuner: chooses blocks by measuring; None to leave it at what they should cost.
        background: compiles; None to leave that to when kernels are first started.
    """
    planned = _planned(graph.gm.graph, fixed, gpu)
    counts = {
        node.name: num_elements(node)
        for node in graph.gm.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    kernels = [
        _emit(planned, group, at, counts, gpu, keeps_casts=keeps_casts)
        for at, group in enumerate(planned.groups)
    ]
    kernels = _launches(graph, kernels, fixed)
    if not triton_seam.is_interpreting():
        kernels = [
            kernel if kernel.is_sized else replace(kernel, ways=configurations(kernel)) for kernel in kernels
        ]
    schedule = Schedule(graph, kernels, fixed)
    source = "\n\n".join([HELPERS, *(form.source for one in kernels for form in one.forms)])
    functions = loaded(source, label)
    copies = _Copies(graph, schedule.by_name, functions, tuner, background)
    for step in schedule.in_order():
        copies.add(step)
    gm = graph_module(graph.gm, copies.graph)
    return Fused(Graph(gm, graph.ins, graph.outs), kernels, source, planned.reasons)


def without_kernels(graph: Graph, reason: str) -> Fused:
    """A graph as it is.

    Args:
        graph: what to run.
        reason: why all its nodes are left to the library.
    """
    nodes = [node for node in graph.gm.graph.nodes if node.op == "call_function"]
    return Fused(graph, (), "", dict.fromkeys(nodes, reason))


def _planned(graph: torch.fx.Graph, fixed: Sequence[Node], gpu: Gpu) -> Plan:
    """The fusion plan of a graph; column sums stay cut in two where a kernel folds the first half."""
    cuts = cut_columns(graph)
    while True:
        planned = plan(graph, fixed)
        folded = frozenset[Node]().union(*(group.folds for group in planned.groups))
        alone = [cut for cut in cuts if cut.first not in folded and not is_better_cut(cut, gpu)]
        if not alone:
            return planned
        for cut in alone:
            cut.take_back(graph)
        cuts = [cut for cut in cuts if cut not in alone]


def _emit(
    planned: Plan, group: Group, number: int, counts: Mapping[str, int], gpu: Gpu, *, keeps_casts: bool
) -> EmittedKernel:
    kernel = assemble(planned, group, number, keeps_casts=keeps_casts)
    differs = isinstance(kernel.num_reduced, Polynomial) and not kernel.is_tiled
    fits_a_block = differs or is_persistent(kernel)
    looped = _in_loops(kernel) if differs else None
    kernel = kernel if fits_a_block else online(kernel)
    printed = print_kernel(kernel, is_persistent=fits_a_block)
    is_interpreted = triton_seam.is_interpreting()
    config = config_of(kernel, is_interpreted=is_interpreted, contracts=not keeps_casts, gpu=gpu)
    nodes = tuple(sorted(group.nodes()))
    num_bytes = bytes_moved(kernel, counts)
    return EmittedKernel((kernel,), printed, (config,), nodes, num_bytes, looped, gpu)


def _in_loops(kernel: Kernel) -> Printed:
    """The form of a kernel for calls in which it reduces more than a block holds."""
    in_loops = replace(online(kernel), name=f"{kernel.name}_looped")
    # The two forms take the same arguments.
    inputs = tuple(dict.fromkeys(load.buffer for load in kernel.loads()))
    return replace(print_kernel(in_loops, is_persistent=False), inputs=inputs)


def _launches(graph: Graph, kernels: Sequence[EmittedKernel], fixed: Sequence[Node]) -> list[EmittedKernel]:
    """The kernels in as few launches as possible, writing inputs in place where that is safe."""
    found = bundles(Schedule(graph, kernels, fixed), kernels, fixed)
    schedule = Schedule(graph, [one_launch(bundle) for bundle in found], fixed)
    old_of = overwritten(graph, schedule, fixed)
    return [one_launch([stored_over(kernel, old_of) for kernel in bundle]) for bundle in found]


class _Copies:
    """A new graph, step by step."""

    def __init__(
        self,
        graph: Graph,
        by_name: Mapping[str, Node],
        functions: Mapping[str, Any],
        tuner: Tuner | None,
        background: Background | None,
    ) -> None:
        self.graph = torch.fx.Graph()
        self._sizes = graph.named_sizes()
        self._tuner = tuner
        self._background = background
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
        results = [_result(node, step.printed) for node in written]
        names = names_needed(step, results)
        call = self.graph.create_node(
            "call_function",
            self._launch(step, names, results, val_of(written[0]).device),
            (*inputs, *(self._copy_of[size] for size in arguments_for(names, self._sizes))),
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

    def _launch(
        self, step: EmittedKernel, names: Sequence[str], results: Sequence[SizedResult], device: torch.device
    ) -> Launch | SizedLaunch:
        if names:
            return SizedLaunch(step, self._functions, names, results, device)
        known = [result.at(None) for result in results]
        return Launch(step.printed.name, self._runner(step, device, known), known, device)

    def _runner(self, step: EmittedKernel, device: torch.device, results: Sequence[Result]) -> Runner:
        tuner, source = self._tuner, nameless_source(step)
        if tuner is None or len(step.ways) == 1 or not tuner.may_tune(step):
            return self._jitted(step, step.config, source, device)
        known = tuner.known(source, step.ways, device)
        ways = {way: self._jitted(step, way, source, device, ahead=known in (None, way)) for way in step.ways}
        overwritten = frozenset(result.into for result in results if result.into is not None)
        return Tuned(ways, source, device, overwritten, tuner)

    def _jitted(
        self, step: EmittedKernel, way: Config, source: str, device: torch.device, *, ahead: bool = True
    ) -> Jitted:
        """A kernel in one configuration, compiled in the background if it is likely to run (`ahead`)."""
        function = self._functions[step.printed.name]
        blocks, count = blocks_of(step.kernel, way), step.num_blocks_in(way)
        code = nothing_compiled
        if self._background is not None and ahead:
            code = self._background.code(function, step, way, source)
        return Jitted(function, count, blocks, way.options, device, code)


def _result(node: Node, printed: Printed) -> SizedResult:
    val, old = val_of(node), printed.over.get(node.name)
    into = None if old is None else printed.inputs.index(old)
    return SizedResult(sizes_of(node), strides_of(node), val.dtype, into)


def bytes_moved(kernel: Kernel, num_elements: Mapping[str, int]) -> int:
    """Bytes that a kernel reads and writes in the traced call; each tensor counts once.

    Args:
        kernel: what runs.
        num_elements: of every tensor that it reads or writes, by name.
    """
    touched: dict[str, int] = {}
    item_bytes: dict[str, int] = {}
    for access in (*kernel.loads(), *kernel.stores):
        touched[access.buffer] = touched.get(access.buffer, 0) + hint_of(num_places([access.index]))
        item_bytes[access.buffer] = access.stored.itemsize
    return sum(min(count, num_elements[name]) * item_bytes[name] for name, count in touched.items())
