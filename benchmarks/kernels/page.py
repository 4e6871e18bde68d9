"""The kernels of models as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aotdist.kernels.compilation import Target
from benchmarks.kernels.counts import Counted, CountedGraph
from benchmarks.kernels.models import MODELS
from benchmarks.tables import header, row

_BANDWIDTH = 4.8e6
"""Bytes a microsecond that an H200 reads and writes, by its data sheet."""

_INDUCTOR = {"forward": (17, 17), "backward": (24, 32)}
"""Kernels and library calls of Inductor (torch 2.13, for sm_90) in the Llama's graphs, in bf16."""


def page(graphs: Sequence[CountedGraph], target: Target, circumstances: str) -> str:
    """The whole page.

    Args:
        graphs: what was counted.
        target: what it was compiled for.
        circumstances: when, and by what.
    """
    parts = [_head(target), circumstances, "", "## Graphs", "", *_summary(graphs)]
    for graph in graphs:
        parts += ["", f"## {_title(graph)}", "", *_table(graph.kernels)]
    return "\n".join([*parts, ""])


def _head(target: Target) -> str:
    sizes = "\n".join(f"- **{name}**: {model.sizes}." for name, model in MODELS.items())
    return f"""# Kernels

What `backend="triton"` makes of three models and two optimizers, compiled for {target} without a GPU: nothing
ran. Written by `make kernels`; do not edit.

{sizes}

- **kernels** are launches of ours, **library** are calls of matrix products, attention, convolutions and what
  has no rule. Views are neither. **Inductor** is what it makes of the same Llama: kernels + library.
- A kernel that ends in `_x21` is 21 kernels of different tensors in one launch.
- **x** and **r** are how many results a kernel has, and how much it reduces to each. **blocks** run side by
  side, on 132 multiprocessors in an H200.
- **MB** are those of the tensors that a kernel reads and writes, each element once; **us** are these bytes at
  4.8 TB/s, less than which no kernel takes.
- **registers** and **spilled** bytes are those of a thread. **128-bit** are the loads + stores of 16 bytes in
  the machine code; where the sizes of the tensors promise more of them than there are, it says of how many.
"""


def _title(graph: CountedGraph) -> str:
    return f"{graph.model}, {graph.precision}, {graph.kind}"


def _summary(graphs: Sequence[CountedGraph]) -> Iterator[str]:
    yield from header("graph", "kernels", "library", "Inductor", "MB", "us", "most registers", "spilled")
    for graph in graphs:
        theirs = _INDUCTOR.get(graph.kind) if (graph.model, graph.precision) == ("Llama", "bf16") else None
        yield row(
            _title(graph),
            str(len(graph.kernels)),
            str(graph.num_library),
            f"{theirs[0]} + {theirs[1]}" if theirs else "",
            _megabytes(graph.num_bytes),
            _microseconds(graph.num_bytes),
            str(max((kernel.registers for kernel in graph.kernels), default=0)),
            str(sum(kernel.spilled for kernel in graph.kernels)),
        )


def _table(kernels: Sequence[Counted]) -> Iterator[str]:
    yield from header("kernel", "x", "r", "blocks", "tensors", "MB", "us", "registers", "spilled", "128-bit")
    for kernel in kernels:
        yield row(
            f"`{kernel.name}`",
            str(kernel.num_results),
            str(kernel.num_reduced),
            str(kernel.num_blocks),
            str(kernel.num_tensors),
            _megabytes(kernel.num_bytes),
            _microseconds(kernel.num_bytes),
            str(kernel.registers),
            str(kernel.spilled),
            " + ".join(map(_share, kernel.num_wide, kernel.num_wanted)),
        )


def _share(found: int, wanted: int) -> str:
    return str(found) if found >= wanted else f"**{found} of {wanted}**"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f}"


def _microseconds(num_bytes: int) -> str:
    return f"{num_bytes / _BANDWIDTH:.1f}"
