"""Sizes that change from call to call become symbols by themselves, where that changes nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import BadSettings
from aotdist.settings import Settings
from tests.semantics.observation import Scene, same_as_eager

LENGTHS = (5, 7, 9, 12, 30, 4)


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Nothing is said of what solves itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Language(nn.Module):
    """Predicts the next of twenty words."""

    def __init__(self, *, has_attention: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 8)
        self.mix = (
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            if has_attention
            else nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.1))
        )
        self.out = nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.out(self.mix(self.words(ids[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def num_programs(model: nn.Module) -> int:
    return len(compiled_call(model).artifacts)


def words(length: int) -> Tensor:
    return torch.randint(0, 20, (2, length), generator=torch.Generator().manual_seed(length))


def steps(model: nn.Module, lengths: Sequence[int]) -> list[Tensor]:
    """Losses, then the parameters that a step for each length leaves."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    torch.manual_seed(1)
    for length in lengths:
        loss = model(words(length))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def test_fifty_lengths_are_two_programs() -> None:
    lengths = [3 + number * 7 % 50 for number in range(50)]
    model = aotdist.compile(Language(), backend="fx", dynamic="auto")
    assert all(map(torch.equal, steps(Language(), lengths), steps(model, lengths)))
    assert num_programs(model) == 2


def test_the_length_of_a_tensor_is_its_size() -> None:
    def program(x: Tensor, labels: Tensor) -> Tensor:
        return (
            F.cross_entropy(x.reshape(len(x), -1), labels)
            + x.sum() / len(labels)
            + torch.arange(len(x)).sum()
        )

    compiled = aotdist.compile(program, backend="fx")
    for length in LENGTHS:
        x, labels = torch.randn(length, 2, 3), torch.arange(length) % 6
        assert torch.equal(compiled(x, labels), program(x, labels))
    assert len(compiled.graphs) == 2


@pytest.mark.slow
def test_lengths_by_the_default_backend() -> None:
    model = aotdist.compile(Language(has_attention=False), backend="auto", dynamic="auto")
    torch.testing.assert_close(steps(model, LENGTHS), steps(Language(has_attention=False), LENGTHS))
    assert num_programs(model) == 2


def test_ways_of_a_module_change_apart() -> None:
    """In evaluation the layer has a fast path, which takes no symbols: a program for each length."""
    models = Language().eval(), aotdist.compile(Language().eval(), backend="fx", dynamic="auto")
    with torch.no_grad():
        eager, ours = ([model(words(length)) for length in LENGTHS] for model in models)
    assert all(map(torch.equal, eager, ours))
    before = num_programs(models[1])
    steps(models[1].train(), LENGTHS)
    assert (before, num_programs(models[1]) - before) == (len(LENGTHS), 2)


def prints_its_size(x: Tensor) -> Tensor:
    return x * 2 if f"{x.shape[0]}".isdigit() else x * 3


def asks_for_an_int(x: Tensor) -> Tensor:
    return x * 2 if isinstance(x.shape[0], int) else x * 3


def takes_no_symbols(x: Tensor) -> Tensor:
    return torch.geqrf(x.detach())[0] * x


def fits_one_size(x: Tensor) -> Tensor:
    return x * torch.arange(int(x.shape[0])).unsqueeze(1)


@pytest.mark.parametrize(
    "program",
    [prints_its_size, asks_for_an_int, fits_one_size, takes_no_symbols],
    ids=lambda each: each.__name__,
)
def test_a_program_that_is_another_with_symbols_is_compiled_for_each_size(
    program: Callable[..., Any],
) -> None:
    same_as_eager(
        lambda: [Scene(program, (torch.randn(length, 3, requires_grad=True),)) for length in LENGTHS],
        compilations=len(LENGTHS),
        dynamic="auto",
    )


def decides_by_a_size(x: Tensor) -> Tensor:
    return (x.sin() if x.shape[0] > 8 else x.cos()).sum(0) / x.shape[0]


def several(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@pytest.mark.parametrize(
    ("program", "make", "compilations"),
    [
        (decides_by_a_size, lambda n: (torch.randn(n, 3, requires_grad=True),), 3),
        (several, lambda n: (torch.randn(3, n, requires_grad=True), torch.randn(n, 4)), 2),
        (several, lambda n: (torch.randn(n, 3, requires_grad=True), torch.randn(3, 20 - n % 4)), 2),
        (lambda x: x.t() * 2, lambda n: (torch.randn(40, n)[:, ::2],), 2),
    ],
)
def test_as_in_eager(program: Callable[..., Any], make: Callable[[int], Any], compilations: int) -> None:
    same_as_eager(
        lambda: [Scene(program, make(length)) for length in LENGTHS],
        seed=1,
        compilations=compilations,
        dynamic="auto",
    )


def test_a_size_of_one_is_a_program_of_its_own_and_opens_nothing() -> None:
    compiled = aotdist.compile(lambda x: x + x.sum(0, keepdim=True), backend="fx", dynamic="auto")
    for rows in (1, 4, 1, 4):
        compiled(torch.ones(rows, 3))
    assert [graph["inference"].code.count("torch.sym") for graph in compiled.graphs] == [0, 0]


def test_a_compiler_that_takes_no_symbols_is_given_numbers() -> None:
    given: list[list[str]] = []

    def compiler(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        if any(not isinstance(example, Tensor) for example in examples):
            raise NotImplementedError("sizes")
        given.append([str(example.shape) for example in examples])
        return gm.forward

    compiled = aotdist.compile(lambda x: x * 2, backend=compiler, dynamic="auto")
    for length in LENGTHS:
        assert torch.equal(compiled(torch.ones(length)), torch.full((length,), 2.0))
    assert len(given) == len(LENGTHS)


def test_what_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [Settings(dynamic=value).dynamic for value in ("auto", True, False)] == ["auto", True, False]
    for text, value in {"auto": "auto", "1": True, "false": False}.items():
        monkeypatch.setenv("AOTDIST_DYNAMIC", text)
        assert Settings.from_environment().dynamic == value
    with pytest.raises(BadSettings, match="give True or False or 'auto'"):
        Settings(dynamic="yes")  # type: ignore[arg-type]
