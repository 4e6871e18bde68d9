"""Graphs with kernels for a GPU that need not be there: emitted on one machine, run on another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from aotdist.codegen.contract import Decompositions, Emission, Emitted, Fusion
from aotdist.codegen.fx import FxBackend, print_graph
from aotdist.codegen.marks import with_marks
from aotdist.codegen.triton import (
    GPUS,
    Launch,
    Packed,
    Result,
    Target,
    TritonBackend,
    check_target,
    form_of,
    pack,
    settled,
    summary,
    unpack,
    with_kernels,
    with_registers,
)
from aotdist.errors import InternalError
from aotdist.program import Graph
from aotdist.settings import Settings


@dataclass(frozen=True, slots=True, eq=False)
class PackedLaunch:
    """The target of a node that calls a kernel compiled for another machine.

    Args:
        name: of the kernel.
        packed: the kernel.
        num_blocks: how many run; none for results without elements.
        results: what it writes.
    """

    name: str
    packed: Packed
    num_blocks: int
    results: tuple[Result, ...]

    @property
    def __name__(self) -> str:
        """Its name in printed graphs."""
        return self.name

    def __call__(self, *inputs: torch.Tensor) -> NoReturn:
        """Nothing runs here."""
        raise _runs_elsewhere()

    def on(self, device: torch.device) -> Launch:
        """The kernel, loaded for a GPU of this machine."""
        overwritten = frozenset(result.into for result in self.results if result.into is not None)
        runner = unpack(self.packed, self.num_blocks, device, overwritten)
        return Launch(self.name, runner, self.results, device)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A graph that was compiled for another machine, as its `Emitted.call`: it cannot be called here.

    Args:
        graph: its kernels are nodes with a `PackedLaunch` as target.
        fusion: which kernels there are, and what was left to the library.
    """

    graph: Graph
    fusion: Fusion

    def __call__(self, args: list[Any]) -> NoReturn:
        """Nothing runs here."""
        raise _runs_elsewhere()

    def emitted_on(self, device: torch.device, traced: Graph, settings: Settings, label: str) -> Emitted:
        """The graph as a callable, on a GPU of this machine.

        Args:
            device: the GPU.
            traced: the graph without kernels, to emit again for tensors with other strides than traced.
            settings: how it was compiled.
            label: a word for the file name that tracebacks show.
        """
        here = self.graph.copied()
        for node in here.gm.graph.nodes:
            if isinstance(node.target, PackedLaunch):
                node.target = node.target.on(device)
        form = form_of(here, traced, "", lambda: self.fusion, label)
        return with_marks(settled(form, traced, settings, label), here, label)


def _runs_elsewhere() -> InternalError:
    return InternalError("what was emitted for another machine is run", stage="codegen")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetBackend(TritonBackend):
    """The `triton` backend for a GPU that need not be there.

    Args:
        target: the generation of that GPU.
    """

    target: Target

    def check(self) -> None:
        """See that kernels can be compiled for the target here.

        Raises:
            BadSettings: they can't.
        """
        check_target(self.target)

    def decompositions(self) -> Decompositions:
        """Those for a GPU, also if the trace is on a CPU."""
        table = TritonBackend.decompositions(self)
        return {**table, _LAYER_NORM: partial(_layer_norm, table[_LAYER_NORM])}

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        """Put compiled kernels into the graph."""
        label = f"{emission.name} {emission.kind}"
        keeps_casts, gpu = emission.settings.emulate_casts, GPUS[self.target]
        fused = with_kernels(graph, keeps_casts=keeps_casts, label=label, gpu=gpu)
        packed = {one.printed.name: pack(one, self.target) for one in fused.kernels}
        for node in fused.graph.gm.graph.nodes:
            if isinstance(node.target, Launch):
                launch = node.target
                num_blocks, results = launch.runner.num_blocks, tuple(launch.results)
                node.target = PackedLaunch(launch.name, packed[launch.name], num_blocks, results)
        source = f"{fused.source}\n\n{print_graph(fused.graph).source}"
        fusion = with_registers(summary(fused), {name: one.registers for name, one in packed.items()})
        return Emitted(Ahead(fused.graph, fusion), source, fusion=lambda: fusion)


_LAYER_NORM = torch.ops.aten.native_layer_norm.default


def _layer_norm(
    made_of: Callable[..., Any],
    inputs: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As on a GPU, which keeps the statistics in float32; a CPU keeps them as its inputs are."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    affine = (None if tensor is None else tensor.to(wide) for tensor in (weight, bias))
    result, mean, rstd = made_of(inputs.to(wide), shape, *affine, eps)
    return result.to(inputs.dtype), mean, rstd


LOADED = FxBackend(name="triton", partition="min_cut", any_tangents=False)
"""Compiles further graphs of a program whose kernels were compiled elsewhere: operator by operator."""
