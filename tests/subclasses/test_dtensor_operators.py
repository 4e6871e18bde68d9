"""Operators on DTensors: uneven and empty shards, sums not yet added up, vocabularies, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.ranks.harness import World
from tests.semantics.observation import Scene, same_as_eager
from tests.subclasses.dtensors import (
    PLACEMENTS,
    S0,
    S1,
    SIZES,
    R,
    assert_few_are_refused,
    compare,
    compared,
    grid,
    leaf,
    numbers,
    placements_and_sizes,
    refused_by_eager,
    without_history,
)

pytestmark = pytest.mark.ranks

OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "elementwise": lambda x: F.gelu(x.sin()) + x.clamp(-0.5, 0.5) * 2,
    "sums": lambda x: (x.sum(0), x.sum(1), x.mean(), x.mean(0, keepdim=True)),
    "norms": lambda x: (torch.linalg.vector_norm(x, 3, 1), x.square().sum().sqrt()),
    "a norm": lambda x: x.norm(),
    "norms of many": lambda x: torch._foreach_norm([x, x * 2]),
    "clipped": lambda x: x * (1 / (torch.nn.utils.get_total_norm([x, x * 2]) + 1)).clamp(max=1.0),
    "largest": lambda x: (x.amax(1), x.max(1)[0]),
    "spread of numbers": lambda x: (x.std(), x.var(0)),
    "softmax": lambda x: (x.softmax(0), x.log_softmax(1), x.logsumexp(1)),
    "normalised": lambda x: F.layer_norm(x, x.shape[-1:]),
    "normalised to a mean square of one": lambda x: F.rms_norm(x, x.shape[-1:]),
    "transposed": lambda x: (x.t(), x.t() @ x, x @ x.t()),
    "reshaped": lambda x: x.unsqueeze(1) * 2,
    "flat": lambda x: x.reshape(-1) * 2,
    "flattened and back": lambda x: x.flatten().view(x.shape) * 2,
    "rows": lambda x: (x[0] * 2, x[1:] * 2),
    "columns": lambda x: x[:, 1:] * x[:, :-1],
    "pieces": lambda x: x.chunk(2, 1)[0] * 2,
    "lists": lambda x: (torch.cat([x, x * 2]), torch.stack([x, x * 2]), *torch._foreach_mul([x, x * 2], 2.0)),
    "along rows": lambda x: (x.cumsum(0), x.roll(1, 0), x.flip(0)),
    "sorted": lambda x: (x.sort(1)[0], x.topk(1)[0]),
    "chosen": lambda x: (torch.where(x > 0, x, x * 2), x.tril()),
    "places of the largest": lambda x: x.argmax(1),
    "made like it": lambda x: (torch.zeros_like(x) + x, x.new_zeros(x.shape) + x, torch.full_like(x, 2) * x),
    "of another dtype": lambda x: x.double() * 2,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "padded": lambda x: F.pad(x, (1, 1)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "random": lambda x: torch.rand_like(x) * x + torch.randn_like(x),
    "drawn by chance": lambda x: torch.bernoulli(x.detach().sigmoid()) * x,
}
OF_OPERATORS: Mapping[str, Placement] = {**PLACEMENTS, "Pavg": Partial("avg"), "Pmax": Partial("max")}
FAILS_ON_ONE_RANK = {("S0", "empty"): ("largest",)}
"""What eager computes where there are rows, and refuses where there are none, so that the ranks part."""


def operators_case(placement: str, size: str) -> set[str]:
    """The names of those that eager refuses."""
    left_out = FAILS_ON_ONE_RANK.get((placement, size), ())
    made = leaf(SIZES[size], OF_OPERATORS[placement])
    return {name for name, fn in OPERATORS.items() if name not in left_out and not compared(fn, made)}


@placements_and_sizes(
    {("R", "even"), ("S0", "uneven"), ("S0", "empty"), ("S1", "uneven"), ("P", "uneven")}, OF_OPERATORS
)
def test_as_in_eager(world2: World, placement: str, size: str) -> None:
    assert_few_are_refused(world2.run(operators_case, placement, size, timeout=100), 6)


def tokens(vocabulary: int, *size: int) -> torch.Tensor:
    return torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(0))


def vocabulary_case(rows: int, placement: str) -> None:
    """Rows of the table are spread, evenly or not; each rank leaves out those of the others."""
    weight = leaf((rows, 4), PLACEMENTS[placement])

    def two_lookups(w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        first = F.embedding(t, w).redistribute(placements=[R])
        return first + F.embedding(t * 0, w).redistribute(placements=[R])

    programs = (
        lambda w, t: F.embedding(t, w).redistribute(placements=[R]),
        lambda w, t: F.embedding(t, w).redistribute(placements=[S1]),
        lambda w, t: (F.embedding(t, w) * 2).sum(0),
        lambda w, t: w.gather(0, t).redistribute(placements=[R]),
        two_lookups,
    )
    for asked in (R, S0):

        def asked_for(mesh: DeviceMesh, asked: Placement = asked) -> DTensor:
            return distribute_tensor(tokens(rows, 4, 3), mesh, [asked])

        for program in programs:
            if refused_by_eager(program, weight, asked_for) is None:
                compare(program, weight, asked_for)


@pytest.mark.parametrize("placement", ["S0", "S1"])
@pytest.mark.parametrize("rows", [8, 7, 1])
def test_a_sharded_vocabulary(world2: World, rows: int, placement: str) -> None:
    world2.run(vocabulary_case, rows, placement)


class Language(nn.Module):
    """An embedding and a head, perhaps of one weight."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 4)
        self.head = nn.Linear(4, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def language(mesh: DeviceMesh, between: Placement, *, tied: bool, keep: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Language(7)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=R, output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=not keep),
    }
    parallelize_module(model, mesh, plan)
    if tied:
        model.head.weight = model.embedding.weight
    return model


