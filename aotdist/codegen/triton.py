"""The `triton` backend: the only door to the kernels.

A graph becomes fewer nodes: kernels that the emitter writes, views, and library calls for all that it has
no rule for. Those are printed as one straight-line function, as the reference emitter prints a graph.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch.fx import Node

from aotdist.codegen.checked_call import CheckedCall, Form
from aotdist.codegen.contract import (
    Backend,
    BoxedCall,
    Decompositions,
    Emission,
    Emitted,
    Fusion,
    KernelSummary,
)
from aotdist.codegen.decompose import decompose
from aotdist.codegen.fx import load_graph, marked_call, print_graph
from aotdist.codegen.python_source import load_function
from aotdist.errors import BadSettings
from aotdist.kernels import triton_seam
from aotdist.kernels.background import Background
from aotdist.kernels.checking import Difference, checked, launching, with_checks, with_real_strides
from aotdist.kernels.compilation import Packed, pack, unpack
from aotdist.kernels.compilation import check as check_target
from aotdist.kernels.decompositions import decompositions
from aotdist.kernels.emission import Fused, fuse, without_kernels
from aotdist.kernels.few_results import cut_few_results
from aotdist.kernels.gpus import GPUS, TARGETS, USUAL, Gpu, Target, gpu_here
from aotdist.kernels.launching import Launch, Result
from aotdist.kernels.polynomial import NotProved, Whole
from aotdist.kernels.side_by_side import bring_side_by_side
from aotdist.kernels.sized import SizedLaunch
from aotdist.kernels.splitting import split_reductions
from aotdist.kernels.tuning import Choices, Tuner
from aotdist.partition.traits import is_collective, is_random
from aotdist.passes.linear_cross_entropy import MADE_OF
from aotdist.program import Graph
from aotdist.settings import Settings
from aotdist.subclasses.protocol import operators_made_of_others
from aotdist.torch_seam.inductor import inductor_decompositions
from aotdist.trace.operators import functionalised as operators
from aotdist.trace.operators.fakes import norms_laid_out

__all__ = [
    "GPUS",
    "TARGETS",
    "Launch",
    "Packed",
    "Result",
    "Target",
    "TritonBackend",
    "check_target",
    "form_of",
    "pack",
    "launches_of",
    "settled",
    "summary",
    "unpack",
    "with_kernels",
    "with_registers",
]


@dataclass(frozen=True, slots=True)
class TritonBackend(Backend):
    """Fuses into Triton kernels of our own."""

    name: str = "triton"
    partition: Literal["default", "min_cut"] = "min_cut"

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
        """Inductor's table, foreach operators by tensor, and operators of our own and of wrappers'."""
        of_operators = {op: made for op, made in inductor_decompositions().items() if op not in _KEPT}
        table = {**of_operators, **decompositions(), **operators.MADE_OF, **operators_made_of_others()}
        return norms_laid_out(table)

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        """Put kernels into the graph, and print what runs them."""
        _refuse_cpu(graph)
        label, settings = f"{emission.name} {emission.kind}", emission.settings
        return settled(_emitting(settings, label)(graph), graph, settings, label)


def settled(form: Form, graph: Graph, settings: Settings, label: str) -> Emitted:
    """The compiled graph; it is emitted again if its first call shows other strides than traced.

    Args:
        form: the graph with kernels.
        graph: as it was traced.
        settings: how to compile.
        label: a word for files, tracebacks and logs.
    """
    if not form.is_checked:
        return Emitted(form.call, form.source, fusion=form.fusion, with_modules=form.marked)

    def emit_for(differences: Iterable[Difference]) -> Form:
        return _emitting(settings, label)(with_real_strides(_prepared(graph), differences))

    sizes = [at for at, slot in enumerate(graph.ins) if slot.role == "size"]
    return CheckedCall(form, emit_for, sizes, label).emitted()


def form_of(kernels: Graph, graph: Graph, source: str, fusion: Callable[[], Fusion], label: str) -> Form:
    """A graph with kernels as a callable.

    Args:
        kernels: the graph.
        graph: the same without kernels.
        source: of the kernels, for a reader.
        fusion: which there are.
        label: a word for the file name that tracebacks show.
    """
    printed = print_graph(kernels)

    @cache
    def checking() -> BoxedCall:
        bound = with_checks(printed.bound, kernels, cache(lambda: _prepared(graph)))
        return load_function(printed.source, "forward", bound, f"{label} with checks")

    return Form(
        load_graph(printed, kernels, label),
        bool(launching(kernels)),
        lambda args: checked(checking(), args),
        cache(lambda: marked_call(kernels, label)),
        f"{source}{printed.source}",
        fusion,
    )


def _emitting(settings: Settings, label: str) -> Callable[[Graph], Form]:
    gpu, tuner, background = gpu_here(), _tuner(settings), Background.here()

    def emitting(graph: Graph) -> Form:
        casts = settings.emulate_casts
        fused = with_kernels(
            graph, keeps_casts=casts, label=label, gpu=gpu, tuner=tuner, background=background
        )
        kernels, launches = summary(fused), launches_of(fused)

        def fusion() -> Fusion:
            return with_registers(kernels, {name: launch.registers for name, launch in launches.items()})

        return form_of(fused.graph, graph, f"{fused.source}\n\n", fusion, label)

    return emitting


def _tuner(settings: Settings) -> Tuner | None:
    if not settings.tune_kernels or triton_seam.is_interpreting():
        return None
    is_alone = not (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1)
    reductions = is_alone and not torch.are_deterministic_algorithms_enabled()
    return Tuner(Choices.within(Path(settings.cache_folder).expanduser() / "kernels"), reductions)


_KEPT = frozenset(
    {
        torch.ops.aten.max_pool2d_with_indices.default,
        torch.ops.aten.max_pool3d_with_indices.default,
        torch.ops.aten.embedding_dense_backward.default,
        torch.ops.aten.soft_margin_loss_backward.default,
    }
)
"""Operators that Inductor decomposes, and that libraries do better.

