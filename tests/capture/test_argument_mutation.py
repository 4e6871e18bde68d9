"""Lists, dictionaries and objects among the arguments, which the program changes."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import Scene, same_as_eager


def pops(batch: dict[str, Any]) -> torch.Tensor:
    return batch["x"] - batch.pop("y")


def stores(batch: dict[str, Any]) -> torch.Tensor:
    batch["z"] = batch["x"] * 2
    batch["n"] = 3
    return batch["z"] + 1


def replaces(batch: dict[str, Any]) -> torch.Tensor:
    batch["x"], batch["y"] = batch["y"], batch["x"].sin()
    return batch["y"] * 1


def inside(batch: dict[str, Any]) -> torch.Tensor:
    batch["pair"][0] = batch["x"] + 1
    batch["pair"][1]["deep"] = (batch["x"], batch["y"] * 2)
    del batch["pair"][1]["old"]
    return batch["pair"][0] * 1


def made() -> dict[str, Any]:
    torch.manual_seed(0)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    return {"x": x, "y": y, "pair": [torch.ones(3), {"old": torch.zeros(3)}]}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.requires_grad == b.requires_grad
    return a == b


@pytest.mark.parametrize("program", [pops, stores, replaces, inside])
def test_changes_are_repeated(program: Callable[[dict[str, Any]], torch.Tensor]) -> None:
    compiled = aotdist.compile(program, backend="fx")
    for _ in range(2):
        theirs, ours = made(), made()
        pair = ours["pair"]
        expected, found = program(theirs), compiled(ours)
        assert torch.equal(found, expected)
        assert same(ours, theirs)
        assert ours["pair"] is pair
        if expected.requires_grad:
            expected.sum().backward()
            found.sum().backward()
    assert len(compiled_call(compiled).artifacts) == 1


def test_by_name() -> None:
    def program(x: torch.Tensor, *, cache: dict[str, torch.Tensor]) -> torch.Tensor:
        cache["last"] = x * 2
        return cache["last"].sum()

    compiled = aotdist.compile(program, backend="fx")
    cache: dict[str, torch.Tensor] = {}
    compiled(torch.ones(2), cache=cache)
    assert torch.equal(cache["last"], torch.full((2,), 2.0))


def test_lists_that_grow() -> None:
    def program(x: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        seen.append(x * len(seen))
        seen.append(len(seen))
        return torch.stack(seen[::2]).sum(0)

    compiled = aotdist.compile(program, backend="fx")
    ours: list[Any] = []
    theirs: list[Any] = []
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2), ours), program(torch.ones(2), theirs))
    assert same(ours, theirs)


def test_lists_that_shrink_are_refused() -> None:
    def program(x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        return x * seen.pop()

    seen = [torch.ones(2)]
    with pytest.raises(UnsupportedProgram, match=r"the list `args\[1\]` loses items"):
        aotdist.compile(program, backend="fx")(torch.ones(2), seen)
    assert len(seen) == 1


def test_a_list_in_two_places_is_refused_if_one_is_changed() -> None:
    def grows(items: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
        items.append(items[0] * 2)
        return others[-1]

    def reads(items: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
        return items[0] + others[-1]

    items = [torch.ones(2)]
    compiled = aotdist.compile(grows, backend="fx")
    assert torch.equal(compiled([torch.ones(2)], [torch.zeros(2)]), torch.zeros(2))
    for call in (compiled, aotdist.compile(grows, backend="fx")):
        with pytest.raises(UnsupportedProgram, match=r"`args\[0\]` is changed, and a list .* in two places"):
            call(items, items)
        assert len(items) == 1
    assert torch.equal(aotdist.compile(reads, backend="fx")(items, items), torch.full((2,), 2.0))


def test_objects_are_refused() -> None:
    def program(batch: dict[str, Any]) -> torch.Tensor:
        batch["what"] = object()
        return batch["x"] * 2

    with pytest.raises(
        UnsupportedProgram, match=r"`args\[0\]\['what'\]` is assigned an instance of `object`"
    ):
        aotdist.compile(program, backend="fx")({"x": torch.ones(2)})


@dataclasses.dataclass
class Batch:
    """A class of the user's that pytrees know."""

    x: torch.Tensor
    sizes: list[int]
    seen: Any = None


class Bag:
    """One that they know without names for what is in it."""

    def __init__(self, items: list[torch.Tensor]) -> None:
        self.items = items


pytree.register_dataclass(Batch)
pytree.register_pytree_node(Bag, lambda bag: (list(bag.items), None), lambda items, _: Bag(list(items)))


def test_objects_that_pytrees_know() -> None:
    def program(batch: dict[str, Batch], bag: Bag) -> torch.Tensor:
        inner = batch["first"]
        inner.seen = inner.x
        inner.x = inner.x * 2
        inner.sizes[0] += 1
        bag.items.append(bag.items[-1] * inner.x)
        return bag.items[-1].sum()

    compiled = aotdist.compile(program, backend="fx")
    told: list[Any] = []
    for call in (program, compiled, compiled):
        x = torch.arange(3.0)
        batch, bag = Batch(x, [3]), Bag([torch.ones(3)])
        result = call({"first": batch}, bag)
        assert batch.seen is x and torch.equal(batch.x, x * 2) and batch.sizes == [4]
        told.append((result.item(), [item.tolist() for item in bag.items]))
    assert told[0] == told[1] == told[2]


def test_a_full_deque_is_changed() -> None:
    def slides(x: torch.Tensor, window: deque[torch.Tensor]) -> torch.Tensor:
        total = x + sum(window)
        window.append(x.detach() * 2)
        return total

    def build() -> Scene:
        return Scene(
            slides, (torch.randn(3, requires_grad=True), deque([torch.ones(3), torch.zeros(3)], maxlen=2))
        )

    same_as_eager(build, calls=3)
    window = deque([torch.ones(3), torch.zeros(3)], maxlen=2)
    second = window[1]
    aotdist.compile(slides, backend="fx")(torch.randn(3), window)
    assert window[0] is second and len(window) == 2


def test_a_deque_that_grows_is_refused() -> None:
    def grows(x: torch.Tensor, window: deque[torch.Tensor]) -> torch.Tensor:
        window.append(x * 2)
        return x

    window = deque([torch.ones(3)], maxlen=2)
    with pytest.raises(UnsupportedProgram, match=r"the deque `args\[1\]` gets longer or shorter"):
        aotdist.compile(grows, backend="fx")(torch.randn(3), window)
    assert len(window) == 1
