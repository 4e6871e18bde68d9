"""Equal layers are found in a row of operators, and cut where the least is lost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from aotdist.codegen.layers import Run, longest_run
from aotdist.codegen.region_graph import where_layers_begin
from tests.codegen.captured import calls, captured

RUNS: dict[str, tuple[str, Run | None]] = {
    "nothing repeats": ("abcdef", None),
    "once more": ("xabcabcy", Run(1, 7, 3)),
    "with a part of one more": ("xabcabcaby", Run(1, 9, 3)),
    "one operator": ("aaaa", Run(0, 4, 1)),
    "blocks that take turns": ("abcabdabcabd", Run(0, 12, 6)),
    "the longer of two": ("ababxcdecdecde", Run(5, 14, 3)),
    "an operator also stands elsewhere": ("aabcxabcxabcxa", Run(1, 14, 4)),
}


@pytest.mark.parametrize(("row", "run"), RUNS.values(), ids=list(RUNS))
def test_the_run_that_saves_the_most(row: str, run: Run | None) -> None:
    assert longest_run(row) == run


def block(x: Tensor, weight: Tensor) -> Tensor:
    """A norm, a product, and a sum onto the residual stream; long enough to be a part."""
    normed = x
    for _ in range(8):
        normed = (normed - normed.mean(-1, keepdim=True)) * 0.5
    return x + (normed @ weight)


def other(x: Tensor, weight: Tensor) -> Tensor:
    return block(x.sin(), weight)


def pieces(fn: Callable[..., list[Tensor]], num_weights: int) -> list[list[str]]:
    """Operators between the places at which a program is cut."""
    nodes = calls(captured(fn, [torch.randn(4, 4) for _ in range(num_weights + 1)]))
    begins = [0, *where_layers_begin(nodes), len(nodes)]
    return [[str(node.target) for node in nodes[begin:end]] for begin, end in pairwise(begins) if begin < end]


def stack(*layers: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., list[Tensor]]:
    def fn(x: Tensor, *weights: Tensor) -> list[Tensor]:
        for layer, weight in zip(layers, weights, strict=True):
            x = layer(x, weight)
        return [x]

    return fn


def test_a_sum_stays_with_the_norm_that_reads_it() -> None:
    first, *middle, last = pieces(stack(*[block] * 6), 6)
    assert all(piece == middle[0] for piece in middle) and len(middle) in (4, 5)
    assert "aten.add.Tensor" not in (first[-1], middle[0][-1]) and "aten.add.Tensor" in last


def test_blocks_that_take_turns_are_a_layer_together() -> None:
    _, *middle, _ = pieces(stack(*[block, other] * 5), 10)
    assert all(piece == middle[0] for piece in middle) and middle[0].count("aten.mm.default") == 2


def test_an_encoder_and_a_decoder() -> None:
    found = pieces(stack(*[block] * 5, torch.matmul, *[other] * 5), 11)
    assert sum(piece == found[1] for piece in found) >= 4
    assert sum(piece == found[-2] for piece in found) >= 4 and "aten.sin.default" in found[-2]


def test_small_layers_are_a_part_together() -> None:
    found = pieces(stack(*[lambda x, weight: (x @ weight).relu()] * 40), 40)
    assert [piece.count("aten.mm.default") for piece in found] == [12, 12, 12, 4]


def test_a_few_small_layers_are_no_parts() -> None:
    assert len(pieces(stack(*[lambda x, weight: (x @ weight).relu()] * 8), 8)) == 1


def test_a_view_of_a_number_has_no_memory() -> None:
    """Rewrites leave the conjugate of a number, of an inverse Fourier transform."""
    graph = captured(lambda x: [torch.view_as_real(x.conj() * x)], [torch.randn(4, dtype=torch.complex64)])
    nodes = calls(graph)
    nodes[0].args = (1j,)
    assert str(nodes[0].target) == "aten._conj.default" and where_layers_begin(nodes) == []
