"""Sparse matrices that are multiplied by dense ones: graph neural networks, with eager's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aotdist
from aotdist import UnsupportedProgram

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]

NODES = 12


def adjacency(layout: str, density: float = 0.3, seed: int = 0) -> Tensor:
    """A graph's normalised adjacency, as one of the layouts that programs take."""
    dense = torch.rand(NODES, NODES, generator=torch.Generator().manual_seed(seed))
    dense = torch.where(dense < density, dense, 0.0).fill_diagonal_(1.0)
    dense /= dense.sum(1, keepdim=True)
    if layout == "csr":
        return dense.to_sparse_csr()
    coo = dense.to_sparse_coo()
    if layout == "coo":
        return coo
    indices, values = coo.indices().flip(1), coo.values().flip(0)
    return torch.sparse_coo_tensor(indices, values, coo.shape, check_invariants=True)


LAYOUTS = ("coo", "coo in any order", "csr")


class GCN(nn.Module):
    """Two layers; the adjacency is an argument, a buffer, or closed over."""

    def __init__(self, adjacency: Tensor | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("adj", adjacency)

    def forward(self, x: Tensor, adj: Tensor | None = None) -> Tensor:
        adj = self.adj if adj is None else adj
        hidden = F.relu(torch.sparse.mm(adj, self.first(x)))
        return adj @ self.second(hidden)


def trained(how: str, layout: str, of_buffer: bool, backend: str) -> list[Tensor]:
    """Losses, the input's gradient and parameters of ten steps: `eager`, or `model` or `step` compiled."""
    torch.manual_seed(0)
    adj = adjacency(layout)
    model = GCN(adj if of_buffer else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    forward = aotdist.compile(model, backend=backend) if how == "model" else model
    x, labels = torch.randn(NODES, 6, requires_grad=True), torch.randint(0, 3, (NODES,))
    given = () if of_buffer else (adj,)

    def step(x: Tensor, labels: Tensor, *given: Tensor) -> Tensor:
        loss = F.cross_entropy(forward(x, *given), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Any = aotdist.compile(step, backend=backend) if how == "step" else step
    losses = [run(x, labels, *given) for _ in range(10)]
    return [*losses, x.grad, *model.parameters()]


def assert_same(ours: list[Tensor], theirs: list[Tensor], **tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("of_buffer", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["model", "step"])
def test_a_graph_network_trains_as_eager_does(how: str, layout: str, of_buffer: bool) -> None:
    assert_same(trained(how, layout, of_buffer, "fx"), trained("eager", layout, of_buffer, "fx"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["model", "step"])
def test_inductor_calls_the_same_kernel(how: str, layout: str) -> None:
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    assert_same(trained(how, layout, True, "inductor"), trained("eager", layout, True, "fx"), **tolerance)


CLOSED_OVER = adjacency("coo")
PROGRAMS: dict[str, Callable[..., Tensor]] = {
    "mm": torch.mm,
    "torch.sparse.mm": torch.sparse.mm,
    "matmul": torch.matmul,
    "addmm": lambda a, x: torch.addmm(x, a, x, beta=0.5, alpha=2.0),
    "torch.sparse.addmm": lambda a, x: torch.sparse.addmm(x, a, x, beta=0.5),
    "the transposed": lambda a, x: a.t() @ x,
    "of a transposed one": lambda a, x: a @ x.t().contiguous().t(),
    "closed over": lambda a, x: CLOSED_OVER @ (a @ x),
    "three times": lambda a, x: a @ (a @ (a @ x)),
    "asked for its size": lambda a, x: (
        a @ x[: a.shape[1]] / a.size(0) if a.layout is not torch.strided else x
    ),
    "asked what it is": lambda a, x: a @ x if a.is_sparse else (a @ x) * 2,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_have_the_bits_of_eager(name: str, layout: str) -> None:
    run, adj = PROGRAMS[name], adjacency(layout)
    torch.manual_seed(0)
    x = torch.randn(NODES, 5, requires_grad=True)
    found = []
    for each in (aotdist.compile(run, backend="fx"), run):
        out = each(adj, x)
        out.square().sum().backward()
        found.append([out, x.grad])
        x.grad = None
    assert_same(*found)


class GAT(nn.Module):
    """Each edge's weight is computed; the matrix of them is made inside, twice multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.score = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(12, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        pairs = torch.cat([x[edges[0]], x[edges[1]]], -1)
        weights = torch.sigmoid(self.score(pairs)).squeeze(-1)
        adj = torch.sparse_coo_tensor(edges, weights, (NODES, NODES))
        return torch.sparse.mm(adj, self.second(F.relu(torch.sparse.mm(adj, self.first(x)))))


@pytest.mark.parametrize("backend", ["fx", "inductor"])
def test_gradients_of_values(backend: str) -> None:
    torch.manual_seed(0)
    eager, edges = GAT(), torch.randint(0, NODES, (2, 40))
    compiled = aotdist.compile(copy.deepcopy(eager), backend=backend)
    found = []
    for model in (compiled, eager):
        torch.manual_seed(1)
        x = torch.randn(NODES, 6, requires_grad=True)
        out = model(x, edges)
        out.square().sum().backward()
        found.append([out, x.grad, *(param.grad for param in model.parameters())])
    assert_same(*found, **({} if backend == "fx" else {"rtol": 1e-4, "atol": 1e-5}))


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_one_program_for_all_numbers_of_values(layout: str) -> None:
    compiled = aotdist.compile(lambda a, x: (a @ x).relu(), backend="fx")
    graphs = [adjacency(layout, density) for density in (0.1, 0.2, 0.3, 0.4, 0.5)]
    assert len({adj._nnz() for adj in graphs}) == len(graphs)
    for adj in graphs:
        x = torch.randn(NODES, 4)
        assert torch.equal(compiled(adj, x), (adj @ x).relu())
    assert len(compiled.artifacts) == 2  # the first, and one for all others


def test_another_layout_size_or_order_is_another_program() -> None:
    compiled = aotdist.compile(torch.sparse.mm, backend="fx")
    x = torch.randn(NODES, 4)
    for layout in LAYOUTS * 2:
        assert torch.equal(compiled(adjacency(layout), x), torch.sparse.mm(adjacency(layout), x))
    assert len(compiled.artifacts) == 3
    for nodes in (4, 7):
        adj = torch.eye(nodes).to_sparse()
        assert torch.equal(compiled(adj, x[:nodes]), x[:nodes])
    assert len(compiled.artifacts) == 5


def test_a_buffer_is_read_at_each_call() -> None:
    model = GCN(adjacency("coo"))
    compiled, x = aotdist.compile(copy.deepcopy(model), backend="fx"), torch.randn(NODES, 6)
    assert torch.equal(compiled(x), model(x))
    for each in (model, compiled):
        each.adj = adjacency("coo", seed=0) * 2
    assert torch.equal(compiled(x), model(x))


def test_what_is_given_may_be_a_result() -> None:
    same = aotdist.compile(lambda a, x: (a, a.t(), a @ x), backend="fx")
    given, transposed, _ = same(CLOSED_OVER, torch.randn(NODES, 2))
    assert given is CLOSED_OVER
    assert transposed.is_sparse and torch.equal(transposed.to_dense(), CLOSED_OVER.to_dense().t())


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda a: a * 2, r"`aten.mul.Tensor` is given a matrix of layout torch.sparse_coo"),
        (lambda a: a.to_dense(), r"`aten._to_dense.default` is given a matrix of layout"),
        (lambda a: torch.ones(2, NODES) @ a, r"`aten.mm.default` is given a matrix"),
        (lambda a: a @ a, r"`aten._sparse_sparse_matmul.default` is given"),
    ],
)
def test_all_else_is_refused(run: Callable[[Tensor], Any], says: str) -> None:
    with pytest.raises(UnsupportedProgram, match=says) as refused:
        aotdist.compile(run, backend="fx")(CLOSED_OVER)
    assert "zeros.index_add(0, row, values[:, None] * dense[column])" in str(refused.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: CLOSED_OVER.clone().requires_grad_(),
            "`args.0.` has layout torch.sparse_coo, and requires grad",
        ),
        (lambda: torch.ones(2, 3, 4).to_sparse(2), "and is no matrix of numbers"),
        (lambda: torch.ones(4, 4).to_sparse_bsr((2, 2)), "has layout torch.sparse_bsr"),
    ],
)
def test_other_sparse_tensors_are_refused(make: Callable[[], Tensor], says: str) -> None:
    with pytest.raises(UnsupportedProgram, match=says):
        aotdist.compile(lambda a, x: a @ x, backend="fx")(make(), torch.ones(NODES, 2))


def rows_of_two_words() -> Tensor:
    """What an embedding's gradient is."""
    return torch.sparse_coo_tensor([[3, 1, 3]], torch.arange(6.0).view(3, 2), (5, 2))


def test_rows_of_a_gradient_are_arguments_and_results() -> None:
    def program(rows: Tensor) -> tuple[Tensor, ...]:
        return rows, rows.coalesce(), -rows / 3, rows + rows.coalesce(), torch.ones(5, 2).add(rows, alpha=0.3)

    given = rows_of_two_words()
    found, expected = aotdist.compile(program, backend="fx")(given), program(given)
    assert found[0] is given
    for one, other in zip(found, expected, strict=True):
        assert one.layout is other.layout and one.shape == other.shape
        pairs = [(one, other)]
        if one.is_sparse:
            assert one.is_coalesced() == other.is_coalesced()
            pairs = [(one._indices(), other._indices()), (one._values(), other._values())]
        assert all(torch.equal(*pair) for pair in pairs)


def test_rows_that_are_given_are_not_written() -> None:
    with pytest.raises(UnsupportedProgram, match="that the call is given is written in place"):
        aotdist.compile(lambda rows: rows.mul_(2), backend="fx")(rows_of_two_words())
    doubled = aotdist.compile(lambda rows: rows.clone().mul_(2), backend="fx")(rows_of_two_words())
    assert torch.equal(doubled.to_dense(), (rows_of_two_words() * 2).to_dense())
