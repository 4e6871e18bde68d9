"""`torch.distributions`: draws, densities, gradients and errors for bad values are those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions, nn
from torch.distributions import Distribution

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.export import aot_export_module
from tests.semantics.observation import Scene, same_as_eager


@pytest.fixture(autouse=True)
def _validating(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not loaded Dynamo, which switches validation off."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


Make = Callable[[torch.Tensor], Distribution]

DISTRIBUTIONS: dict[str, Make] = {
    "Bernoulli": lambda x: distributions.Bernoulli(x.sigmoid()),
    "Beta": lambda x: distributions.Beta(x.exp(), (-x).exp()),
    "Categorical": lambda x: distributions.Categorical(logits=x),
    "Categorical of probabilities": lambda x: distributions.Categorical(probs=x.exp()),
    "Dirichlet": lambda x: distributions.Dirichlet(x.exp()),
    "Exponential": lambda x: distributions.Exponential(x.exp()),
    "Gamma": lambda x: distributions.Gamma(x.exp(), (-x).exp()),
    "Laplace": lambda x: distributions.Laplace(x * 1, x.exp()),
    "LowRankMultivariateNormal": lambda x: distributions.LowRankMultivariateNormal(
        x * 1, torch.ones(x.shape[-1], 1), x.exp()
    ),
    "mixture": lambda x: distributions.MixtureSameFamily(
        distributions.Categorical(logits=x), distributions.Normal(x * 1, x.exp())
    ),
    "Multinomial": lambda x: distributions.Multinomial(5, logits=x),
    "MultivariateNormal": lambda x: distributions.MultivariateNormal(x * 1, torch.eye(x.shape[-1])),
    "MultivariateNormal of a covariance": lambda x: distributions.MultivariateNormal(
        x * 1, torch.eye(x.shape[-1]) + x.exp().t() @ x.exp()
    ),
    "Normal": lambda x: distributions.Normal(x * 1, x.exp()),
    "Normal around a number": lambda x: distributions.Normal(0.0, x.exp()),
    "Normal, independent": lambda x: distributions.Independent(distributions.Normal(x * 1, x.exp()), 1),
    "OneHotCategorical": lambda x: distributions.OneHotCategoricalStraightThrough(logits=x),
    "Poisson": lambda x: distributions.Poisson(x.exp()),
    "RelaxedBernoulli": lambda x: distributions.RelaxedBernoulli(torch.tensor(0.5), logits=x),
    "StudentT": lambda x: distributions.StudentT(x.exp() + 1, x * 1, x.exp()),
    "transformed": lambda x: distributions.TransformedDistribution(
        distributions.Normal(x * 1, x.exp()), [distributions.TanhTransform(cache_size=1)]
    ),
    "Uniform": lambda x: distributions.Uniform(x * 1, x + 1 + x.exp()),
}


def use(make: Make) -> Callable[[torch.Tensor], Any]:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        distribution = make(x)
        drawn = distribution.rsample() if distribution.has_rsample else distribution.sample()
        return [drawn, distribution.log_prob(drawn.detach())]

    return program


def leaf() -> torch.Tensor:
    return torch.randn(4, 3, requires_grad=True)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_and_densities(name: str) -> None:
    same_as_eager(lambda: Scene(use(DISTRIBUTIONS[name]), (leaf(),)), calls=2)


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, deviation = self.encoder(x).chunk(2, -1)
        posterior = distributions.Normal(mean, deviation.exp())
        prior = distributions.Normal(0.0, 1.0)
        return self.decoder(posterior.rsample()), distributions.kl_divergence(posterior, prior).sum()


def test_a_variational_autoencoder() -> None:
    same_as_eager(lambda: Scene(AutoEncoder(), (torch.randn(5, 6),)), calls=2)


def of_scale(x: torch.Tensor) -> torch.Tensor:
    return distributions.Normal(torch.zeros_like(x), x).rsample()


def of_value(x: torch.Tensor) -> torch.Tensor:
    return distributions.Exponential(torch.ones_like(x)).log_prob(x)


@pytest.mark.parametrize("backend", ["fx", "inductor"])
@pytest.mark.parametrize("program", [of_scale, of_value])
def test_what_is_invalid_raises_as_in_eager(program: Callable[..., torch.Tensor], backend: str) -> None:
    good, bad = torch.ones(3), -torch.ones(3)
    compiled = aotdist.compile(program, backend=backend)
    compiled(good)
    texts: list[str] = []
    for call in (program, compiled):
        with pytest.raises(ValueError, match="but found invalid values") as raised:
            call(bad)
        texts.append(str(raised.value).partition(" of ")[0])
    assert texts[0] == texts[1]
    compiled(good)
    assert len(compiled.artifacts) == 1


def test_nothing_is_checked_that_eager_does_not_check() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return distributions.Normal(0.0, x, validate_args=False).log_prob(x)

    same_as_eager(lambda: Scene(program, (-torch.ones(3),)))


def test_an_exported_graph_validates_nothing() -> None:
    with pytest.raises(UnsupportedProgram, match="raises no errors"):
        aot_export_module(AutoEncoder(), (torch.randn(5, 6),), trace_joint=False)
