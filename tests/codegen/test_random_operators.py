"""Random numbers under Inductor: eager's on a CPU, never read off memory that nobody has written."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Dirichlet, Gamma

import aotdist
from aotdist.codegen.random_operators import prepare_draws
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.proxies import record_on_fakes
from tests.semantics.test_random import DRAWS, leaf

pytestmark = pytest.mark.usefixtures("inductor_cache")

MORE_DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "dropout of a norm": lambda x: F.dropout(F.layer_norm(x, (5,)), 0.1),
    "dropout in bfloat16": lambda x: F.dropout(x.bfloat16(), 0.1),
    "dropout of nothing": lambda x: F.dropout(x[:0], 0.5),
    "dropout of a number": lambda x: F.dropout(x.sum(), 0.5),
    "dropout of channels": lambda x: F.dropout2d(x[None, None], 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "exponential_": lambda x: torch.empty(6, 5).exponential_() + x,
    "cauchy_": lambda x: torch.empty(6, 5).cauchy_() + x,
    "log_normal_": lambda x: torch.empty(6, 5).log_normal_() + x,
    "geometric_": lambda x: torch.empty(6, 5).geometric_(0.4) + x,
    "random_": lambda x: torch.empty(6, 5).random_(9) + x,
    "random_ between": lambda x: torch.empty(6, 5).random_(2, 9) + x,
    "uniform_": lambda x: torch.empty(6, 5).uniform_() + x,
    "uniform_ between": lambda x: torch.empty(6, 5).uniform_(2, to=9) + x,
    "normal_": lambda x: torch.empty(6, 5).normal_(1, 2) + x,
    "normal of two tensors": lambda x: torch.normal(x.detach(), x.detach().exp()),
    "normal of two numbers": lambda x: torch.normal(0.0, 1.0, (3,)),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, 0.7),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "randn_like of what is transposed": lambda x: torch.randn_like(x.t()) + x.t(),
    "randint_like": lambda x: torch.randint_like(x, 9) + x,
    "randint_like between": lambda x: torch.randint_like(x, 2, 9) + x,
    "poisson": lambda x: torch.poisson(x.detach().abs() * 3),
    "binomial": lambda x: torch.binomial(torch.full((6, 5), 9.0), x.detach().sigmoid()),
    "gamma": lambda x: Gamma(x.exp(), torch.ones(6, 5)).rsample(),
    "dirichlet": lambda x: Dirichlet(x.exp()).rsample(),
    "rand in double": lambda x: torch.rand(6, 5, dtype=torch.double) + x,
    "the default generator, by name": lambda x: torch.randn(6, 5, generator=torch.default_generator) + x,
}


def every_draw(x: Tensor) -> list[Tensor]:
    drawn = [draw(x) for draw in (DRAWS | MORE_DRAWS).values()]
    torch.rand(3)  # the last one, which nobody reads
    return drawn


def seeded(program: Callable[[Tensor], list[Tensor]], x: Tensor, backward: bool) -> list[Tensor]:
    """Results and gradients of two calls, and where the generator stands after them."""
    torch.manual_seed(3)
    seen = []
    for _ in range(2):
        results = program(x)
        seen += [result.detach() for result in results]
        if backward:
            summed = torch.stack(
                [r.double().square().sum() for r in results if r.dtype != torch.bfloat16]
            ).sum()
            seen += torch.autograd.grad(summed, x)
    return [*seen, torch.get_rng_state()]


@pytest.mark.parametrize("backward", [True, False], ids=["static, with a backward", "dynamic, for inference"])
def test_draws_are_eagers_and_in_its_order(backward: bool) -> None:
    x = leaf()
    compiled = aotdist.compile(every_draw, backend="inductor", settings={"dynamic": not backward})
    with torch.set_grad_enabled(backward):
        expected, actual = seeded(every_draw, x, backward), seeded(compiled, x, backward)
    for wanted, got in zip(expected, actual, strict=True):
        tolerance = 1e-2 if got.dtype == torch.bfloat16 else 1e-4  # Inductor rounds to bfloat16 less often
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
        assert got.stride() == wanted.stride()


def _norm_and_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 5), nn.Dropout(0.5)
    )


def _losses(step: Callable[[Tensor], Tensor], num_steps: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [step(torch.randn(6, 5)).detach().clone() for _ in range(num_steps)]


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _loss_in_bfloat16(model: nn.Module, x: Tensor) -> Tensor:
    return _loss(model, x.bfloat16())


def _trained(model: Any, call: Callable[..., Tensor] = _loss) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        loss = call(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return _losses(step)


def _in_one_step(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return _losses(aotdist.train_step(model, _loss, optimizer, backend="auto"))


def _in_bfloat16(model: nn.Module) -> list[Tensor]:
    return _trained(aotdist.compile(model.bfloat16()), _loss_in_bfloat16)


WAYS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "compile": lambda model: _trained(aotdist.compile(model)),
    "dynamic": lambda model: _trained(aotdist.compile(model, settings={"dynamic": True})),
    "train_step": _in_one_step,
    "torch.compile": lambda model: _trained(torch.compile(model, backend="aotdist")),
    "bfloat16": _in_bfloat16,
}


@pytest.mark.parametrize("way", WAYS)
def test_dropout_after_a_norm_trains_as_in_eager(way: str) -> None:
    model = _norm_and_dropout()
    expected = _trained(copy.deepcopy(model))
    actual = WAYS[way](model)
    tolerance = 0.1 if way == "bfloat16" else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


def test_a_generator_of_the_users_is_refused_by_name_and_runs_by_fx() -> None:
    def program(x: Tensor) -> Tensor:
        return x + torch.randn(6, 5, generator=generator)

    generator, x = torch.Generator(), torch.randn(6, 5)
    with pytest.raises(UnsupportedProgram, match="aten.randn.generator` with a generator") as refusal:
        aotdist.compile(program, backend="inductor")(x)
    assert "test_random_operators.py" in str(refusal.value)
    generator.manual_seed(0)
    with pytest.warns(match="aten.randn.generator` with a generator"):
        actual = aotdist.compile(program)(x)
    generator.manual_seed(0)
    assert torch.equal(actual, program(x))


def test_on_a_gpu_inductor_draws_numbers_of_its_own() -> None:
    aten = torch.ops.aten

    def program(x: Tensor) -> list[Tensor]:
        return [aten.rand_like(x), aten.bernoulli.p(x, 0.5)]

    with FakeTensorMode():
        x = torch.empty(4, 3, device="cuda")
    gm = record_on_fakes(program, [x], {})
    prepare_draws(gm)
    drawn = {node.target for node in gm.graph.nodes if "rand" in str(node.target)}
    assert drawn == {aten.rand.default}
