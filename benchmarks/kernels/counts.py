"""What the kernels of a model are, and what each costs on a GPU."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from aotdist.codegen.contract import Kind
from aotdist.codegen.triton import with_kernels
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.gpus import Target
from aotdist.kernels.polynomial import hint_of
from aotdist.program import Graph, Slot
from benchmarks.kernels.binaries import compile_kernel, num_vectors
from benchmarks.kernels.graphs import graphs_of
from benchmarks.kernels.living import most_bytes_alive
from benchmarks.kernels.models import Model, Optimizer, Precision


@dataclass(frozen=True, slots=True)
class Counted:
    """A kernel.

    Args:
        name: what it does.
        num_results: places along `x`.
        num_reduced: places along `r`.
        num_blocks: how many run side by side.
        num_tensors: that it reads and writes.
        num_bytes: of what it reads and writes, each element once.
        registers: of a thread.
        spilled: bytes of a thread.
        num_wide: loads and stores of 16 bytes.
        num_wanted: how many of them there must be at least.
    """

    name: str
    num_results: int
    num_reduced: int
    num_blocks: int
    num_tensors: int
    num_bytes: int
    registers: int
    spilled: int
    num_wide: tuple[int, int]
    num_wanted: tuple[int, int]


@dataclass(frozen=True, slots=True)
class CountedGraph:
    """A graph.

    Args:
        model: whose.
        precision: of its parameters and products.
        kind: which half.
        kernels: in the order in which they run.
        num_library: calls of libraries.
        bytes_alive: the most that are there at once of what it makes and is handed over, results included.
    """

    model: str
    precision: Precision
    kind: Kind
    kernels: tuple[Counted, ...]
    num_library: int
    bytes_alive: int

    @property
    def num_bytes(self) -> int:
        """Of all its kernels."""
        return sum(kernel.num_bytes for kernel in self.kernels)


def count(name: str, model: Model | Optimizer, precision: Precision, target: Target) -> list[CountedGraph]:
    """A model's graphs."""
    program, inputs = model.program(precision)
    graphs = graphs_of(program, settings=model.settings, **inputs)
    saved = {slot for _, graph in graphs for slot in graph.outs if slot.role == "saved"}
    return [_counted_graph(name, precision, kind, graph, saved, target) for kind, graph in graphs]


def _counted_graph(
    model: str, precision: Precision, kind: Kind, graph: Graph, saved: Container[Slot], target: Target
) -> CountedGraph:
    fused = with_kernels(graph, keeps_casts=False, label=f"{model} {kind}")
    kernels = tuple(_counted(emitted, target) for emitted in fused.kernels)
    alive = most_bytes_alive(fused.graph, saved)
    return CountedGraph(model, precision, kind, kernels, len(fused.reasons), alive)


def _counted(emitted: EmittedKernel, target: Target) -> Counted:
    kernel, binary = emitted.kernel, compile_kernel(emitted, target)
    return Counted(
        name=emitted.printed.name,
        num_results=hint_of(emitted.num_results),
        num_reduced=hint_of(kernel.num_reduced),
        num_blocks=emitted.num_blocks,
        num_tensors=len(emitted.printed.tensors),
        num_bytes=emitted.num_bytes,
        registers=binary.usage.registers,
        spilled=binary.usage.spilled,
        num_wide=(binary.count("LDG", "128"), binary.count("STG", "128")),
        num_wanted=num_vectors(emitted),
    )
