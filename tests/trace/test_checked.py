"""What PyTorch's functions check in C++ is checked when the program has run, with eager's error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import aotdist
from tests.semantics.observation import Scene, same_as_eager


class Vocoder(nn.Module):
    """Its window is a buffer."""

    def __init__(self, window: torch.Tensor, **options: object) -> None:
        super().__init__()
        self.options = options
        self.register_buffer("window", window)

    def forward(self, spectrum: torch.Tensor) -> torch.Tensor:
        return torch.istft(spectrum * 2, 16, window=self.window, **self.options)


def spectrum() -> torch.Tensor:
    return torch.randn(2, 9, 17, dtype=torch.complex64).requires_grad_()


OPTIONS = [{}, {"hop_length": 8}, {"length": 60}, {"normalized": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_an_inverse_spectrum(options: dict[str, object]) -> None:
    same_as_eager(lambda: Scene(Vocoder(torch.hann_window(16), **options), (spectrum(),)), calls=2)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("backend", ["inductor", "behind Dynamo"])
def test_an_inverse_spectrum_elsewhere(backend: str) -> None:
    eager = Vocoder(torch.hann_window(16))
    compiled = (
        torch.compile(eager, backend="aotdist", options={"backend": "fx"}, fullgraph=True)
        if backend == "behind Dynamo"
        else aotdist.compile(eager, backend=backend)
    )
    x = spectrum()
    torch.testing.assert_close(compiled(x), eager(x))


def test_windows_that_add_up_to_zero_are_an_error_at_the_call_that_has_them() -> None:
    def program(x: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        return torch.istft(x, 16, window=window)

    def with_none(x: torch.Tensor) -> torch.Tensor:
        return torch.istft(x, 16, window=torch.zeros(16))

    compiled = aotdist.compile(program, backend="fx")
    x, window = spectrum(), torch.hann_window(16)
    assert torch.equal(compiled(x, window), program(x, window))
    for call in (compiled, program):
        with pytest.raises(RuntimeError, match="window overlap add min: 1"):
            call(x, window * 0)
    with pytest.raises(RuntimeError, match="window overlap add min: 1"):
        aotdist.compile(with_none, backend="fx")(x)


COUNTS, WEIGHTS = torch.tensor([1, 2, 3, 1]), torch.tensor([0.5, 1.0, 0.1, 0.7])
WEIGHTED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "counts": lambda x, counts, weights: torch.cov(x, fweights=counts),
    "weights": lambda x, counts, weights: x.cov(aweights=weights, correction=0),
    "both": lambda x, counts, weights: torch.cov(x, fweights=counts, aweights=weights),
}


@pytest.mark.parametrize("program", WEIGHTED)
def test_a_weighted_covariance(program: str) -> None:
    cov = WEIGHTED[program]
    same_as_eager(lambda: Scene(cov, (torch.randn(3, 4, requires_grad=True), COUNTS, WEIGHTS)), calls=2)
    compiled, x = aotdist.compile(cov, backend="fx"), torch.randn(3, 4)
    for sign in (-1, 0):
        said = []
        for call in (cov, compiled):
            with pytest.raises(RuntimeError, match=r"cov\(\)") as raised:
                call(x, COUNTS * sign, WEIGHTS * sign)
            said.append(str(raised.value).partition("\n")[0])
        assert said[0] == said[1]


def test_the_phase_of_singular_vectors() -> None:
    def product(x: torch.Tensor) -> torch.Tensor:
        u, _, vh = torch.linalg.svd(x)
        return u @ vh

    def phase(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svd(x)[0].real

    same_as_eager(
        lambda: Scene(product, (torch.randn(3, 3, dtype=torch.complex64, requires_grad=True),)), calls=2
    )
    x = torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)
    for call in (phase, aotdist.compile(phase, backend="fx")):
        with pytest.raises(RuntimeError, match="specified up to multiplication by e"):
            call(x).sum().backward()
