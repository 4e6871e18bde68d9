"""Random joint graphs: every kind of node that a partition treats in a way of its own.

Values are matrices of 2 to 6 rows and 2 columns, so that they differ in bytes and any two can be
combined after cutting the taller one. A graph is described by a list of small integers, which
hypothesis shrinks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch.fx import Node

from aotdist.program import Graph, Role, Slot
from aotdist.torch_seam.functional import FakeTensorMode

ATEN = torch.ops.aten

Step = tuple[int, int, int, int]
"""Operation, first operand, second operand, tag."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a random joint graph is made from."""

    primal_rows: tuple[int, ...]
    forward: tuple[Step, ...]
    outputs: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]
    backward: tuple[Step, ...]
    grads: tuple[int | None, ...]


_INDEX = st.integers(0, 30)
_TAG = st.sampled_from([0] * 8 + [1, 2])


def _steps(most: int, least: int = 1) -> st.SearchStrategy[tuple[Step, ...]]:
    step = st.tuples(st.integers(0, len(_OPERATIONS) - 1), _INDEX, _INDEX, _TAG)
    return st.lists(step, min_size=least, max_size=most).map(tuple)


def recipes(most: int = 14) -> st.SearchStrategy[Recipe]:
    """Random recipes with up to `most` operations in each half."""
    return st.builds(
        Recipe,
        primal_rows=st.lists(st.integers(2, 6), min_size=1, max_size=3).map(tuple),
        forward=_steps(most),
        outputs=st.lists(_INDEX, min_size=1, max_size=2).map(tuple),
        writes=st.lists(st.tuples(_INDEX, _INDEX), max_size=1).map(tuple),
        backward=_steps(most),
        grads=st.lists(st.none() | _INDEX, min_size=1, max_size=3).map(tuple),
    )


