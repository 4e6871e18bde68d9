"""The bookkeeping of `make kernels`: what is counted, and what the page says of it."""

from __future__ import annotations

import torch

from benchmarks.kernels.counts import Counted, CountedGraph
from benchmarks.kernels.graphs import graphs_of
from benchmarks.kernels.living import most_bytes_alive
from benchmarks.kernels.losses import CountedLoss
from benchmarks.kernels.page import page

GOOD = Counted("add_0", 4096, 1, 4, 3, 48_000, 30, 0, num_wide=(4, 2), num_wanted=(4, 2))
LOSS = CountedLoss(
    4096, "bf16", is_chunked=True, num_kernels=5, num_library=9, num_bytes=10**6, bytes_alive=0
)
BAD = Counted("sum_1", 64, 512, 1, 2, 2_400_000, 90, 16, num_wide=(1, 0), num_wanted=(4, 0))


def test_the_page_sums_up_and_shows_what_is_missing() -> None:
    text = page(
        [CountedGraph("Llama", "bf16", "forward", (GOOD, BAD), 5, 7_000_000)],
        {("Llama", "bf16", "forward"): 5_000_000},
        [LOSS],
        "sm_90",
        "today",
    )
    assert "| Llama, bf16, forward | 2 | 5 | 17 + 17 | 2.45 | 5.00 | 0.5 | 7.00 | 90 | 16 |" in text
    assert "| 4096 | bf16 | by chunks | 5 | 9 | 1.00 | 0.2 | 0.00 |" in text
    assert "| `add_0` | 4096 | 1 | 4 | 3 | 0.05 | 0.0 | 30 | 0 | 4 + 2 |" in text
    assert "| `sum_1` | 64 | 512 | 1 | 2 | 2.40 | 0.5 | 90 | 16 | **1 of 4** + 0 |" in text


def test_memory_is_alive_from_where_it_is_made_to_its_last_use() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.sin().t() @ x.cos()).sum(0)

    ((_, graph),) = graphs_of(program, torch.zeros(16, 16))
    assert most_bytes_alive(graph) == 3 * 16 * 16 * 4


def test_a_program_is_not_run_to_have_its_graphs() -> None:
    x = torch.full((4,), 3.0, requires_grad=True)
    kinds = [kind for kind, _ in graphs_of(lambda x: x.log().sum(), x)]
    assert kinds == ["forward", "backward"]
