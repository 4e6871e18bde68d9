"""Ranks that have run the same programs before, and now run others: each scenario says what it raises."""

from __future__ import annotations

import atexit
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import aotdist
from aotdist.runtime.ranks.liveness import is_closed
from aotdist.settings import Settings
from tests.ranks.cases_agreement import Told, told

SETTINGS = Settings(rank_timeout_s=30.0)
BACKEND: ContextVar[str] = ContextVar("backend", default="fx")
"""What the scenarios of a table compile with."""


def odd() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def model(width: int = 8, settings: Settings = SETTINGS, backend: str | None = None) -> nn.Module:
    made = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    return aotdist.compile(fully_shard(made), backend=backend or BACKEND.get(), settings=settings)


def train(trained: nn.Module, rows: int = 2, *, backward: bool = True) -> None:
    width = next(trained.parameters()).shape[1]
    loss = trained(torch.ones(rows, width)).square().sum()
    if backward:
        loss.backward()


def evaluate(evaluated: nn.Module) -> None:
    with torch.no_grad():
        evaluated(torch.ones(2, 8))


def branching(settings: Settings = SETTINGS) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, *, sums: bool) -> torch.Tensor:
        group = dist.group.WORLD
        x = collectives.all_reduce(x, "sum", group)
        return collectives.all_reduce(x.mean(0), "max", group) if sums else x

    return aotdist.compile(run, backend=BACKEND.get(), settings=settings)


def eval_against_train() -> Told | None:
    trained = model()
    train(trained)
    evaluate(trained)
    return told(lambda: evaluate(trained) if odd() else train(trained))


def a_known_branch_flips() -> Told | None:
    run = branching()
    for sums in (True, False, True):
        run(torch.ones(2, 8), sums=sums)
    return told(lambda: run(torch.ones(2, 8), sums=odd()))


def a_skipped_backward() -> Told | None:
    trained = model()
    for _ in range(2):
        train(trained)

    def steps() -> None:
        train(trained, backward=not odd())
        train(trained)

    return told(steps)


class TwoHeads(nn.Module):
    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.first(x), self.second(x)
        return (x + y, x - y) if self.shared else (x, y)


def two_heads(*, shared: bool) -> Callable[[int], None]:
    """A step that takes some of a model's two results, each of parameters of its own, or both of all."""
    made = TwoHeads(shared=shared)
    for each in (made.first, made.second, made):
        fully_shard(each)
    aotdist.compile(made, backend=BACKEND.get(), settings=SETTINGS)

    def step(num_results: int) -> None:
        torch.cat(made(torch.ones(2, 8))[:num_results]).sum().backward()

    step(2)
    return step


def a_backward_of_other_results() -> Told | None:
    step = two_heads(shared=False)
    return told(lambda: step(1 if odd() else 2))


def a_known_backward_of_other_results() -> Told | None:
    step = two_heads(shared=False)
    step(1)

    def steps() -> None:
        step(1 if odd() else 2)
        step(2)

    return told(steps)


def models_in_another_order() -> Told | None:
    models = [model(), model()]
    for each in models:
        train(each)
    return told(lambda: [train(each) for each in (reversed(models) if odd() else models)])


def a_new_call_with_other_collectives(new: int) -> Told | None:
    run = branching()
    run(torch.ones(2, 8), sums=True)
    return told(lambda: run(torch.ones(2, 8), sums=dist.get_rank() != new))


def shapes_of_the_rank() -> Told | None:
    """Another length on each rank at each step, most of them new to that rank alone."""
    trained = model()

    def steps() -> None:
        for step in range(4):
            train(trained, 2 + (step * (1 + dist.get_rank())) % 5)

    return told(steps)


def evaluated_on_one_rank() -> Told | None:
    """Programs without collectives are the business of the rank that runs them."""
    alone = aotdist.compile(nn.Linear(8, 8), backend="fx")
    trained = model()

    def steps() -> None:
        for _ in range(2):
            train(trained)
            if odd():
                alone(torch.ones(2, 8))

    return told(steps)


def other_results_of_the_same_parameters() -> Told | None:
    step = two_heads(shared=True)
    step(1)
    return told(lambda: [step(1 if odd() else 2) for _ in range(2)])


