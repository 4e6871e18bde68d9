"""Whole training steps as their users wrote them, run beside eager: what a compiled one has to agree on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import aotdist
from aotdist.subclasses.protocol import is_wrapper, plain_tensors

Place = Callable[[nn.Module], Any]
"""Shards a model, in place."""
_PLACES: list[tuple[Place, int]] = []


@contextlib.contextmanager
def placing(place: Place, data_rank: int) -> Generator[None]:
    """Models that are built inside are sharded; this rank's batches are those of `data_rank`."""
    _PLACES.append((place, data_rank))
    try:
        yield
    finally:
        _PLACES.pop()


def placed(*models: nn.Module) -> None:
    """Shard models as the test wants them; where it says nothing they stay what they are."""
    for place, _ in _PLACES[-1:]:
        for model in models:
            place(model)


def seeded(at: int) -> torch.Generator:
    """Draws the batch of a step: ranks that share no batch draw others."""
    return torch.Generator().manual_seed(at + sum(1000 * data_rank for _, data_rank in _PLACES[-1:]))


def labelled(at: int) -> tuple[Any, ...]:
    """Six rows of eight features, and a class of four for each."""
    generator = seeded(at)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def unplaced() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 4))


def classifier() -> nn.Module:
    model = unplaced()
    placed(model)
    return model


@dataclass
class Written:
    """A step, and what it trains.

    Args:
        step: the step.
        models: whose parameters, buffers and gradients are compared.
        keeps: what else has a `state_dict`: optimizers, schedules, scalers.
        logs: what else is compared after each step.
        batch: the arguments of a step.
        between: what is done after each step.
    """

    step: Callable[..., Any]
    models: Sequence[nn.Module]
    keeps: Sequence[Any] = ()
    logs: Callable[[], Any] = lambda: None
    batch: Callable[[int], tuple[Any, ...]] = labelled
    between: Callable[[int], Any] = lambda at: None

    def state(self) -> Any:
        params = [dict(model.named_parameters()) for model in self.models]
        grads = [{name: param.grad for name, param in named.items()} for named in params]
        trained = [{name: param.requires_grad for name, param in named.items()} for named in params]
        states = [holder.state_dict() for holder in (*self.models, *self.keeps)]
        return states, grads, trained, self.logs()


Build = Callable[[], Written]


def assert_same(ours: Any, eager: Any, path: str, close: bool = False) -> None:
    """Fail, and say where, unless two results or states are equal to the bit (`close`: within rounding)."""
    assert type(ours) is type(eager), (path, ours, eager)
    if isinstance(ours, torch.Tensor):
        _assert_same_tensor(ours, eager, path, close)
    elif isinstance(ours, dict):
        assert ours.keys() == eager.keys(), (path, ours.keys(), eager.keys())
        for key in ours:
            assert_same(ours[key], eager[key], f"{path}.{key}", close)
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(eager), (path, ours, eager)
        for at, both in enumerate(zip(ours, eager, strict=True)):
            assert_same(*both, f"{path}[{at}]", close)
    elif isinstance(ours, float) and close:
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4, msg=lambda said: f"{path}: {said}")
    elif not callable(ours):
        assert ours == eager or (ours != ours and eager != eager), (path, ours, eager)


def _assert_same_tensor(ours: torch.Tensor, eager: torch.Tensor, path: str, close: bool) -> None:
    assert (ours.shape, ours.dtype, ours.requires_grad) == (eager.shape, eager.dtype, eager.requires_grad), (
        path
    )
    if isinstance(ours, DTensor):
        assert isinstance(eager, DTensor) and ours.placements == eager.placements, path
        _assert_same_tensor(ours.to_local(), eager.to_local(), path, close)
    elif is_wrapper(ours):
        assert (ours.is_sparse and ours.is_coalesced()) == (eager.is_sparse and eager.is_coalesced()), path
        assert_same(list(plain_tensors(ours)), list(plain_tensors(eager)), path, close)
    elif close:
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4, msg=lambda said: f"{path}: {said}")
    else:
        assert ours.stride() == eager.stride(), (path, ours.stride(), eager.stride())
        is_same = torch.equal(torch.nan_to_num(ours), torch.nan_to_num(eager))
        assert is_same and torch.equal(ours.isnan(), eager.isnan()), (path, ours, eager)


def compiled_beside_eager(
    build: Build, num_steps: int = 5, backend: str = "fx", **options: Any
) -> aotdist.compiled.CompiledFunction:
    """Do the steps eagerly and compiled, and compare results, random numbers and state after each.

    Args:
        build: makes the step and what it trains.
        num_steps: how many.
        backend: see `aotdist.compile`; only `fx` has eager's bits.
        options: of `aotdist.compile`.
    """
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        made.append(build())
    eager, ours = made
    compiled = aotdist.compile(ours.step, backend=backend, **options)
    for at in range(num_steps):
        results = []
        for one, step in ((ours, compiled), (eager, eager.step)):
            torch.manual_seed(at)
            with torch.compiler.set_stance("force_eager" if step is eager.step else "default"):
                results.append((step(*one.batch(at)), torch.get_rng_state()))
        assert_same(*results, f"result {at}", close=backend != "fx")
        assert_same(ours.state(), eager.state(), f"state {at}", close=backend != "fx")
        for one in made:
            one.between(at)
    return compiled


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)
