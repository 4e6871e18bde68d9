"""What a loss of many logits takes, as it is written and by chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from aotdist.codegen.triton import with_kernels
from benchmarks.kernels.graphs import graphs_of
from benchmarks.kernels.living import most_bytes_alive
from benchmarks.kernels.models import DTYPES, Precision

FEATURES, CLASSES = 2048, 32000
CHUNK_BYTES = 128 * 2**20
_NUM_ROWS = (4096, 16384)
_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class CountedLoss:
    """Both halves of a loss.

    Args:
        num_rows: of logits.
        precision: of the layer.
        is_chunked: whether it is computed by chunks.
        num_kernels: launches of ours.
        num_library: calls of libraries.
        num_bytes: that kernels read and write.
        bytes_alive: the most that are there at once in either half.
    """

    num_rows: int
    precision: Precision
    is_chunked: bool
    num_kernels: int
    num_library: int
    num_bytes: int
    bytes_alive: int


def counted_losses() -> Iterator[CountedLoss]:
    """Each size in each precision, whole and by chunks."""
    for num_rows in _NUM_ROWS:
        for precision in _PRECISIONS:
            for is_chunked in (False, True):
                yield _counted(num_rows, precision, is_chunked=is_chunked)


def _counted(num_rows: int, precision: Precision, *, is_chunked: bool) -> CountedLoss:
    options: dict[str, Any] = {"dtype": DTYPES[precision], "requires_grad": True}
    x, w = torch.empty(num_rows, FEATURES, **options), torch.empty(CLASSES, FEATURES, **options)
    labels = torch.zeros(num_rows, dtype=torch.int64)
    settings = {"loss_chunk_bytes": CHUNK_BYTES} if is_chunked else {}
    graphs = [graph for _, graph in graphs_of(_loss, x, w, labels, settings=settings)]
    saved = {slot for graph in graphs for slot in graph.outs if slot.role == "saved"}
    halves = [with_kernels(graph, keeps_casts=False, label="loss") for graph in graphs]
    return CountedLoss(
        num_rows,
        precision,
        is_chunked,
        sum(len(half.kernels) for half in halves),
        sum(len(half.reasons) for half in halves),
        sum(kernel.num_bytes for half in halves for kernel in half.kernels),
        max(most_bytes_alive(half.graph, saved) for half in halves),
    )


def _loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), labels)
