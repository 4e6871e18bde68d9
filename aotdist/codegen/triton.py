"""The `triton` backend: the only door to the kernels.

A graph becomes fewer nodes: kernels that the emitter writes, views, and library calls for all that it has
no rule for. Those are printed as one straight-line function, as the reference emitter prints a graph.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

from aotdist.codegen.contract import Decompositions, Emission, Emitted, Fusion, KernelSummary
from aotdist.codegen.fx import print_graph
from aotdist.codegen.graph_copy import copied
from aotdist.codegen.python_source import load_function
from aotdist.errors import BadSettings
from aotdist.kernels import foreach, triton_seam
from aotdist.kernels.compilation import TARGETS, Target
from aotdist.kernels.compilation import check as check_target
from aotdist.kernels.emission import Fused, fuse
from aotdist.kernels.launching import Launch, Result
from aotdist.kernels.packing import Packed, pack, unpack
from aotdist.kernels.splitting import split_reductions
from aotdist.partition.traits import is_collective, is_random
from aotdist.program import Graph
from aotdist.subclasses.protocol import operators_made_of_others
from aotdist.torch_seam import inductor_decompositions

__all__ = [
    "TARGETS",
    "Launch",
    "Packed",
    "Result",
    "Target",
    "TritonBackend",
    "check_target",
    "pack",
    "summary",
    "unpack",
    "with_kernels",
]


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """Fuses into Triton kernels of our own."""

    name: str = "triton"
    partition: Literal["default", "min_cut"] = "min_cut"
    any_tangents: bool = False
    owns_cut: bool = False

    def check(self) -> None:
        """See that Triton is there.

        Raises:
            BadSettings: it is not.
        """
        if not triton_seam.is_installed():
            raise BadSettings(
                "the triton backend needs Triton, which is not installed",
                stage="codegen",
                fix='install `triton`, or use backend="inductor"',
            )

    def decompositions(self) -> Decompositions:
        """Inductor's table, foreach operators by tensor, and operators of wrappers'."""
        of_operators = {op: made for op, made in inductor_decompositions().items() if op not in _KEPT}
        return {**of_operators, **foreach.decompositions(), **operators_made_of_others()}

    def prepare_joint(self, graph: Graph) -> Graph:
        """The graph itself."""
        return graph

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        """Put kernels into the graph, and print what runs them."""
        _refuse_cpu(graph)
        label = f"{emission.name} {emission.kind}"
        fused = with_kernels(graph, keeps_casts=emission.settings.emulate_casts, label=label)
        printed = print_graph(fused.graph)
        call = load_function(printed.source, "forward", printed.bound, label)
        return Emitted(call, f"{fused.source}\n\n{printed.source}", fusion=summary(fused))


_KEPT = frozenset(
    {
        torch.ops.aten.max_pool2d_with_indices.default,
        torch.ops.aten.max_pool3d_with_indices.default,
        torch.ops.aten.embedding_dense_backward.default,
    }
)
"""What Inductor's decompositions take apart and libraries do better.

Those of pools ask Inductor how it would lower them. That of an embedding's gradient adds up what arrives for
one row in any order; the library sorts it first, so that its sums are the same in every run.
"""


def with_kernels(graph: Graph, *, keeps_casts: bool, label: str) -> Fused:
    """The graph with kernels in it, which need not run here.

    Args:
        graph: functional and decomposed; it is not changed.
        keeps_casts: round to narrow floating point wherever the graph does.
        label: a word for the file name that tracebacks show.
    """
    graph = Graph(copied(graph), graph.ins, graph.outs)
    split_reductions(graph.gm)
    fixed = [node for node in graph.gm.graph.nodes if _keeps_its_place(node)]
    return fuse(graph, fixed, keeps_casts=keeps_casts, label=label)


def summary(fused: Fused) -> Fusion:
    """What became of the operators of a graph."""
    kernels = (
        KernelSummary(
            one.printed.name,
            tuple(_operator(node) for node in one.nodes),
            one.num_results,
            one.kernel.num_reduced,
            one.num_bytes,
        )
        for one in fused.kernels
    )
    return Fusion(tuple(kernels), Counter((_operator(node), why) for node, why in fused.reasons.items()))


def _operator(node: Node) -> str:
    if node.target is operator.getitem:
        return _operator(node.all_input_nodes[0])
    return str(node.target).removesuffix(".default")


def _keeps_its_place(node: Node) -> bool:
    return node.op == "call_function" and (is_collective(node) or is_random(node))


def _refuse_cpu(graph: Graph) -> None:
    values = [node.meta.get("val") for node in graph.gm.graph.nodes]
    is_cpu = any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values)
    if is_cpu and not triton_seam.is_interpreting():
        raise BadSettings(
            "the triton backend compiles for GPUs, and this program has tensors on the CPU",
            stage="codegen",
            fix='use backend="inductor", or set TRITON_INTERPRET=1 to run the kernels in Python',
        )
