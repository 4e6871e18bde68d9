"""Sparse gradients in compiled steps: what embeddings, optimizers and the caller do with them, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.report.profile import most_allocated_by
from tests.step.written import Build, Written, compiled_beside_eager, seeded

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")

Optimize = Callable[[Sequence[torch.Tensor]], Any]
WORDS = 10


def words(at: int) -> tuple[torch.Tensor]:
    """Six of ten words, some of them twice: how many there are differs from step to step."""
    return (torch.randint(0, WORDS, (6,), generator=seeded(at)),)


def embedding(**options: Any) -> nn.Module:
    return nn.Embedding(WORDS, 4, sparse=True, **options)


def bag(**options: Any) -> nn.Module:
    return nn.EmbeddingBag(WORDS, 4, sparse=True, **options)


def counters(params: Sequence[torch.Tensor]) -> list[int]:
    """How often parameters and gradients were written."""
    return [one._version for param in params for one in (param, param.grad) if one is not None]


def trains(
    optimize: Optimize,
    model: Callable[[], nn.Module] = embedding,
    look_up: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, words: model(words),
    batch: Callable[[int], Any] = words,
    **zeroed: bool,
) -> Build:
    """A step that looks words up and zeroes gradients behind the update."""

    def build() -> Written:
        net = model()
        params = list(net.parameters())
        optimizer = optimize(params)

        def step(words: torch.Tensor) -> torch.Tensor:
            loss = look_up(net, words).tanh().square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(**zeroed)
            return loss.detach()

        return Written(step, [net], [optimizer], lambda: counters(params), batch)

    return build


def sparse_adam(params: Any, **options: Any) -> Any:
    return torch.optim.SparseAdam(params, lr=0.1, **options)


def sgd(params: Any, **options: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, **options)


def adagrad(params: Any, **options: Any) -> Any:
    return torch.optim.Adagrad(params, lr=0.1, **options)


class Pair(nn.Module):
    """Two embeddings, and a head whose gradients are dense."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = embedding(), embedding(padding_idx=2), nn.Linear(4, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.one(words) * self.other(words.flip(0)))


