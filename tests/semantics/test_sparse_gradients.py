"""Embeddings whose gradients are sparse: the same rows, in the same order, with the same numbers."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import aotdist


class Words(nn.Module):
    """Looks words up, `times` times, each time others."""

    def __init__(self, times: int = 1, *, reads_weight: bool = False, **options: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True, **options)
        self.head, self.times, self.reads_weight = nn.Linear(4, 2), times, reads_weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        seen = sum(self.embedding((words + k) % 10) for k in range(self.times))
        return seen @ self.embedding.weight.t() if self.reads_weight else self.head(seen)


class Bag(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(10, 4, sparse=True, **options)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.embedding(words).square()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Words,
    "with a padding index": lambda: Words(padding_idx=3),
    "with a padding index from the end": lambda: Words(padding_idx=-7),
    "looked up twice": lambda: Words(2),
    "looked up twice, with a padding index": lambda: Words(2, padding_idx=3),
    "with a dense gradient besides": lambda: Words(reads_weight=True),
    "with a padding index and a dense gradient": lambda: Words(reads_weight=True, padding_idx=3),
    "renormed": lambda: Words(max_norm=1.0),
    "renormed, with a padding index": lambda: Words(max_norm=1.0, padding_idx=3),
    "a bag": lambda: Bag(mode="sum"),
    "a bag with a padding index": lambda: Bag(mode="mean", padding_idx=3),
}


def batches() -> list[torch.Tensor]:
    """As many words each time, and another number of them padding."""
    texts = [[[1, 2, 3], [0, 3, 5]], [[3, 3, 3], [3, 3, 3]], [[1, 1, 0], [9, 8, 9]]]
    return list(map(torch.tensor, texts))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Losses and gradients of some steps, and the parameters after them."""
    seen: list[torch.Tensor] = []
    for words in batches():
        loss = model(words).sum()
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen += [loss.detach(), *(part for grad in grads for part in parts(grad.clone()))]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def parts(grad: torch.Tensor) -> list[torch.Tensor]:
    if not grad.is_sparse:
        return [grad]
    return [grad._indices(), grad._values(), torch.tensor(grad.is_coalesced())]


@pytest.mark.parametrize("backend", ["fx", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, backend: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    compiled = copy.deepcopy(model)
    call = aotdist.compile(compiled, backend=backend)
    expected = trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = trained(call, torch.optim.SGD(compiled.parameters(), lr=0.1))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if backend == "fx":
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs)


def test_gradients_accumulate() -> None:
    torch.manual_seed(0)
    model = Words(padding_idx=3)
    compiled = copy.deepcopy(model)
    call = aotdist.compile(compiled, backend="fx")
    for words in batches():
        model(words).sum().backward()
        call(words).sum().backward()
    expected, found = model.embedding.weight.grad, compiled.embedding.weight.grad
    assert expected is not None and found is not None
    assert all(map(torch.equal, parts(found), parts(expected)))


def test_sparse_adam() -> None:
    torch.manual_seed(0)
    model = Words(2, padding_idx=3).embedding
    compiled = copy.deepcopy(model)
    call = aotdist.compile(compiled, backend="fx")
    expected = trained(model, torch.optim.SparseAdam(model.parameters(), lr=0.1))
    found = trained(call, torch.optim.SparseAdam(compiled.parameters(), lr=0.1))
    assert all(map(torch.equal, found, expected))
