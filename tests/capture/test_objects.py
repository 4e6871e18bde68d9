"""Results that hold tensors in objects of the user's own classes: a fresh object at every call."""

from __future__ import annotations

import collections
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.errors import UnsupportedProgram


class Layer:
    def __init__(self, keys: torch.Tensor, name: str) -> None:
        self.keys, self.name, self.more = keys, name, [keys + 1, {"two": keys + 2}]


class Cache:
    """What a language model returns beside its logits."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.settings = SETTINGS

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        self.layers.append(Layer(keys, f"layer {len(self.layers)}"))
        return keys


class Slotted:
    __slots__ = ("value", "unset")

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


class Settings:
    size = 3


SETTINGS = Settings()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        cache = Cache()
        return {"logits": cache.update(self.linear(cache.update(x * 2))).sum(), "cache": cache}


def test_each_call_returns_an_object_of_its_own() -> None:
    torch.manual_seed(0)
    model = Model()
    inputs = [torch.randn(2, 4), torch.randn(2, 4)]
    expected = [model(x) for x in inputs]
    aotdist.compile(model, backend="fx")
    found = [model(x) for x in inputs]
    assert found[0]["cache"] is not found[1]["cache"]
    for eager, ours in zip(expected, found, strict=True):
        cache = ours["cache"]
        assert type(cache) is Cache and cache.settings is SETTINGS
        assert [layer.name for layer in cache.layers] == ["layer 0", "layer 1"]
        for theirs, layer in zip(eager["cache"].layers, cache.layers, strict=True):
            assert type(layer) is Layer
            assert torch.equal(theirs.keys, layer.keys)
            assert torch.equal(theirs.more[1]["two"], layer.more[1]["two"])
    grads = []
    for result in (expected[0], found[0]):
        model.zero_grad()
        (result["logits"] + result["cache"].layers[1].keys.square().sum()).backward()
        grads.append(model.linear.weight.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("cls", [Slotted, Frozen])
def test_slots_and_frozen_classes(cls: type) -> None:
    program = aotdist.compile(lambda x: cls(x * 2), backend="fx")
    x = torch.randn(3)
    first, second = program(x), program(x + 1)
    assert type(first) is type(second) is cls and not hasattr(first, "unset")
    assert torch.equal(first.value, x * 2) and torch.equal(second.value, (x + 1) * 2)


def test_containers_that_pytrees_know_are_looked_into() -> None:
    program = aotdist.compile(lambda x: Frozen(collections.deque([x * 2])), backend="fx")  # type: ignore[arg-type]
    x = torch.randn(3)
    assert torch.equal(program(x).value[0], x * 2)


def test_an_object_from_before_the_call_stays_itself() -> None:
    held = Cache()

    def program(x: torch.Tensor) -> Cache:
        held.last = x * 2  # type: ignore[attr-defined]
        return held

    compiled, x = aotdist.compile(program, backend="fx"), torch.randn(3)
    for _ in range(2):
        x = x + 1
        assert compiled(x) is held and torch.equal(held.last, x * 2)  # type: ignore[attr-defined]


def test_an_object_without_tensors_is_handed_on() -> None:
    assert aotdist.compile(lambda x: (x, SETTINGS), backend="fx")(torch.ones(2))[1] is SETTINGS


def test_an_object_in_two_places_is_one_object() -> None:
    def program(x: torch.Tensor) -> list[Any]:
        made = Frozen(x * 2)
        return [made, {"again": (made, Frozen(x))}]

    compiled = aotdist.compile(program, backend="fx")
    for x in (torch.ones(2), torch.zeros(2)):
        first, rest = compiled(x)
        again, other = rest["again"]
        assert first is again
        assert torch.equal(first.value, x * 2)
        assert torch.equal(other.value, x)


class Made(nn.Module):
    """What a hypernetwork returns: a network whose weights it computes, or draws."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        self.scale = nn.Parameter(x.detach().sum(0))
        self.register_buffer("seen", x * 2, persistent=False)