class ByColumns(nn.Module):
    """An embedding whose weight is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WORDS).t())

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return F.embedding(words, self.weight, sparse=True)


def beside() -> Written:
    """What two embeddings say of a word, one beside the other; their gradients stay until the next step."""
    models = [embedding(), embedding()]
    params = [param for model in models for param in model.parameters()]
    optimizer = sparse_adam(params)

    def step(words: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.cat([model(words) for model in models], -1).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Written(step, models, [optimizer], lambda: counters(params), words)


def by_hand() -> Written:
    """A step that makes the gradient of half the indices and values."""
    model: Any = embedding()
    optimizer = sparse_adam(model.parameters())

    def step(words: torch.Tensor) -> torch.Tensor:
        loss = model(words).square().sum()
        loss.backward()
        grad = model.weight.grad
        model.weight.grad = torch.sparse_coo_tensor(grad._indices(), grad._values() * 0.5, grad.size())
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Written(step, [model], [optimizer], lambda: counters([model.weight]), words)


def with_options(optimize: Callable[..., Any], **options: Any) -> Optimize:
    return lambda params: optimize(params, **options)


PROGRAMS: dict[str, Build] = {
    "SparseAdam": trains(sparse_adam),
    "SparseAdam, maximized": trains(with_options(sparse_adam, maximize=True)),
    "SparseAdam, zeroed in place": trains(sparse_adam, set_to_none=False),
    "SparseAdam, padding": trains(sparse_adam, lambda: embedding(padding_idx=3)),
    "SparseAdam, padding from the end": trains(sparse_adam, lambda: embedding(padding_idx=-3)),
    "SparseAdam, renormed": trains(sparse_adam, lambda: embedding(max_norm=1.0, padding_idx=3)),
    "SparseAdam, 16 bits": trains(sparse_adam, lambda: embedding(dtype=torch.bfloat16)),
    "SparseAdam, one word": trains(sparse_adam, batch=lambda at: (torch.tensor([at]),)),
    "SparseAdam, words of 32 bits": trains(sparse_adam, batch=lambda at: (words(at)[0].int(),)),
    "SparseAdam, looked up twice": trains(
        sparse_adam, look_up=lambda model, words: model(words) * model(words.flip(0) // 2)
    ),
    "SparseAdam, beside each other": beside,
    "SparseAdam, a gradient made by hand": by_hand,
    "SGD": trains(sgd),
    "SGD, padding, zeroed in place": trains(sgd, lambda: embedding(padding_idx=3), set_to_none=False),
    "SGD, foreach, beside dense ones": trains(with_options(sgd, foreach=True, maximize=True), Pair),
    "SGD, of a dense and a sparse gradient": trains(
        sgd, look_up=lambda model, words: model(words) @ model.weight.t()
    ),
    "SGD, momentum": trains(with_options(sgd, momentum=0.9, dampening=0.3)),
    "SGD, momentum, a transposed weight": trains(with_options(sgd, momentum=0.9), ByColumns),
    "SGD, Nesterov, foreach, beside dense ones": trains(
        with_options(sgd, momentum=0.9, nesterov=True, foreach=True), Pair
    ),
    "Adagrad": trains(with_options(adagrad, lr_decay=0.1)),
    "Adagrad, foreach, beside dense ones": trains(with_options(adagrad, foreach=True, maximize=True), Pair),
    "bags": trains(sparse_adam, lambda: bag(mode="sum"), lambda model, words: model(words.view(2, 3))),
    "bags, means, padding": trains(
        sparse_adam, lambda: bag(mode="mean", padding_idx=1), lambda model, words: model(words.view(2, 3))
    ),
    "bags, weighted": trains(
        adagrad,
        lambda: bag(mode="sum", include_last_offset=True),
        lambda model, words: model(words, torch.tensor([0, 2, 6]), per_sample_weights=torch.arange(6.0)),
    ),
}


def program(name: str) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        PROGRAMS[name] = build
        return build

    return add


@program("micro-batches")
def micro_batches() -> Written:
    model = embedding(padding_idx=2)
    optimizer = sparse_adam(model.parameters())

    def step(words: torch.Tensor) -> None:
        optimizer.zero_grad()
        for part in words.chunk(3):
            (model(part).tanh().sum() / 3).backward()
        optimizer.step()

    return Written(step, [model], [optimizer], batch=words)


@program("dense and sparse gradients, one after the other")
def dense_and_sparse() -> Written:
    model = embedding()
    optimizer = sgd(model.parameters())

    def step(words: torch.Tensor) -> None:
        for first in (0, 1):
            losses = [model(words).tanh().sum(), model.weight.square().sum(), model(words.flip(0)).sum()]
            for loss in losses[first:] + losses[:first]:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return Written(step, [model], [optimizer], batch=words)


@program("two optimizers, groups, a schedule")
def two_optimizers() -> Written:
    model = Pair()
    groups = [{"params": [model.one.weight]}, {"params": [model.other.weight], "lr": 0.02}]
    optimizers = sparse_adam(groups), torch.optim.AdamW(model.head.parameters(), lr=0.01)
    schedule = lr_scheduler.ExponentialLR(optimizers[0], 0.9)

    def step(words: torch.Tensor) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(words).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        schedule.step()
        return loss.detach()

    return Written(step, [model], [*optimizers, schedule], batch=words)


@program("gradients by hand")
def by_hand() -> Written:
    model = embedding()

    def step(words: torch.Tensor) -> Any:
        loss = model(words).square().sum()
        loss.backward()
        grad = model.weight.grad
        assert grad is not None
        with torch.no_grad():
            grad.mul_(0.5)
            model.weight -= 0.1 * grad
            model.weight.sub_(grad.coalesce() / 2, alpha=0.01)
            model.weight.copy_(model.weight - 0.1 * grad)
        norms = nn.utils.clip_grad_norm_([grad.to_dense()], 1.0), grad.norm(), grad.norm(1)
        model.weight.grad = None
        return loss.detach(), norms, grad, grad.coalesce()._values()

    return Written(step, [model], batch=words)


@program("gradients that are kept")
def kept() -> Written:
    model = embedding()

    def step(words: torch.Tensor) -> Any:
        model(words).square().sum().backward()
        return model.weight.grad

    return Written(step, [model], logs=lambda: counters(list(model.parameters())), batch=words)


@program("a scaler")
def scaled() -> Written:
    model = embedding()
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(words: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(words).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return Written(step, [model], [optimizer, scaler], batch=words)


@pytest.mark.parametrize("name", PROGRAMS)
def test_bits(name: str) -> None:
    assert len(compiled_beside_eager(PROGRAMS[name], num_steps=10).graphs) == 1


COMPILED = ("SparseAdam, padding", "micro-batches", "two optimizers, groups, a schedule")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "auto"])
@pytest.mark.parametrize(
    "name", ["SparseAdam, padding", "micro-batches", "two optimizers, groups, a schedule"]
)
def test_compilers(name: str, backend: str) -> None:
    compiled_beside_eager(PROGRAMS[name], num_steps=4, backend=backend)


def test_batches_of_other_lengths() -> None:
    build = trains(sparse_adam, batch=lambda at: (torch.arange(4 + at) % WORDS,))
    assert len(compiled_beside_eager(build, num_steps=6).graphs) == 2


def test_update_at_each_third_call() -> None:
    def build() -> Written:
        model = embedding()
        optimizer = sparse_adam(model.parameters())

        def step(words: torch.Tensor, is_last: bool) -> None:
            model(words).square().sum().backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

        return Written(step, [model], [optimizer], batch=lambda at: (*words(at), at % 3 == 2))

    compiled_beside_eager(build, num_steps=10)


def test_an_optimizers_step_alone() -> None:
    models = [embedding(), embedding()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [sparse_adam(model.parameters()) for model in models]
    alone = aotdist.compile(optimizers[1].step, backend="fx")
    for at in range(5):
        for model, optimizer, update in zip(models, optimizers, (optimizers[0].step, alone), strict=True):
            model(*words(at)).square().sum().backward()
            update()
            optimizer.zero_grad()
        assert torch.equal(*(model.weight for model in models))
    assert len(alone.graphs) == 1


def test_train_step_and_state_that_is_loaded() -> None:
    """The state of one training goes on in another, which is compiled anew."""
    torch.manual_seed(0)
    models = [embedding(), embedding()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [sparse_adam(model.parameters()) for model in models]

    def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
        return model(words).square().sum()

    step = aotdist.train_step(models[1], loss_of, optimizers[1], backend="fx")
    for at in range(6):
        if at == 3:
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        loss_of(models[0], *words(at)).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        step(*words(at))
        assert torch.equal(*(model.weight for model in models))


def test_rows_are_written_where_they_lie() -> None:
    """Nothing of the size of the embedding is made, neither of its state nor of itself."""
    build = trains(sparse_adam, lambda: nn.Embedding(20_000, 64, sparse=True))
    torch.manual_seed(0)
    eager, ours = build(), build()
    step = aotdist.compile(ours.step, backend="fx")
    for at in range(3):
        for run in (eager.step, step):
            run(*words(at))
    allocated = [most_allocated_by(lambda run=run: run(*words(3))) for run in (step, eager.step)]
    assert allocated[0] < 1.5 * allocated[1] < 20_000 * 64 * 4 / 10


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda grad: grad.abs(), "`aten.abs.default` is given a sparse gradient"),
        (lambda grad: grad * torch.ones(WORDS, 4), "`aten.mul.Tensor` is given a sparse gradient"),
        (lambda grad: F.relu(grad), "`aten.relu.default` is given a sparse gradient"),
    ],
)
def test_all_else_is_refused(use: Callable[[torch.Tensor], Any], says: str) -> None:
    model = embedding()

    def step(words: torch.Tensor) -> None:
        model(words).sum().backward()
        assert model.weight.grad is not None
        use(model.weight.grad)
        model.weight.grad = None

    compiled = aotdist.compile(step, backend="fx")
    compiled(*words(0))
    with pytest.raises(UnsupportedProgram, match=says) as refused:
        compiled(*words(1))
    assert "nn.Embedding(..., sparse=False)" in str(refused.value)


@pytest.mark.parametrize("optimize", [torch.optim.Adam, with_options(sgd, weight_decay=0.1)])
def test_what_eager_refuses(optimize: Optimize) -> None:
    step = aotdist.compile(trains(optimize)().step, backend="fx")
    for at in range(2):
        with pytest.raises(RuntimeError, match="sparse"):
            step(*words(at))
