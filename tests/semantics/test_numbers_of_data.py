"""Numbers and sizes that depend on data: one artifact serves calls of all data, each as in eager."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import Scene, assert_both_give_the_same, same_as_eager

SIGNS = ([1, -1, 1, -1, 1], [1, 1, 1, 1, 1], [-1, -1, -1, -1, -1], [-1, -1, 1, -1, -1])
"""Whose positive elements are some, all, none, and one."""
COUNTS = (3, 0, 1, 5)


def by_signs(fn: Callable[..., Any], *size: int, requires_grad: bool = True) -> Callable[[], list[Scene]]:
    """Calls with five rows, of which different ones begin with a positive number."""

    def build() -> list[Scene]:
        scenes: list[Scene] = []
        for signs in SIGNS:
            x = torch.rand(5, *size) + 0.5
            x = (x.movedim(0, -1) * torch.tensor(signs)).movedim(-1, 0).contiguous()
            scenes.append(Scene(fn, (x.requires_grad_(requires_grad),)))
        return scenes

    return build


def by_counts(
    fn: Callable[..., Any], counts: Sequence[Any] = COUNTS, *, requires_grad: bool = True
) -> Callable[[], list[Scene]]:
    """Calls with five numbers, and a tensor of something else."""
    return lambda: [
        Scene(fn, (torch.randn(5, requires_grad=requires_grad), torch.tensor(count))) for count in counts
    ]


def tripled(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x > 0] = x[x > 0] * 3
    return x


def scattered(x: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(x)
    for sign in (-1, 1):
        rows = (x[:, 0].sign() == sign).nonzero().squeeze(-1)
        result = result.index_add(0, rows, x[rows] * (sign + 3))
    return result


def loss_of_some_rows(x: torch.Tensor) -> torch.Tensor:
    keep = x[:, 0] > 0
    return F.cross_entropy(x[keep], torch.zeros(5, dtype=torch.long)[keep])


def written(x: torch.Tensor) -> torch.Tensor:
    chosen = x[x > 0] * 2
    chosen.mul_(3)
    return chosen


SELECTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "a mask": (lambda x: x[x > 0] * 2, ()),
    "a mask of rows": (lambda x: (x[x[:, 0] > 0] @ torch.ones(3, 2)).sin(), (3,)),
    "their mean": (lambda x: x[x > 0].mean(), ()),
    "their spread": (lambda x: torch.cat([x, x[x > 0]]).std(), ()),
    "masked_select": (lambda x: torch.masked_select(x, x > 0).exp(), ()),
    "nonzero": (lambda x: (x.sin(), torch.nonzero(x > 0)), ()),
    "where": (lambda x: x[torch.where(x > 0)] + 1, ()),
    "unique": (lambda x: torch.unique(x.detach().long(), return_inverse=True, return_counts=True), ()),
    "both halves": (lambda x: torch.cat([x[x > 0], -x[x <= 0]]), ()),
    "one after the other": (lambda x: (lambda y: y[y > 0.75].sum())(x[x > 0]), ()),
    "a write to what was selected": (written, ()),
    "a write by a mask": (tripled, ()),
    "views of it": (lambda x: (lambda y: (y, y[None], y.view(-1, 1)))(x[x > 0] * 1), ()),
    "how many there are": (lambda x: (lambda y: (y * 2, y.shape[0], 2 * y.numel() + 1))(x[x > 0]), ()),
    "divided by how many": (lambda x: (lambda y: y.sum() / max(y.numel(), 1))(x[x > 0]), ()),
    "divided by how many rows": (lambda x: (lambda y: y.sum() / max(len(y), 1))(x[x[:, 0] > 0]), (3,)),
    "the first of them": (lambda x: x[(x > 0).nonzero()[:2, 0]] * 2, ()),
    "the nearest of them": (lambda x: x[(x[:, :1] - torch.unique(x.detach().long())).argmin(0)] * 2, (3,)),
    "as many new ones": (lambda x: (lambda y: torch.arange(y.shape[0]) * y)(x[x > 0]), ()),
    "products": (lambda x: (lambda y: (y @ y.t()).softmax(-1).sum())(x[x[:, 0] > 0]), (3,)),
    "dropout": (lambda x: F.dropout(x[x > 0], 0.5), ()),
    "scattered": (scattered, (3,)),
    "a loss of some rows": (loss_of_some_rows, (3,)),
}

READS: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
    "an int": (lambda x, n: x * (2 * n.item() + 1), COUNTS),
    "a float": (lambda x, n: x * n.item(), (0.1, -3.5)),
    "floats in Python's order": (lambda x, n: x * (0.1 * (3.0 * n.item()) + 0.7 - n.item()), (0.3, 1.7)),
    "a bool": (lambda x, n: x * n.item(), (True, False)),
    "returned": (lambda x, n: (x * 2, n.item(), n.item() / 4), COUNTS),
    "a size": (lambda x, n: torch.zeros(n.item(), 2) + x.sum(), COUNTS),
    "a slice": (lambda x, n: (x[: n.item()] * 2, x[n.item() :] + 1), (*COUNTS, -2, 9)),
    "a slice that is returned": (lambda x, n: x[: n.item()], (*COUNTS, -2)),
    "a position": (lambda x, n: x[n.item()] * 2, (3, 0, -2)),
    "a position that is returned": (lambda x, n: x[n.item()], (3, -2)),
    "a position among slices": (lambda x, n: x.view(1, 5)[..., n.item(), None] * 2, (3, 0)),
    "several": (lambda x, n: [y * k for k, y in enumerate(x.split(n.tolist()))], ([2, 1, 2], [0, 5, 0])),
    "repeated": (lambda x, n: x.repeat_interleave(n) * 2, ([2, 0, 1, 1, 0], [1, 1, 1, 1, 1])),
    "the longest": (lambda x, n: x[: n.max().item()].softmax(-1), ([1, 2], [4, 5])),
    "bounded": (lambda x, n: x * min(n.item(), 2) + max(1, n.item()), COUNTS),
    "read before a write": (lambda x, n: (lambda k: (n.add_(1), x * k))(n.item()), COUNTS),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SELECTIONS)
def test_what_data_selects(name: str, dynamic: bool) -> None:
    fn, size = SELECTIONS[name]
    same_as_eager(by_signs(fn, *size), dynamic=dynamic)


@pytest.mark.parametrize("name", SELECTIONS)
def test_what_data_selects_without_autograd(name: str) -> None:
    fn, size = SELECTIONS[name]
    same_as_eager(by_signs(fn, *size, requires_grad=False), backward=False)


@pytest.mark.parametrize("name", READS)
def test_numbers_that_are_read(name: str) -> None:
    same_as_eager(by_counts(*READS[name]))


def test_writes_of_an_input_by_data() -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        x[: n.item()] = 0
        x[-1] = 2
        x[x > 0] = 5
        x[n.item() - 1] += 1
        return x * 2

    same_as_eager(by_counts(fn, requires_grad=False), backward=False)


def test_views_of_an_input_at_places_of_data() -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.mul_(2)
        return x[: n.item()], x[n.item() :].view(-1)

    same_as_eager(by_counts(fn, requires_grad=False), backward=False)


def test_gradients_that_meet_at_a_view_of_an_input() -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x[:, None]
        return rows, x[:2] * rows.split([n.item(), 5 - n.item()])[1]

    same_as_eager(by_counts(fn))


def test_wrappers() -> None:
    def build() -> list[Scene]:
        masks = ([True, False, True, True, False], [False] * 5)
        return [
            Scene(
                lambda x, mask: x[mask] * 2,
                (TwoTensor(torch.randn(5), torch.randn(5)).requires_grad_(), torch.tensor(mask)),
            )
            for mask in masks
        ]

    same_as_eager(build)


def test_what_tells_a_size_runs_once() -> None:
    def fn(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        distinct, _ = torch.unique(keys, return_inverse=True)
        return x.sum() * distinct.shape[0]

    compiled = same_as_eager(by_counts(fn, ([1, 1, 2], [3, 3, 3])))
    found = [node for graph in compiled.graphs[-1].values() for node in graph.graph.nodes]
    assert [str(node.target) for node in found].count("aten._unique2.default") == 2  # joint, and forward


def test_the_caller_may_write_what_was_read() -> None:
    def use(fn: Callable[..., Any]) -> list[torch.Tensor | None]:
        x, n = torch.ones(3, requires_grad=True), torch.tensor(4)
        y = fn(x, n)
        n.add_(3)
        y.sum().backward()
        return [y, x.grad]

    assert_both_give_the_same(lambda x, n: x * n.item(), use)


def test_backwards_of_some_results_twice_and_of_gradients() -> None:
    def use(fn: Callable[..., Any]) -> list[torch.Tensor | None]:
        x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
        first, second, third = fn(x)
        found = [
            *torch.autograd.grad(second.sum(), x, retain_graph=True),
            *torch.autograd.grad((first.sum() * third).sum(), x, retain_graph=True),
        ]
        (slope,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        slope.sum().backward()
        return [*found, slope, x.grad]

    assert_both_give_the_same(lambda x: (x[x > 0].exp(), x[x < 0].sin(), x.cos()), use)


def test_checkpoints_draw_again_for_what_was_selected() -> None:
    layer = nn.Linear(3, 3)

    def body(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(layer(x[x[:, 0] > 0]).relu(), 0.5).sum(0)

    same_as_eager(by_signs(lambda x: checkpoint(body, x, use_reentrant=False) * 2, 3))


class Routed(nn.Module):
    """Each row goes through the layer that its largest score names."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 3)
        experts = (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3))
        self.experts = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.scores(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = F.one_hot(chosen, 3).sum(0).tolist()
        parts = x[order].split(counts)
        found = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(x).index_copy(0, order, found) * weight[:, None]


def test_a_mixture_of_experts_trains_as_in_eager() -> None:
    found: list[list[torch.Tensor]] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Routed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if compiles:
            aotdist.compile(model, backend="fx")
        losses: list[torch.Tensor] = []
        for _ in range(6):
            loss = (model(torch.randn(12, 4)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append([*losses, *model.state_dict().values()])
        assert not compiles or len(compiled_call(model).artifacts) == 1
    assert all(map(torch.equal, *found))


def test_train_step() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)[x[:, 0] > 0].square().sum()

    found: list[list[torch.Tensor]] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = aotdist.train_step(model, loss_fn, optimizer, backend="fx")
        losses: list[torch.Tensor] = []
        for _ in range(4):
            x = torch.randn(6, 3)
            if compiles:
                losses.append(step(x))
            else:
                optimizer.zero_grad()
                loss = loss_fn(model, x)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        found.append([*losses, *model.state_dict().values()])
    assert all(map(torch.equal, *found))


def test_what_the_program_says_always_holds_is_checked_at_each_call() -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        count = n.item()
        torch._check(count <= 3, lambda: "too many")
        torch._check(count >= 0)
        return x[:count] * 2 if count >= 0 else x

    compiled, x = aotdist.compile(fn, backend="fx"), torch.ones(5)
    assert torch.equal(compiled(x, torch.tensor(2)), torch.full((2,), 2.0))
    for wrong in (4, -1):
        for call in (fn, compiled):
            with pytest.raises(RuntimeError, match="too many" if wrong == 4 else "Expected cond to be True"):
                call(x, torch.tensor(wrong))


def test_a_position_that_is_not_there() -> None:
    compiled = aotdist.compile(lambda x, n: x[n.item()] * 1, backend="fx")
    compiled(torch.ones(5), torch.tensor(4))
    with pytest.raises(IndexError):
        compiled(torch.ones(5), torch.tensor(5))


def test_a_position_beside_a_truth_is_refused() -> None:
    with pytest.raises(UnsupportedProgram, match="reads a tensor's data"):
        aotdist.compile(lambda x, n: x[n.item(), True], backend="fx")(torch.ones(5), torch.tensor(3))


CHOICES: dict[str, Callable[..., Any]] = {
    "of a size": lambda x: x if x[x > 0].shape[0] < 2 else -x,
    "of a number": lambda x: x * 2 if x.sum().long().item() == 3 else x,
    "of a tensor": lambda x: x if x.sum() > 0 else -x,
    "how often": lambda x: sum(x * k for k in range(x.sum().long().item())),
    "a float of Python's": lambda x: x * float(x.sum().item()),
    "a truth of Python's": lambda x: x * bool(x.sum() > 0),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_choices_by_data_are_refused_by_name(choice: str) -> None:
    with pytest.raises(UnsupportedProgram) as refused:
        aotdist.compile(CHOICES[choice], backend="fx")(torch.ones(3))
    assert "depends on a number, or a size, that is read off a tensor" in refused.value.what
    assert refused.value.where is not None and "test_numbers_of_data.py" in refused.value.where


def test_choices_of_a_backward_are_refused_by_the_line_of_its_forward() -> None:
    def spread(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].var(correction=3)  # whose gradient is another for up to three elements

    with pytest.raises(UnsupportedProgram, match="depends on a number") as refused:
        aotdist.compile(spread, backend="fx")(torch.ones(3, requires_grad=True))
    assert refused.value.where is not None and "var(correction=3)" in refused.value.where


COUNTED: dict[str, Callable[[torch.Tensor], list[Any]]] = {
    "tolist": lambda counts: counts.tolist(),
    "a loop": lambda counts: [count.item() for count in counts],
    "unbind": lambda counts: [count.item() for count in counts.unbind(-1)],
}


@pytest.mark.parametrize("name", COUNTED)
def test_parts_of_unknown_number_are_refused_with_the_way_that_works(name: str) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, num: int | None) -> list[torch.Tensor]:
        counts = torch.bincount(i, minlength=4)[:num]
        return [part.sum() * k for k, part in enumerate(x[i.argsort()].split(COUNTED[name](counts)))]

    compiled = aotdist.compile(fn, backend="fx")
    x, choices = torch.randn(5, 2), [[0, 2, 1, 0, 2], [3, 3, 3, 3, 1]]
    with pytest.raises(UnsupportedProgram, match=r"into how many parts depends on data") as refused:
        compiled(x, torch.tensor(choices[0]), None)
    assert "[:num].tolist()" in (refused.value.fix or "")
    for chosen in map(torch.tensor, choices):
        assert all(map(torch.equal, compiled(x, chosen, 4), fn(x, chosen, 4)))
    assert len(compiled_call(compiled).artifacts) == 1


@pytest.mark.parametrize("name", ["a mask of rows", "how many there are", "a loss of some rows"])
def test_inductor(name: str) -> None:
    fn, size = SELECTIONS[name]
    compiled = aotdist.compile(fn, backend="inductor")
    for scene in by_signs(fn, *size)():
        (x,) = scene.args
        found, expected = compiled(x), fn(x)
        torch.testing.assert_close(found, expected, equal_nan=True)
    assert len(compiled_call(compiled).artifacts) == 1


@pytest.mark.parametrize("name", ["a slice", "the longest", "several"])
def test_inductor_compiles_backwards(name: str) -> None:
    fn, counts = READS[name]

    def loss(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        results = fn(x.tan(), n)
        return sum(part.sin().sum() for part in ([results] if torch.is_tensor(results) else results))

    compiled = aotdist.compile(loss, backend="inductor")
    for count in map(torch.tensor, counts):
        x = torch.randn(5, requires_grad=True)
        found, expected = (torch.autograd.grad(call(x, count), x) for call in (compiled, loss))
        torch.testing.assert_close(found, expected)
    assert len(compiled_call(compiled).artifacts) == 1


OF_KNOWN_SIZE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "counts": lambda i: torch.bincount(i, minlength=4) + torch.ones(4),
    "positions": lambda i: i.nonzero()[:, 0] + torch.ones(3),
    "selected": lambda i: i[i > 0] * torch.arange(3.0),
    "different ones": lambda i: torch.unique(i) + torch.ones(3),
    "repeated": lambda i: torch.arange(4).repeat_interleave(i) + torch.ones(6),
}


def test_sizes_that_other_operands_decide_under_inductor() -> None:
    """A size that is one number in the trace is asked for at each call, and another one is an error."""
    compiled = {name: aotdist.compile(fn, backend="inductor") for name, fn in OF_KNOWN_SIZE.items()}
    for data in ([0, 2, 1, 3], [3, 1, 0, 2]):
        i = torch.tensor(data)
        for name, fn in OF_KNOWN_SIZE.items():
            if name != "different ones":
                torch.testing.assert_close(compiled[name](i), fn(i))
    i = torch.tensor([0, 1, 1, 3])
    torch.testing.assert_close(compiled["different ones"](i), torch.unique(i) + 1.0)
    for name in ("counts", "positions", "selected"):
        with pytest.raises((RuntimeError, AssertionError)):
            compiled[name](torch.tensor([7, 1, 1, 3]))