def several_models() -> Told | None:
    """Forwards and backwards of two models, one inside of the other's."""
    first, second = model(), model()

    def steps() -> None:
        for _ in range(3):
            x = torch.ones(2, 8)
            second(first(x)).sum().backward()
            evaluate(second)

    return told(steps)


def new_after_a_caught_divergence() -> Told | None:
    """What the late rank announced for the call whose error it caught says nothing of this one."""
    run, trained = branching(), model()
    caught = told(lambda: run(torch.ones(2, 8), sums=odd()))
    assert caught is not None and caught[0] == "RankDivergence"
    if odd():
        time.sleep(1.0)
    return told(lambda: train(trained))


class Odd(nn.Module):
    """What one rank alone cannot compile: it reads a number in training."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        self.refuses = refuses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        return x if not (self.refuses and self.training) or x.sum().item() < 1e9 else x * 2


def as_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def stepped(made: nn.Module) -> list[torch.Tensor]:
    """Gradients of steps with lengths of the rank's own, and random numbers, bit for bit."""
    torch.manual_seed(dist.get_rank())
    left: list[torch.Tensor] = []
    for step in range(3):
        made(torch.full((2 + step * (1 + dist.get_rank()), 8), float(step))).square().sum().backward()
        grads = [param.grad for param in made.parameters()]
        left += [grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in grads]
    return [*left, torch.get_rng_state()]


def refused_on_one_rank(refusing: int, wrap: Callable[[nn.Module], nn.Module]) -> Told | None:
    """All ranks run that kind as it was written; another kind is compiled, on all of them."""
    settings = Settings(rank_timeout_s=30.0, unsupported="eager")

    def made() -> nn.Module:
        torch.manual_seed(3)
        return wrap(Odd(refuses=dist.get_rank() == refusing))

    expected = stepped(made())
    compiled = aotdist.compile(made(), backend="fx", settings=settings)

    def steps() -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ours = stepped(compiled)
        texts = [str(one.message) for one in said if "run as they were written" in str(one.message)]
        assert len(texts) == 1 and "read off a tensor" in texts[0], texts
        assert (f"rank {refusing} cannot compile" in texts[0]) == (dist.get_rank() != refusing)
        assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))
        report = aotdist.explain(compiled)
        assert len(report.artifacts) == 0 and "read off a tensor" in str(report)
        compiled.eval()
        evaluate(compiled)
        assert len(aotdist.explain(compiled).artifacts) == 1

    return told(steps)


class Around(nn.Module):
    """Calls a model that is compiled by itself; the last rank cannot compile this, the others take longer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if odd():
            return self.inner(x) if x.sum().item() > 0 else x
        time.sleep(0.5)
        return self.inner(x)


def refused_around_another() -> Told | None:
    """The refused rank agrees on the next call before the others know that it is not coming to this."""
    settings = Settings(rank_timeout_s=30.0, unsupported="eager")
    inner = model(settings=settings)
    outer = aotdist.compile(Around(inner), backend="fx", settings=settings)

    def steps() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for rows in (2, 3 + dist.get_rank()):
                outer(torch.ones(rows, 8)).sum().backward()
        counts = [len(aotdist.explain(each).artifacts) for each in (outer, inner)]
        assert counts == [0, 2], counts

    return told(steps)


def refused_later() -> Told | None:
    """What ranks agreed to run compiled, none of them runs as it was written."""
    settings = Settings(rank_timeout_s=30.0, unsupported="eager")
    trained = aotdist.compile(fully_shard(Odd(refuses=False)), backend="fx", settings=settings)
    train(trained)
    trained.refuses = True
    refused = told(lambda: train(trained, 5))
    assert refused is not None and refused[0] == "UnsupportedProgram"
    assert "`aotdist.reset` it on all ranks, which agreed to run such calls compiled" in refused[1]
    aotdist.reset(trained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(trained, 5)
    return None if not aotdist.explain(trained).artifacts else ("compiled", "", 0.0)


def seldom(check_ranks: str) -> Told | None:
    trained = model(settings=Settings(rank_timeout_s=30.0, check_ranks=check_ranks))
    return told(lambda: [train(trained, 2 + (odd() and step == 3)) for step in range(5)])


DIVERGING: dict[str, Callable[[], Told | None]] = {
    "eval against train": eval_against_train,
    "a known branch flips": a_known_branch_flips,
    "a skipped backward": a_skipped_backward,
    "a backward of other results": a_backward_of_other_results,
    "a known backward of other results": a_known_backward_of_other_results,
    "models in another order": models_in_another_order,
    "new to the last rank": lambda: a_new_call_with_other_collectives(dist.get_world_size() - 1),
    "new to the first rank": lambda: a_new_call_with_other_collectives(0),
}

GOING_ON: dict[str, Callable[[], Told | None]] = {
    "shapes of the rank": shapes_of_the_rank,
    "evaluated on one rank": evaluated_on_one_rank,
    "other results of the same parameters": other_results_of_the_same_parameters,
    "several models": several_models,
    "new after a caught divergence": new_after_a_caught_divergence,
    "refused on the last rank": lambda: refused_on_one_rank(dist.get_world_size() - 1, fully_shard),
    "refused on the first rank": lambda: refused_on_one_rank(0, as_ddp),
    "refused around another": refused_around_another,
    "refused later": refused_later,
    "checked at times": lambda: seldom("steps:2"),
    "checked at first": lambda: seldom("first"),
}


def all_of(names: str, backend: str = "fx") -> dict[str, Told | None]:
    """What this rank raises in each scenario of a table; after each the ranks can go on together."""
    BACKEND.set(backend)
    scenarios = DIVERGING if names == "DIVERGING" else GOING_ON
    after = model()
    heard: dict[str, Told | None] = {}
    for name, scenario in scenarios.items():
        heard[name] = scenario()
        train(after)
    return heard


def ends(act: Callable[[], object]) -> None:
    """Print what this rank raises, and leave at once, as an uncaught error may: the store's host first."""
    heard = told(act)
    print(*(heard or ("nothing", "", 0.0)), sep="\n", flush=True)
    if heard is None:
        atexit._run_exitfuncs()  # as an interpreter does that has run to its end
    os._exit(GONE)