def test_a_module_with_parameters_that_the_program_makes_is_refused() -> None:
    with pytest.raises(UnsupportedProgram, match="requires grad, and no input"):
        aotdist.compile(lambda x: Made(x), backend="fx")(torch.randn(2, 3))


def test_a_module_from_before_the_call_stays_itself() -> None:
    class Keeping(Model):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return x * 2, nn.Sequential(self.linear, nn.ReLU())

    model = aotdist.compile(Keeping(), backend="fx")
    for _ in range(2):
        _, made = model(torch.ones(3))
        assert made[0] is model.linear and isinstance(made[1], nn.ReLU)


class Names(dict[str, torch.Tensor]):
    """A class that no pytree knows, of a builtin's layout."""


def test_an_object_has_items() -> None:
    def program(x: torch.Tensor) -> Names:
        made = Names(x=x * 2)
        made.note = x + 1  # type: ignore[attr-defined]
        return made

    compiled = aotdist.compile(program, backend="fx")
    for x in (torch.ones(2), torch.zeros(2)):
        made = compiled(x)
        assert type(made) is Names
        assert torch.equal(made["x"], x * 2)
        assert torch.equal(made.note, x + 1)  # type: ignore[attr-defined]


class Outputs(collections.OrderedDict[str, Any]):
    """What models return whose authors follow transformers: items that are attributes, too."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.__dict__[name] = value


class Lists(collections.defaultdict[str, list[torch.Tensor]]):
    """What is not there is an empty list."""


@pytest.mark.parametrize("given", [False, True], ids=["returned", "given and returned"])
def test_dictionaries_that_are_more_than_dictionaries_keep_that(given: bool) -> None:
    def program(x: torch.Tensor, outputs: Outputs, lists: Lists) -> tuple[Outputs, Lists]:
        outputs, lists = (outputs, lists) if given else (Outputs(), Lists(list))
        outputs["two"] = x * (2 + len(list(outputs)))
        outputs["one"] = x + 1
        outputs.move_to_end("two")
        lists["new"].append(sum(outputs.values()))
        return outputs, lists

    compiled = aotdist.compile(program, backend="fx")
    ours, eager = ((Outputs(zero=torch.ones(2)), Lists(list)) for _ in range(2))
    for x in (torch.ones(2), torch.zeros(2)):
        made, expected = compiled(x, *ours), program(x, *eager)
        for one, other in zip(made, expected, strict=True):
            assert type(one) is type(other) and vars(one).keys() == vars(other).keys()
            assert list(one) == list(other)
        assert all(map(torch.equal, made[0].values(), expected[0].values()))
        assert all(map(torch.equal, made[1]["new"], expected[1]["new"]))
        assert made[1]["more"] == expected[1]["more"]


class Pair(tuple[torch.Tensor, ...]):
    """Cannot be made empty, and filled."""


class Window(collections.deque[torch.Tensor]):
    """Nor can this, which no pytree knows."""


@pytest.mark.parametrize("cls", [Pair, Window])
def test_an_object_that_cannot_be_made_anew_is_refused(cls: Any) -> None:
    with pytest.raises(UnsupportedProgram, match=f"makes a {cls.__name__} .* cannot be made anew"):
        aotdist.compile(lambda x: cls([x * 2]), backend="fx")(torch.ones(2))


class Labels:
    def __init__(self) -> None:
        self.names = ["x"]


@functools.cache
def labels() -> Labels:
    return Labels()


def test_an_object_that_a_cache_hides_stays_itself() -> None:
    holder, kept = SimpleNamespace(names=None), labels()

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, Labels, Labels]:
        holder.names = labels()
        return x * 2, labels(), Labels()

    compiled = aotdist.compile(fn, backend="fx")
    for _ in range(3):
        holder.names = None
        _, cached, new = compiled(torch.ones(2))
        assert cached is kept and holder.names is kept and new is not kept
        new.names.append("y")
        assert new.names == ["x", "y"]
