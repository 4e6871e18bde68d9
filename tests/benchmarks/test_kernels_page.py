"""The bookkeeping of `make kernels`: what is counted, and what the page says of it."""

from __future__ import annotations

import torch

from benchmarks.kernels.counts import Counted, CountedGraph
from benchmarks.kernels.graphs import graphs_of
from benchmarks.kernels.page import page

GOOD = Counted("add_0", 4096, 1, 4, 3, 48_000, 30, 0, num_wide=(4, 2), num_wanted=(4, 2))
BAD = Counted("sum_1", 64, 512, 1, 2, 2_400_000, 90, 16, num_wide=(1, 0), num_wanted=(4, 0))


def test_the_page_sums_up_and_shows_what_is_missing() -> None:
    text = page([CountedGraph("Llama", "bf16", "forward", (GOOD, BAD), 5)], "sm_90", "today")
    assert "| Llama, bf16, forward | 2 | 5 | 17 + 17 | 2.45 | 0.5 | 90 | 16 |" in text
    assert "| `add_0` | 4096 | 1 | 4 | 3 | 0.05 | 0.0 | 30 | 0 | 4 + 2 |" in text
    assert "| `sum_1` | 64 | 512 | 1 | 2 | 2.40 | 0.5 | 90 | 16 | **1 of 4** + 0 |" in text


def test_a_program_is_not_run_to_have_its_graphs() -> None:
    x = torch.full((4,), 3.0, requires_grad=True)
    kinds = [kind for kind, _ in graphs_of(lambda x: x.log().sum(), x)]
    assert kinds == ["forward", "backward"]
