"""Under Inductor, too, what is put into an expanded tensor, or into windows, goes to one element only."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.func import hessian

import aotdist

pytestmark = [
    pytest.mark.usefixtures("inductor_cache"),
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning"),
]

ROWS, COLUMNS = torch.arange(4)[:, None], torch.tensor([0, 2])

OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: (x[0] * 2).expand(4, 3),
    "expanded, in memory": lambda x: x[0].sort().values.expand(4, 3),
    "broadcast": lambda x: torch.broadcast_tensors(x[0] * 2, x)[0],
    "zeros": lambda x: x.new_zeros(()).expand(4, 3),
    "windows": lambda x: (x.flatten() * 2).unfold(0, 3, 1)[:4],
    "strided": lambda x: (x * 2).as_strided((4, 3), (2, 1)),
    "an argument": lambda x: x[0].expand(4, 3),
}
PUT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_put": lambda e, v: e.index_put((ROWS, COLUMNS), v),
    "accumulated": lambda e, v: e.index_put((ROWS, COLUMNS), v, accumulate=True),
    "masked": lambda e, v: e.index_put((e > 0,), v[0, 0]),
    "index_add": lambda e, v: e.index_add(1, COLUMNS, v),
    "index_copy": lambda e, v: e.index_copy(1, COLUMNS, v),
    "index_fill": lambda e, v: e.index_fill(0, COLUMNS, 3.0),
    "scatter": lambda e, v: e.scatter(1, COLUMNS.expand(4, 2), v),
    "slice": lambda e, v: e.slice_scatter(v, 1, 0, 2).cumsum(0),
    "select": lambda e, v: e.select_scatter(v[:, 0], 1, 1).cumsum(0),
    "diagonal": lambda e, v: e.diagonal_scatter(v[:3, 0]).cumsum(0),
}


def _is_kept_overlapping(into: str, put: str) -> bool:
    """Whether eager, too, writes many elements where one is put, in no order that it tells."""
    return into in ("windows", "strided") and put in ("slice", "select", "diagonal")


@pytest.mark.parametrize("dynamic", [False, True])
def test_puts(dynamic: bool):
    def program(x: Tensor, v: Tensor) -> dict[str, Tensor]:
        pairs = [pair for pair in product(OVERLAPPING, PUT) if not _is_kept_overlapping(*pair)]
        return {f"{into}, {put}": PUT[put](OVERLAPPING[into](x), v) for into, put in pairs}

    x, v = torch.randn(4, 3), torch.randn(4, 2)
    found = aotdist.compile(program, backend="inductor", settings={"dynamic": dynamic})(x, v)
    torch.testing.assert_close(found, program(x, v))


def test_a_hessian_through_a_diagonal():
    """Its forward-mode derivative of `trace` puts into expanded zeros."""

    def energy(t: Tensor) -> Tensor:
        return (torch.trace(t) * torch.eye(3)).square().sum() + (t**3).sum()

    t = torch.randn(3, 3)
    found = aotdist.compile(lambda t: hessian(energy)(t), backend="inductor")(t)
    torch.testing.assert_close(found, hessian(energy)(t))
