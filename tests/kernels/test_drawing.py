"""Kernels draw the words of the functional stream, each where it is needed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import aotdist
from tests.kernels.reference import Emissions

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x.sin(), 0.3) * x,
    "two draws": lambda x: torch.rand_like(x) * x + torch.rand(x.shape[1]),
    "normal numbers": lambda x: torch.randn_like(x) + x,
    "float64": lambda x: x * torch.rand(x.shape, dtype=torch.float64),
    "of a view": lambda x: F.dropout(x.t(), 0.5).sum(0),
}


def played(program: Callable[[Tensor], Tensor], backend: str, seed: int) -> list[Tensor]:
    compiled = aotdist.compile(program, backend=backend, settings={"functional_rng": True})
    x = torch.linspace(-2, 2, 35 * 48).view(35, 48).requires_grad_()
    torch.manual_seed(seed)
    found = []
    for _ in range(2):
        out = compiled(x)
        found += [out, *torch.autograd.grad(out, x, torch.ones_like(out))]
    return [*found, torch.get_rng_state()]


@pytest.mark.parametrize("seed", [0, 2**40 + 17])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_numbers(name: str, seed: int) -> None:
    torch.testing.assert_close(
        played(PROGRAMS[name], "triton", seed), played(PROGRAMS[name], "fx", seed), rtol=2e-6, atol=1e-6
    )


def test_the_backward_draws_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is not saved."""
    emissions = Emissions(monkeypatch)
    played(PROGRAMS["dropout"], "triton", 0)
    assert all(len(fused.kernels) == 1 and not fused.reasons for fused in emissions.made)
    assert all("= random_word(" in fused.kernels[0].printed.source for fused in emissions.made)


def test_what_keeps_eagers_numbers_says_so() -> None:
    compiled = aotdist.compile(PROGRAMS["dropout"], backend="triton")
    compiled(torch.randn(4, 4))
    assert "functional_rng=True" in str(compiled.explain())
