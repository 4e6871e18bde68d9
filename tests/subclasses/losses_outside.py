"""Random programs over two leaves, and backwards of losses that are computed of their results outside."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

import aotdist

SIZE = (4, 6)

Make: TypeAlias = Callable[[random.Random, int], torch.Tensor]
"""Makes a tensor of `SIZE`, or of its transposed, with the numbers of a seed."""

Step: TypeAlias = Callable[[Any, Any], Any]

STEPS: Sequence[Step] = (
    lambda a, b: a * b if a.shape == b.shape else a * 2,
    lambda a, b: a + b if a.shape == b.shape else a + 1,
    lambda a, b: a @ b.t() if a.shape == b.shape == SIZE else a.exp(),
    lambda a, b: a.sin(),
    lambda a, b: a.t(),
    lambda a, b: a.sum(0, keepdim=True).expand(a.shape),
    lambda a, b: a.reshape(-1).reshape(a.shape),
    lambda a, b: F.silu(a),
)


@dataclass(frozen=True)
class Program:
    """Steps, each on two values of before, by position; copies of the last few values are returned."""

    steps: Sequence[tuple[int, int, int]]
    num_results: int

    @staticmethod
    def drawn(rng: random.Random) -> Program:
        steps = [(rng.randrange(len(STEPS)), rng.randrange(k), rng.randrange(k)) for k in range(3, 7)]
        return Program(steps[: rng.randint(1, 4)], rng.randint(1, 3))

    def __call__(self, x: Any, w: Any) -> tuple[Any, ...]:
        values = [x, w, x * w]
        for which, first, second in self.steps:
            values.append(STEPS[which](values[first], values[second]))
        return tuple(value.clone() for value in values[-self.num_results :])


def gradients(call: Callable[..., Any], seed: int, make: Make) -> list[torch.Tensor | None]:
    """The gradients of two calls: accumulated at once or one by one, or of chosen leaves."""
    rng = random.Random(seed)
    x, w = make(rng, 0).requires_grad_(), make(rng, 1).requires_grad_()
    found: list[torch.Tensor | None] = []
    for _ in range(2):
        losses = [loss_of(out, rng, make) for out in call(x, w) if rng.random() < 0.8]
        match losses and rng.choice(("together", "one by one", "chosen")):
            case "together":
                sum(losses[1:], losses[0]).backward()
            case "one by one":
                for loss in losses:
                    loss.backward(retain_graph=True)
            case "chosen":
                total = sum(losses[1:], losses[0])
                found += torch.autograd.grad(total, [x, w], allow_unused=True)
            case _:
                continue
        found += (None if leaf.grad is None else leaf.grad.detach().clone() for leaf in (x, w))
    return found


def loss_of(out: Any, rng: random.Random, make: Make) -> Any:
    """A sum, of the result itself or of what is made of it with another tensor."""
    factor = make(rng, rng.randrange(2, 9))
    return rng.choice((out.sum, out.sin().sum, (out * (factor if out.shape == SIZE else 2)).sum))()


def assert_all_as_in_eager(seeds: range, make: Make, look: Callable[[torch.Tensor], Any]) -> None:
    """Every program has eager's gradients, as `look` tells them; those that eager refuses are passed over."""
    num_played = 0
    for seed in seeds:
        program = Program.drawn(random.Random(seed))
        try:
            eager = gradients(program, seed, make)
        except RuntimeError:
            continue
        found = gradients(aotdist.compile(program, backend="fx"), seed, make)
        told = [[None if one is None else look(one) for one in some] for some in (eager, found)]
        assert told[0] == told[1], (seed, program)
        num_played += 1
    assert num_played > 0.8 * len(seeds)
