"""The kernels of models as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from aotdist.kernels.gpus import USUAL, Target
from benchmarks.kernels.counts import Counted, CountedGraph
from benchmarks.kernels.inductor import Half
from benchmarks.kernels.losses import CHUNK_BYTES, CLASSES, FEATURES, CountedLoss
from benchmarks.kernels.models import MODELS
from benchmarks.tables import header, row

_INDUCTOR = {"forward": (17, 17), "backward": (24, 32)}
"""Kernels and library calls of Inductor (torch 2.13, for sm_90) in the Llama's graphs, in bf16."""


def page(
    graphs: Sequence[CountedGraph],
    theirs: Mapping[Half, int],
    losses: Sequence[CountedLoss],
    target: Target,
    circumstances: str,
) -> str:
    """The whole page.

    Args:
        graphs: what was counted.
        theirs: bytes that Inductor's kernels move.
        losses: losses that were, whole and by chunks.
        target: what it was compiled for.
        circumstances: when, and by what.
    """
    parts = [_head(target), circumstances, "", "## Graphs", "", *_summary(graphs, theirs)]
    parts += ["", "## Losses", "", _ABOUT_LOSSES, "", *_losses(losses)]
    for graph in graphs:
        parts += ["", f"## {_title(graph)}", "", *_table(graph.kernels)]
    return "\n".join([*parts, ""])


def _head(target: Target) -> str:
    sizes = "\n".join(f"- **{name}**: {model.sizes}." for name, model in MODELS.items())
    return f"""# Kernels

What `backend="triton"` makes of three models and two optimizers, compiled for {target} without a GPU: nothing
ran. Written by `make kernels`; do not edit.

{sizes}

- **fp8** is bf16 with the linear layers of `to_float8(model, "delayed")`, all but the Llama's head.
- **kernels** are launches of ours, **library** are calls of matrix products, attention, convolutions and what
  has no rule. Views are neither. **Inductor** is what it makes of the same Llama: kernels + library.
- A kernel that ends in `_x21` is 21 kernels of different tensors in one launch.
- **x** and **r** are how many results a kernel has, and how much it reduces to each. **blocks** run side by
  side, on {USUAL.num_processors} multiprocessors in an H200.
- **MB** are those of the tensors that a kernel reads and writes, each element once; **us** are these bytes at
  {USUAL.bandwidth / 1e12} TB/s, less than which no kernel takes.
- **Inductor MB** are what Inductor counts for its own kernels of the same model, lowered for the CPU, where
  it needs no GPU to ask; library calls are in neither.
- **MB alive** are the most that are there at once of what a graph makes, returns or was saved for it.
- **registers** and **spilled** bytes are those of a thread. **128-bit** are the loads + stores of 16 bytes in
  the machine code; where the sizes of the tensors promise more of them than there are, it says of how many.
"""


def _title(graph: CountedGraph) -> str:
    return f"{graph.model}, {graph.precision}, {graph.kind}"


def _summary(graphs: Sequence[CountedGraph], theirs_bytes: Mapping[Half, int]) -> Iterator[str]:
    yield from header(
        *("graph", "kernels", "library", "Inductor", "MB", "Inductor MB", "us", "MB alive"),
        *("most registers", "spilled"),
    )
    for graph in graphs:
        moved = theirs_bytes.get((graph.model, graph.precision, graph.kind))
        theirs = _INDUCTOR.get(graph.kind) if (graph.model, graph.precision) == ("Llama", "bf16") else None
        yield row(
            _title(graph),
            str(len(graph.kernels)),
            str(graph.num_library),
            f"{theirs[0]} + {theirs[1]}" if theirs else "",
            _megabytes(graph.num_bytes),
            "" if moved is None else _megabytes(moved),
            _microseconds(graph.num_bytes),
            _megabytes(graph.bytes_alive),
            str(max((kernel.registers for kernel in graph.kernels), default=0)),
            str(sum(kernel.spilled for kernel in graph.kernels)),
        )


_ABOUT_LOSSES = f"""A linear layer of {FEATURES} features and {CLASSES} classes, `cross_entropy` of its logits
in float32, and both gradients: as they are written, and with
`Settings(loss_chunk_bytes={CHUNK_BYTES >> 20} * 2**20)`."""


def _losses(losses: Sequence[CountedLoss]) -> Iterator[str]:
    yield from header("rows", "precision", "loss", "kernels", "library", "MB", "us", "MB alive")
    for loss in losses:
        yield row(
            str(loss.num_rows),
            loss.precision,
            "by chunks" if loss.is_chunked else "whole",
            str(loss.num_kernels),
            str(loss.num_library),
            _megabytes(loss.num_bytes),
            _microseconds(loss.num_bytes),
            _megabytes(loss.bytes_alive),
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
    return f"{1e6 * num_bytes / USUAL.bandwidth:.1f}"
