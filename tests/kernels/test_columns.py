"""The backward of norms: a kernel that goes through the rows adds them up on the way."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import aotdist
from tests.kernels.reference import Emissions, assert_same, outcome

NORMS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "layer norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), 2),
    "RMS norm": (lambda x, w: F.rms_norm(x, w.shape, w), 1),
    "RMS norm behind a sum": (lambda x, w: F.rms_norm(x.sin() + x, w.shape, w) * 2, 1),
    "softmax with a scale": (lambda x, w: torch.softmax(x * w, -1), 1),
}
ROWS = {
    "several dimensions": (4, 128),
    "parts that divide none of them": (3, 7, 32),
    "rows that fill no block": (9152,),
}


def inputs(rows: tuple[int, ...], columns: int, num_weights: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(*rows, columns), *[(columns,)] * num_weights]
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize(
    "norm, rows, dtype",
    [
        *((norm, "several dimensions", torch.bfloat16) for norm in NORMS),
        *(("layer norm", rows, torch.float32) for rows in ROWS),
    ],
)
def test_rows_are_read_once(
    norm: str, rows: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    emissions, (program, num_weights) = Emissions(monkeypatch), NORMS[norm]
    columns = 24 if rows == "rows that fill no block" else 136
    args = inputs(ROWS[rows], columns, num_weights, dtype)
    found = outcome(aotdist.compile(program, backend="triton"), args)
    # Of bfloat16, eager adds up the gradients of weights in bfloat16.
    exact = outcome(program, [arg.detach().double().requires_grad_() for arg in args])
    tolerance = 3e-2 if dtype is torch.bfloat16 else 2e-4
    for tensor, expected in zip([*found[0], *found[1]], [*exact[0], *exact[1]], strict=True):
        torch.testing.assert_close(tensor.double(), expected, rtol=tolerance, atol=10 * tolerance)
    backward = emissions.made[-1].kernels
    folding = [one.kernel for one in backward if one.kernel.p is not None]
    assert len(folding) == 1 and sum(len(one.members) for one in backward) == 1 + num_weights
    partial = [store for store in folding[0].stores if store.value.axes == {"r"}]
    assert len(partial) == num_weights and all(store.stored is torch.float32 for store in partial)


@pytest.mark.parametrize(
    "rows, columns",
    [pytest.param(211, 64, id="a prime"), pytest.param(96, 64, id="few"), pytest.param(128, 9000, id="long")],
)
def test_other_rows_are_not_cut(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    assert_same(NORMS["RMS norm"][0], *inputs((rows,), columns, 1, torch.float32), rtol=1e-4, atol=1e-3)
    assert all(one.kernel.p is None for fused in emissions.made for one in fused.kernels)


def rows_and_others(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A library call stands between the rows and the columns."""
    return torch.softmax(x, -1), (x @ w).sin().sum(0, keepdim=True)


def test_a_cut_that_no_kernel_takes_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    with torch.no_grad():
        assert_same(rows_and_others, torch.randn(512, 64), torch.randn(64, 64), rtol=1e-4, atol=1e-3)
    (made,) = emissions.made
    assert len(made.kernels) == 2
    assert all(one.kernel.p is None for one in made.kernels)


def test_a_cut_that_no_kernel_takes_stays_where_few_blocks_would_have_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emissions = Emissions(monkeypatch)
    with torch.no_grad():
        assert_same(rows_and_others, torch.randn(4096, 64), torch.randn(64, 64), rtol=1e-4, atol=1e-2)
    counts = [one.kernel.num_results for one in emissions.made[0].kernels if one.kernel.r]
    assert 256 * 64 in counts


def test_sums_with_their_dimensions_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.softmax(x, -1)
        return y, y.sum((0, 1), keepdim=True)

    emissions = Emissions(monkeypatch)
    with torch.no_grad():
        assert_same(program, torch.randn(8, 64, 40), rtol=1e-4, atol=1e-4)
    assert [one.kernel.p is None for one in emissions.made[0].kernels].count(False) == 1