GONE = 7
"""Exit code of a rank that has left."""


def in_another_order() -> None:
    first, last = (fully_shard(nn.Linear(8, 8)) for _ in range(2))
    run = (lambda x: first(last(x))) if odd() else (lambda x: last(first(x)))
    compiled = aotdist.compile(run, backend="fx", settings=SETTINGS)
    ends(lambda: compiled(torch.ones(2, 8)))


def flips_and_leaves() -> None:
    run = branching()
    for sums in (True, False):
        run(torch.ones(2, 8), sums=sums)
    ends(lambda: run(torch.ones(2, 8), sums=odd()))


def new_and_seldom_checked() -> None:
    """Peers that check nothing are in the collectives of what they run; they are told as they come out."""
    run = branching(Settings(rank_timeout_s=30.0, check_ranks="first"))
    run(torch.ones(2, 8), sums=True)
    ends(lambda: run(torch.ones(2, 8), sums=not odd()))


def first_fails() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        if not odd():
            raise ValueError("no such rule")
        return collectives.all_reduce(x, "sum", dist.group.WORLD)

    compiled = aotdist.compile(run, backend="fx", settings=SETTINGS)
    if odd():
        time.sleep(1.0)
    ends(lambda: compiled(torch.ones(2)))


def one_of_a_mesh_flips() -> None:
    """Ranks that share an axis with one of those that differ, and run nothing that differs, hear of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")

    def run(x: torch.Tensor, *, flips: bool) -> torch.Tensor:
        x = collectives.all_reduce(x, "max" if flips else "sum", tp)
        return collectives.all_reduce(x, "sum", dp)

    compiled = aotdist.compile(run, backend="fx", settings=SETTINGS)
    for flips in (True, False, True):
        compiled(torch.ones(8), flips=flips)
    ends(lambda: compiled(torch.ones(8), flips=odd()))


def two_die_before_they_compile() -> None:
    """One before it calls `aotdist.compile`; to ask whether it lives has done no harm while it did."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for number in range(3):
        assert not any(is_closed(peer) for peer in range(num_ranks) if peer != rank)
        total = torch.tensor([number])
        dist.all_reduce(total)
        assert total.item() == num_ranks * number
    trained = None if rank == 1 else model()
    if trained is None or odd():
        os.kill(os.getpid(), signal.SIGKILL)
    ends(lambda: train(trained))


def one_step_too_many() -> None:
    trained = model()

    def steps() -> None:
        for _ in range(3 if odd() else 2):
            train(trained)

    ends(steps)
