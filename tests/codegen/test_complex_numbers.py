"""Complex numbers under Inductor: writes into them, and linear algebra."""

from __future__ import annotations

import pytest
import torch

import aotdist
from aotdist.errors import UnsupportedProgram

pytestmark = [
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
    pytest.mark.filterwarnings("ignore:aotdist. Inductor does not compile"),
]


def matrices(num: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(5, 5, dtype=torch.complex64) for _ in range(num)]


def test_what_is_written_through_views_is_read_afterwards():
    """The product was computed before the write."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        written = x + y
        written.diagonal().real.mul_(0.5)
        return x @ written

    given = matrices(2)
    with torch.no_grad():
        ours = aotdist.compile(program, backend="inductor")(*given)
        torch.testing.assert_close(ours, program(*given))


def decomposed(x: torch.Tensor) -> torch.Tensor:
    q, r = torch.linalg.qr(x)
    return q @ r * q


def test_linear_algebra_is_eagers():
    for program in (decomposed, torch.cholesky_inverse):
        found: list[list[torch.Tensor]] = []
        for call in (program, aotdist.compile(program, backend="auto")):
            (x,) = (one.requires_grad_() for one in matrices(1))
            out = call(x)
            found.append([out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))])
        torch.testing.assert_close(*found)


def test_linear_algebra_is_refused_by_name():
    with pytest.raises(UnsupportedProgram, match=r"linalg_qr.default` of complex numbers\n.*torch.linalg.qr"):
        aotdist.compile(decomposed, backend="inductor")(*matrices(1))