Those of pools ask Inductor how it would lower them. That of an embedding's gradient adds up what arrives for
one row in any order; the library sorts it first, so that its sums are the same in every run. That of a soft
margin's gradient subtracts 1 from a sigmoid, which leaves nothing of a small one.
"""


_OF_PASSES = frozenset(
    {*MADE_OF, torch.ops.aten._chunk_cat.default, torch.ops.aten.split_with_sizes_copy.default}
)
"""Operators that passes put into graphs: losses by chunks, and copies into buckets and out of them."""


def with_kernels(
    graph: Graph,
    *,
    keeps_casts: bool,
    label: str,
    gpu: Gpu = USUAL,
    tuner: Tuner | None = None,
    background: Background | None = None,
) -> Fused:
    """The graph with kernels in it, which need not run here.

    Args:
        graph: functional and decomposed; it is not changed.
        keeps_casts: round to narrow floating point wherever the graph does.
        label: a word for the file name that tracebacks show.
        gpu: which they are for.
        tuner: chooses blocks by measuring; None to leave it at what they should cost.
        background: compiles; None to leave that to when kernels are first started.
    """
    fresh = _prepared(graph)
    try:
        bring_side_by_side(fresh.gm.graph)
        split_reductions(fresh)
        cut_few_results(fresh.gm.graph, gpu)
        computing = (node for node in fresh.gm.graph.nodes if node.op == "call_function")
        fixed = [node for node in computing if is_collective(node) or is_random(node)]
        return fuse(
            fresh,
            fixed,
            keeps_casts=keeps_casts,
            label=label,
            gpu=gpu,
            tuner=tuner,
            background=background,
        )
    except NotProved as reason:
        return without_kernels(_prepared(graph), str(reason))


def _prepared(graph: Graph) -> Graph:
    """A private copy, in operators that have rules."""
    fresh = graph.copied()
    decompose(fresh.gm, {**TritonBackend().decompositions(), **MADE_OF}, only=_OF_PASSES)
    _leave_host_alone(fresh)
    return fresh


def summary(fused: Fused) -> Fusion:
    """Which operators of a graph run in which kernel, and which in the library."""
    kernels = (
        KernelSummary(
            name=one.printed.name,
            operators=tuple(_operator(node) for node in one.nodes),
            num_results=_shown(one.num_results),
            num_reduced=_shown(one.kernel.num_reduced),
            num_bytes=one.num_bytes,
            sources=tuple(
                dict.fromkeys(node.meta["source"] for node in one.nodes if node.meta.get("source"))
            ),
            text=one.printed.source,
        )
        for one in fused.kernels
    )
    return Fusion(tuple(kernels), Counter((_operator(node), why) for node, why in fused.reasons.items()))


def _shown(number: Whole) -> int | str:
    return number if isinstance(number, int) else str(number)


def launches_of(fused: Fused) -> dict[str, Launch | SizedLaunch]:
    """The launches of a graph, by the names of their kernels."""
    targets = (node.target for node in fused.graph.gm.graph.nodes)
    return {target.__name__: target for target in targets if isinstance(target, Launch | SizedLaunch)}


def with_registers(fusion: Fusion, registers: Mapping[str, int | None]) -> Fusion:
    """`fusion` with the registers that a thread of each kernel takes, by the kernel's name."""
    kernels = (replace(kernel, registers=registers.get(kernel.name)) for kernel in fusion.kernels)
    return replace(fusion, kernels=tuple(kernels))


def _operator(node: Node) -> str:
    if node.target is operator.getitem:
        return _operator(node.all_input_nodes[0])
    return str(node.target).removesuffix(".default")


def _refuse_cpu(graph: Graph) -> None:
    if _kinds_of_devices(graph) == {"cpu"} and not triton_seam.is_interpreting():
        raise BadSettings(
            "the triton backend compiles for GPUs, and all tensors of this program are on the CPU",
            stage="codegen",
            fix='use backend="inductor", or set TRITON_INTERPRET=1 to run the kernels in Python',
        )


def _leave_host_alone(graph: Graph) -> None:
    """Leave what a GPU's program computes on the CPU to the library."""
    if len(_kinds_of_devices(graph)) > 1:
        for node in graph.gm.graph.nodes:
            val = node.meta.get("val")
            if isinstance(val, torch.Tensor) and val.device.type == "cpu":
                node.meta["on_host"] = True


def _kinds_of_devices(graph: Graph) -> set[str]:
    values = (node.meta.get("val") for node in graph.gm.graph.nodes)
    return {value.device.type for value in values if isinstance(value, torch.Tensor)} - {"meta"}