class _Writer:
    """Grows one graph; `values` are the matrices that later operations may use."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.gm = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
        self.values: list[Node] = []
        self.phase = "forward"

    def argument(self, name: str, rows: int) -> Node:
        node = self.gm.graph.placeholder(name)
        with self.mode:
            node.meta.update(val=torch.empty(rows, 2), phase="forward")
        self.values.append(node)
        return node

    def call(self, target: Any, *args: Any, tag: int = 0) -> Node:
        node = self.gm.graph.call_function(target, args)
        node.meta["phase"] = self.phase
        policy = (None, "must_save", "must_recompute")[tag]
        if policy is not None and self.phase == "forward":
            node.meta["policy"] = policy
        fakes = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*fakes)
        return node

    def constant(self) -> Node:
        if not hasattr(self.gm, "constant"):
            self.gm.register_buffer("constant", torch.tensor([[0.5, 0.25], [0.125, 2.0]]))
        node = self.gm.graph.get_attr("constant")
        with self.mode:
            node.meta.update(val=torch.empty(2, 2), phase=self.phase)
        return node

    def pick(self, index: int) -> Node:
        return self.values[-1 - index % len(self.values)]

    def step(self, step: Step) -> None:
        operation, a, b, tag = step
        self.values += _OPERATIONS[operation](self, self.pick(a), self.pick(b), tag)


def _rows(node: Node) -> int:
    return node.meta["val"].shape[0]


def _cut(w: _Writer, node: Node, rows: int) -> Node:
    return node if _rows(node) == rows else w.call(ATEN.slice.Tensor, node, 0, 0, rows)


def _same_rows(w: _Writer, a: Node, b: Node) -> tuple[Node, Node]:
    rows = min(_rows(a), _rows(b))
    return _cut(w, a, rows), _cut(w, b, rows)


def _unary(op: Any) -> Callable[..., list[Node]]:
    return lambda w, a, b, tag: [w.call(op, a, tag=tag)]


def _binary(op: Any) -> Callable[..., list[Node]]:
    return lambda w, a, b, tag: [w.call(op, *_same_rows(w, a, b), tag=tag)]


def _matmul(w: _Writer, a: Node, b: Node, tag: int) -> list[Node]:
    return [w.call(ATEN.mm.default, a, _cut(w, b, 2), tag=tag)]


def _reduction(w: _Writer, a: Node, b: Node, tag: int) -> list[Node]:
    total = w.call(ATEN.sum.dim_IntList, a, [0], True, tag=tag)
    return [w.call(ATEN.expand.default, total, [_rows(a), 2])]


def _view(w: _Writer, a: Node, b: Node, tag: int) -> list[Node]:
    return [w.call(ATEN.slice.Tensor, a, 0, 0, 2, tag=tag)]


def _cat(w: _Writer, a: Node, b: Node, tag: int) -> list[Node]:
    a, b = _cut(w, a, min(_rows(a), 3)), _cut(w, b, min(_rows(b), 3))
    return [w.call(ATEN.cat.default, [a, b], tag=tag)]


def _dropout(w: _Writer, a: Node, b: Node, tag: int) -> list[Node]:
    both = w.call(ATEN.native_dropout.default, a, 0.5, True)
    return [w.call(operator.getitem, both, 0, tag=tag)]


def _split(w: _Writer, a: Node, b: Node, tag: int) -> list[Node]:
    rest = _rows(a) - 1
    both = w.call(ATEN.split_with_sizes.default, a, [1, rest])
    last = w.call(operator.getitem, both, 1, tag=tag)
    return [w.call(ATEN.expand.default, last, [2, 2]) if rest == 1 else last]


def _extreme(w: _Writer, a: Node, b: Node, tag: int) -> list[Node]:
    both = w.call(ATEN.max.dim, a, 0, True, tag=tag)
    return [w.call(ATEN.add.Tensor, a, w.call(operator.getitem, both, 0))]


def _shifted(w: _Writer, a: Node, b: Node, tag: int) -> list[Node]:
    return [w.call(ATEN.add.Tensor, _cut(w, a, 2), w.constant(), tag=tag)]


def _created(w: _Writer, a: Node, b: Node, tag: int) -> list[Node]:
    return [w.call(ATEN.full.default, [_rows(a), 2], 0.75, tag=tag)]


_OPERATIONS: Sequence[Callable[[_Writer, Node, Node, int], list[Node]]] = (
    _unary(ATEN.sin.default),
    _unary(ATEN.tanh.default),
    _unary(ATEN.clone.default),
    _unary(ATEN.detach.default),
    _binary(ATEN.mul.Tensor),
    _binary(ATEN.add.Tensor),
    _matmul,
    _reduction,
    _view,
    _cat,
    _dropout,
    _split,
    _extreme,
    _shifted,
    _created,
)


def build_joint(recipe: Recipe) -> Graph:
    """The joint graph of a recipe."""
    w = _Writer()
    primals = [w.argument(f"p{i}", rows) for i, rows in enumerate(recipe.primal_rows)]
    tangent = w.argument("t0", 2)
    w.values.pop()
    for step in recipe.forward:
        w.step(step)
    outputs = [w.pick(i) for i in recipe.outputs]
    writes = _writes(w, recipe, primals)
    w.phase = "backward"
    w.values.append(tangent)
    for step in recipe.backward:
        w.step(step)
    grads = [None if i is None else w.pick(i) for i in recipe.grads]
    w.gm.graph.output((*outputs, *writes.values(), *grads))
    w.gm.recompile()
    return Graph(w.gm, *_slots(primals, outputs, writes, grads))


def _writes(w: _Writer, recipe: Recipe, primals: Sequence[Node]) -> dict[Node, Node]:
    found = {}
    for at, source in recipe.writes:
        primal, value = primals[at % len(primals)], w.pick(source)
        if _rows(value) == _rows(primal):
            found[primal] = value
    return found


def _slots(
    primals: Sequence[Node], outputs: Sequence[Node], writes: dict[Node, Node], grads: Sequence[Node | None]
) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    ins: list[tuple[Role, str]] = [*(("primal", n.name) for n in primals), ("tangent", "t0")]
    outs: list[tuple[Role, str]] = [("output", f"out[{i}]") for i in range(len(outputs))]
    outs += [("write", n.name) for n in writes]
    outs += [("grad", f"g{i}") for i in range(len(grads))]
    return tuple(Slot(r, p) for r, p in ins), tuple(Slot(r, p) for r, p in outs)


def random_arguments(joint: Graph, seed: int = 0) -> list[torch.Tensor]:
    """Values for the graph's arguments."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n.meta["val"].shape, generator=generator) for n in joint.placeholders()]