def language_case() -> None:
    mesh = grid()
    for between, tied, keep in ((R, False, False), (S1, False, True), (S1, True, False)):
        same_as_eager(
            lambda between=between, tied=tied, keep=keep: Scene(
                language(mesh, between, tied=tied, keep=keep), (tokens(7, 2, 4),)
            )
        )


def test_embedding_and_head(world2: World) -> None:
    """A vocabulary that the mesh does not divide, tied and not."""
    world2.run(language_case)


def masked_case() -> None:
    """Rows that are still to be left out are known to one trace only: such sums go neither out nor in."""
    mesh = grid()
    weight, asked_for = leaf((8, 4), S0)(mesh), distribute_tensor(tokens(8, 3), mesh, [R])
    program = aotdist.compile(lambda w, t: F.embedding(t, w), backend="fx")
    with pytest.raises(UnsupportedProgram, match=r"`out\[0\]` is a DTensor of partial sums.*_MaskPartial"):
        program(weight, asked_for)
    left = F.embedding(asked_for, weight)
    twice = aotdist.compile(lambda w, t: F.embedding(t, w).redistribute(placements=[R]) * 2, backend="fx")
    found = twice(weight, asked_for)
    assert torch.equal(found.to_local(), left.full_tensor() * 2)
    unread = F.embedding(asked_for, weight)
    with pytest.raises(UnsupportedProgram, match=r"`args\[0\]` is a DTensor of partial sums"):
        aotdist.compile(lambda x: x * 2, backend="fx")(unread)
    unread.full_tensor()


def test_masked_sums(world2: World) -> None:
    world2.run(masked_case)


LOSSES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "mean": ((4, 8), {}),
    "uneven": ((4, 7), {"reduction": "sum"}),
    "none": ((4, 8), {"reduction": "none"}),
    "weighted": ((4, 7), {"weight": True}),
    "of sequences": ((4, 8, 3), {}),
}


def logits_and_targets(mesh: DeviceMesh, size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    targets = tokens(size[1], size[0], *size[2:])
    if len(size) > 2:
        targets.view(-1)[0] = -100  # left out; beside weights eager fails
    return leaf(size, S1)(mesh), targets


def loss_case(which: str, inside: bool) -> None:
    """The context stands around the call and its backward; or the program enters it, for the forward."""
    mesh = grid()
    size, options = LOSSES[which]
    options = options | ({"weight": numbers((size[1],)).abs()} if options.get("weight") else {})

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with loss_parallel() if inside else nullcontext():
            return F.cross_entropy(logits, targets, **options)

    found = []
    for fn in (loss_of, aotdist.compile(loss_of, backend="fx")):
        logits, targets = logits_and_targets(mesh, size)
        with nullcontext() if inside else loss_parallel():
            loss = fn(logits, targets)
            with loss_parallel() if inside else nullcontext():
                loss.sum().backward()
        assert logits.grad.placements == (S1,)
        found.append((loss.to_local(), logits.grad.to_local()))
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("which", LOSSES)
def test_loss_parallel(world2: World, which: str, inside: bool) -> None:
    world2.run(loss_case, which, inside)


def contexts_case() -> None:
    """What contexts make of operators is part of what an artifact is compiled for."""
    mesh = grid()
    x = without_history(SIZES["even"], S1)(mesh)
    softmax = aotdist.compile(lambda x: x.log_softmax(1), backend="fx")
    for context in (nullcontext, loss_parallel, nullcontext, loss_parallel):
        with context():
            assert softmax(x).placements == x.log_softmax(1).placements
    assert len(softmax.artifacts) == 2
    mixed = aotdist.compile(lambda x: x * torch.ones(4, 6), backend="fx")
    with implicit_replication():
        assert torch.equal(mixed(x).to_local(), x.to_local())
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        mixed(x)


def test_contexts(world2: World) -> None:
    world2.run(contexts_case)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(F.dropout(self.up(x).relu(), 0.3)), 0.3)


def dropping(mesh: DeviceMesh, *, keep: bool) -> nn.Module:
    torch.manual_seed(0)
    plan: dict[str, Any] = {
        "up": ColwiseParallel(use_local_output=not keep),
        "down": RowwiseParallel(use_local_output=not keep),
    }
    return parallelize_module(Dropping(), mesh, plan)


def dropout_case(keep: bool) -> None:
    """Numbers, and the state that they leave behind, are those of eager; at the second call others."""
    mesh = grid()
    same_as_eager(lambda: Scene(dropping(mesh, keep=keep), (numbers((2, 4)),)), calls=3)


@pytest.mark.parametrize("keep", [False, True], ids=["local tensors", "DTensors"])
def test_dropout_in_tensor_parallelism(world2: World, keep: bool) -> None:
    world2.run(dropout_case, keep)
