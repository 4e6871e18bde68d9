"""One row's part about one backend that makes kernels: how near it stays to eager, and to float64.

With dropout on, ten steps of AdamW from the same seeds: eager's random numbers are drawn, so that losses are
eager's but for rounding; `torch.compile` draws others, and its losses show how far those carry. Without
dropout, one step beside the same step in float64.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import set_seed

import aotdist
from benchmarks.architectures import trial
from benchmarks.architectures.making import make, make_batch
from benchmarks.architectures.trial import Job, said
from benchmarks.architectures.vocabulary import ROUNDING, Found, Half, Rounded, Way

_NUM_STEPS = 10


def found_by(job: Job) -> Found:
    """What is found about a model run in any way."""
    return Found(rounded=fill(job.model, job.way)) if job.way in ROUNDING else trial.fill(job)


def failed(job: Job, why: str) -> Found:
    """What is found where the process that was to find it did not."""
    return Found(rounded=Rounded(why)) if job.way in ROUNDING else Found(Half(why))


def fill(model: str, way: Way) -> Rounded:
    """What becomes of training by one of `ROUNDING`."""
    torch.compiler.reset()
    rounded, call = Rounded(), _calling(way)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            rounded.apart = apart_with_dropout(model, way)
            expected, eager, ours = (
                _of_one_step(model, *how)
                for how in ((_as_it_is, torch.float64), (_as_it_is, torch.float32), (call, torch.float32))
            )
            rounded.error, rounded.eager_error = _distance(ours, expected), _distance(eager, expected)
        except Exception as error:
            rounded.failure, rounded.is_ours = said(error)
    told = (str(warning.message).partition("\n")[0] for warning in caught)
    rounded.told = tuple(dict.fromkeys(text for text in told if text.startswith("aotdist: ")))
    return rounded


def apart_with_dropout(
    model: str, way: Way, num_steps: int = _NUM_STEPS, *, num_layers: int | None = None
) -> float:
    """The largest relative difference of a loss from eager's with the same seeds; NaN if one is no number."""
    runs = ((make(model, num_layers=num_layers), how) for how in (_as_it_is, _calling(way)))
    return _apart(*(_losses(model, plain, how, num_steps) for plain, how in runs))


def _calling(way: Way) -> Callable[[Any], Any]:
    if way == "torch.compile":
        return torch.compile
    return partial(aotdist.compile, backend=way)


def _as_it_is(model: Any) -> Any:
    return model


def _losses(name: str, plain: Any, call: Callable[[Any], Any], num_steps: int) -> list[float]:
    """Of steps of AdamW, dropout and all."""
    model, optimizer = call(plain), torch.optim.AdamW(plain.parameters(), lr=1e-3)
    losses = []
    for number in range(num_steps):
        set_seed(number)
        loss = model(**make_batch(name, number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _apart(eager: list[float], ours: list[float]) -> float:
    apart = [abs(a - b) / abs(a) for a, b in zip(eager, ours, strict=True)]
    return math.nan if any(map(math.isnan, apart)) else max(apart)


def _of_one_step(name: str, call: Callable[[Any], Any], dtype: torch.dtype) -> list[Tensor]:
    """Loss and gradients of a step in which nothing is dropped."""
    plain: Any = make(name, dropped=0.0)
    plain.to(dtype)
    if dtype == torch.float64 and hasattr(plain.config, "num_experts_per_tok"):
        plain.set_experts_implementation("eager")  # the grouped product has no float64
    batch = {
        key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in make_batch(name, 0).items()
    }
    set_seed(0)
    loss = call(plain)(**batch).loss
    loss.backward()
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    return [loss.detach().double(), *(grad.double() for grad in grads)]


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """By norm, over all tensors together, relative; NaN if there is one in them."""
    norms = [torch.stack([(a - b).norm() for a, b in zip(found, expected, strict=True)]).norm()]
    norms.append(torch.stack([b.norm() for b in expected]).norm())
    return float(norms[0] / norms[1])
