"""Every place where a tensor or a constant may live, and what happens when it changes between calls.

A tensor that is rebound is read afresh, without compiling; a constant that changes compiles once more.
"""

from __future__ import annotations

import datetime
import functools
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

import aotdist
from aotdist.api import compiled_call
from aotdist.capture.source import Source
from tests.capture import surroundings

WEIGHT = torch.ones(3, requires_grad=True)
SCALE = 2.0


def new_weight() -> torch.Tensor:
    return torch.full((3,), 5.0, requires_grad=True)


@dataclass
class Place:
    """A function, how to change what it reads, and the tensor that gradients should reach.

    Args:
        fn: reads the place.
        change: changes what is there.
        weight: what is there now, if it is a tensor that requires grad.
    """

    fn: Callable[[torch.Tensor], torch.Tensor]
    change: Callable[[], None]
    weight: Callable[[], torch.Tensor] | None = None


Build: TypeAlias = Callable[[], Place]


class Reader:
    scale = 2.0
    shared = torch.ones(3, requires_grad=True)

    def __init__(self):
        self.weight = torch.ones(3, requires_grad=True)
        self.factor = 1.5
        self.items = [torch.ones(3), 3.0]
        self.table = {"bias": torch.ones(3), "shift": 1.0}
        self.inner = types.SimpleNamespace(weight=torch.ones(3), factor=2.0)

    def __call__(self, x):
        return self.method(x)

    def method(self, x):
        return x * self.weight * self.factor

    def of_the_class(self, x):
        return x * self.shared * self.scale

    def of_containers(self, x):
        return x * self.items[0] * self.items[1] + self.table["bias"] * self.table["shift"]

    def of_an_inner_object(self, x):
        return x * self.inner.weight * self.inner.factor

    def of_globals(self, x):
        return x * WEIGHT * SCALE

    def twice_removed(self, x):
        return self.of_globals(x)

    @property
    def gain(self):
        return self.weight * SCALE

    @staticmethod
    def static(x):
        return x * WEIGHT * SCALE

    @classmethod
    def of_class(cls, x):
        return x * cls.shared * SCALE


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.options = {"factor": 2.0, "sizes": [1, 2]}
        self.reader = Reader()
        self.activation = lambda x: x * SCALE
        self.tensors = [torch.ones(3)]
        self.factor = 1.0

    def forward(self, x):
        x = self.prepare(self.linear(x)) * WEIGHT * self.options["factor"] * self.factor
        return self.activation(x) * self.reader.factor * self.tensors[0] + self.options["sizes"][1]

    def prepare(self, x):
        return x * surroundings.SCALE


def setting(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def putting(owner: Any, key: Any, value: Any) -> Callable[[], None]:
    return lambda: owner.__setitem__(key, value)


def rebinding(name: str, value: Any) -> Callable[[], None]:
    return putting(globals(), name, value)


def a_cell() -> Place:
    weight = torch.ones(3, requires_grad=True)

    def change():
        nonlocal weight
        weight = new_weight()

    return Place(lambda x: x * weight, change, lambda: weight)


def a_constant_in_a_cell() -> Place:
    scale = 2.0

    def change():
        nonlocal scale
        scale = 3.0

    return Place(lambda x: x * scale, change)


def a_default() -> Place:
    def fn(x, weight=torch.ones(3, requires_grad=True), *, scale=2.0):  # noqa: B008
        return x * weight * scale

    def change():
        fn.__defaults__ = (new_weight(),)

    return Place(fn, change, lambda: fn.__defaults__[0])


def a_constant_default() -> Place:
    def fn(x, *, scale=2.0):
        return x * scale

    return Place(fn, lambda: fn.__kwdefaults__.update(scale=3.0))


def a_partials_tensor() -> Place:
    weight = torch.ones(3, requires_grad=True)
    fn = functools.partial(lambda weight, x, scale: weight * x * scale, weight, scale=2.0)
    return Place(fn, lambda: weight.data.fill_(7), lambda: weight)


def an_inner_compiled_function() -> Place:
    inner = aotdist.compile(lambda x: x * WEIGHT, backend="fx")
    return Place(lambda x: inner(x) + 1, rebinding("WEIGHT", new_weight()), lambda: WEIGHT)


def of_reader(read: Callable[[Reader], Any], change: Callable[[Reader], Callable[[], None]]) -> Build:
    def build() -> Place:
        reader = Reader()
        return Place(read(reader), change(reader))

    return build


def of_module(change: Callable[[Reading], Callable[[], None]]) -> Build:
    def build() -> Place:
        model = Reading()
        return Place(lambda x: model(x), change(model))

    return build


TENSORS: dict[str, Build] = {
    "a cell": a_cell,
    "a default": a_default,
    "an argument of a partial": a_partials_tensor,
    "a global": lambda: Place(lambda x: x * WEIGHT, rebinding("WEIGHT", new_weight()), lambda: WEIGHT),
    "a global of an imported module": lambda: Place(
        lambda x: x * surroundings.WEIGHT,
        setting(surroundings, "WEIGHT", new_weight()),
        lambda: surroundings.WEIGHT,
    ),
    "a global of an imported function": lambda: Place(
        lambda x: surroundings.scaled(x),
        setting(surroundings, "WEIGHT", new_weight()),
        lambda: surroundings.WEIGHT,
    ),
    "an attribute of a class": lambda: Place(
        lambda x: x * surroundings.Settings.weight,
        setting(surroundings.Settings, "weight", new_weight()),
        lambda: surroundings.Settings.weight,
    ),
    "a static method of a class": lambda: Place(
        lambda x: surroundings.Settings.apply(x), setting(surroundings, "WEIGHT", new_weight())
    ),
    "an attribute of a called object": of_reader(lambda r: r, lambda r: setting(r, "weight", new_weight())),
    "an attribute of a bound method's object": of_reader(
        lambda r: r.method, lambda r: setting(r, "weight", new_weight())
    ),
    "an attribute of an object's class": of_reader(
        lambda r: r.of_the_class, lambda r: setting(Reader, "shared", new_weight())
    ),
    "an item of a list": of_reader(lambda r: r.of_containers, lambda r: putting(r.items, 0, torch.zeros(3))),
    "an item of a dictionary": of_reader(
        lambda r: r.of_containers, lambda r: putting(r.table, "bias", torch.zeros(3))
    ),
    "an attribute of an inner object": of_reader(
        lambda r: r.of_an_inner_object, lambda r: setting(r.inner, "weight", torch.zeros(3))
    ),
    "what a property reads": of_reader(
        lambda r: lambda x: x * r.gain, lambda r: setting(r, "weight", new_weight())
    ),
    "what a method of a method reads": of_reader(
        lambda r: lambda x: r.twice_removed(x), lambda r: rebinding("WEIGHT", new_weight())
    ),
    "what a static method reads": of_reader(
        lambda r: lambda x: r.static(x), lambda r: rebinding("WEIGHT", new_weight())
    ),
    "what a class method reads": of_reader(
        lambda r: lambda x: r.of_class(x), lambda r: setting(Reader, "shared", new_weight())
    ),
    "what a decorated function reads": lambda: Place(
        torch.no_grad()(lambda x: x * WEIGHT), rebinding("WEIGHT", new_weight())
    ),
    "what an inner compiled function reads": an_inner_compiled_function,
    "a global that a module reads": of_module(lambda m: rebinding("WEIGHT", new_weight())),
    "a list of a module": of_module(lambda m: putting(m.tensors, 0, torch.zeros(3))),
    "a parameter of a module": of_module(
        lambda m: setting(m.linear, "weight", nn.Parameter(torch.zeros(3, 3)))
    ),
}

CONSTANTS: dict[str, Build] = {
    "a cell": a_constant_in_a_cell,
    "a default": a_constant_default,
    "a global": lambda: Place(lambda x: x * SCALE, rebinding("SCALE", 3.0)),
    "a global of an imported module": lambda: Place(
        lambda x: x * surroundings.SCALE, setting(surroundings, "SCALE", 3.0)
    ),
    "a global of an imported function": lambda: Place(
        lambda x: surroundings.scaled(x), setting(surroundings, "SCALE", 3.0)
    ),
    "an imported function": lambda: Place(
        lambda x: surroundings.scaled(x), setting(surroundings, "scaled", lambda x: x + 1)
    ),
    "an attribute of a class": lambda: Place(
        lambda x: x * surroundings.Settings.scale, setting(surroundings.Settings, "scale", 4.0)
    ),
    "an attribute of an object": of_reader(lambda r: r.method, lambda r: setting(r, "factor", 9.0)),
    "an attribute of an object's class": of_reader(
        lambda r: r.of_the_class, lambda r: setting(Reader, "scale", 9.0)
    ),
    "an item of a list": of_reader(lambda r: r.of_containers, lambda r: putting(r.items, 1, 9.0)),
    "an item of a dictionary": of_reader(lambda r: r.of_containers, lambda r: putting(r.table, "shift", 9.0)),
    "an attribute of an inner object": of_reader(
        lambda r: r.of_an_inner_object, lambda r: setting(r.inner, "factor", 9.0)
    ),
    "an inner object": of_reader(
        lambda r: r.of_an_inner_object,
        lambda r: setting(r, "inner", types.SimpleNamespace(weight=torch.ones(3), factor=8.0)),
    ),
    "what a method of a method reads": of_reader(
        lambda r: lambda x: r.twice_removed(x), lambda r: rebinding("SCALE", 3.0)
    ),
    "what a property reads": of_reader(lambda r: lambda x: x * r.gain, lambda r: rebinding("SCALE", 3.0)),
    "an attribute of a module": of_module(lambda m: setting(m, "factor", 9.0)),
    "an option of a module": of_module(lambda m: putting(m.options, "factor", 9.0)),
    "a nested option of a module": of_module(lambda m: putting(m.options["sizes"], 1, 9)),
    "an object of a module": of_module(lambda m: setting(m.reader, "factor", 9.0)),
    "a function of a module": of_module(lambda m: setting(m, "activation", torch.sin)),
    "a global that a module's method reads": of_module(lambda m: setting(surroundings, "SCALE", 9.0)),
    "a global that a module's function reads": of_module(lambda m: rebinding("SCALE", 9.0)),
}


@pytest.fixture(autouse=True)
def places_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test rebinds is put back after it."""
    for name in ("WEIGHT", "SCALE"):
        monkeypatch.setitem(globals(), name, globals()[name])
    for owner, names in (
        (surroundings, ("WEIGHT", "SCALE", "scaled")),
        (surroundings.Settings, ("scale", "weight")),
        (Reader, ("scale", "shared")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))


def gradient(call: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(call(x).sum(), weight)
    return grad


def check(place: Place, *, artifacts: int) -> None:
    """The compiled function follows the change as the function itself does."""
    compiled = aotdist.compile(place.fn, backend="fx")
    x = torch.randn(3)
    for step in range(3):
        assert torch.equal(compiled(x), place.fn(x)), f"call {step}"
        if place.weight is not None:
            assert torch.equal(gradient(compiled, x, place.weight()), gradient(place.fn, x, place.weight()))
        if step == 0:
            before = place.fn(x)
            place.change()
            assert not torch.equal(before, place.fn(x)), "the change changes nothing"
    assert len(compiled_call(compiled).artifacts) == artifacts


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_read_afresh(name):
    torch.manual_seed(1)
    check(TENSORS[name](), artifacts=1)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_compiles_again(name):
    torch.manual_seed(1)
    check(CONSTANTS[name](), artifacts=2)


def test_a_global_that_is_merely_called_like_an_attribute_is_not_watched(monkeypatch):
    monkeypatch.setitem(globals(), "t", 1.0)
    compiled = aotdist.compile(lambda x: x.t(), backend="fx")
    compiled(torch.ones(2))
    globals()["t"] = 2.0
    compiled(torch.ones(2))
    assert len(compiled.artifacts) == 1


def test_attributes_that_no_code_names_are_not_watched():
    reader = Reader()
    compiled = aotdist.compile(reader.method, backend="fx")
    compiled(torch.ones(3))
    reader.steps = 1
    reader.items[1] = 7.0
    compiled(torch.ones(3))
    assert len(compiled.artifacts) == 1


def test_attributes_that_are_read_by_computed_names_are_watched():
    reader = Reader()
    compiled = aotdist.compile(lambda x: x * getattr(reader, "fac" + "tor"), backend="fx")
    assert torch.equal(compiled(torch.ones(1)), torch.full((1,), 1.5))
    reader.factor = 3.0
    assert torch.equal(compiled(torch.ones(1)), torch.full((1,), 3.0))


def test_a_dictionary_that_grows_is_noticed():
    table = {"a": 1.0}
    compiled = aotdist.compile(lambda x: x * sum(table.values()), backend="fx")
    compiled(torch.ones(1))
    table["b"] = 2.0
    assert torch.equal(compiled(torch.ones(1)), torch.full((1,), 3.0))


def test_a_list_that_shrinks_is_noticed():
    weights = [torch.ones(1), torch.ones(1)]
    compiled = aotdist.compile(lambda x: x * sum(weights), backend="fx")
    assert torch.equal(compiled(torch.ones(1)), torch.full((1,), 2.0))
    weights.pop()
    assert torch.equal(compiled(torch.ones(1)), torch.ones(1))


def test_a_tensor_that_becomes_a_number_is_noticed():
    table = {"scale": torch.full((1,), 2.0)}
    compiled = aotdist.compile(lambda x: x * table["scale"], backend="fx")
    compiled(torch.ones(1))
    table["scale"] = 3.0
    assert torch.equal(compiled(torch.ones(1)), torch.full((1,), 3.0))
    table["scale"] = None
    with pytest.raises(TypeError):
        compiled(torch.ones(1))


def test_modules_in_plain_containers_are_found():
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    compiled = aotdist.compile(lambda x: layers[1](layers[0](x)), backend="fx")
    compiled(torch.ones(1, 3)).sum().backward()
    assert all(layer.weight.grad is not None for layer in layers)
    (artifact,) = compiled.artifacts
    assert {slot.path for slot in artifact.fit.slots} >= {"layers[0].weight", "layers[1].bias"}


class Doubles:
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Triples:
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


PAIRS: dict[str, tuple[Any, Any, Callable[[torch.Tensor, Any], torch.Tensor]]] = {
    "functions": (lambda x: x * 2, lambda x: x * 3, lambda x, act: act(x)),
    "functions of PyTorch's": (torch.sin, torch.cos, lambda x, act: act(x)),
    "tensors": (torch.tensor(2.0), torch.tensor(3.0), lambda x, scale: x * scale),
    "lists": ([2.0], [3.0], lambda x, scales: x * scales[0]),
    "objects": (types.SimpleNamespace(scale=2.0), types.SimpleNamespace(scale=3.0), lambda x, o: x * o.scale),
    "modules": (nn.Tanh(), nn.ReLU(), lambda x, layer: layer(x)),
    "operators": (torch.ops.aten.sin.default, torch.ops.aten.cos.default, lambda x, act: act(x)),
    "objects of other classes": (Doubles(), Triples(), lambda x, layer: layer.act(x)),
    "classes": (Doubles, Triples, lambda x, cls: cls().act(x)),
    "classes of PyTorch's": (nn.Tanh, nn.ReLU, lambda x, cls: cls()(x)),
    "without attributes": (torch.finfo(torch.half), torch.finfo(torch.float), lambda x, kind: x * kind.eps),
    "what calls a method": (operator.methodcaller("sin"), operator.methodcaller("cos"), lambda x, f: f(x)),
}
"""Two values of a kind, and how they are used."""


@pytest.mark.parametrize("of_module", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_an_object_in_two_places_may_be_replaced_in_one(name: str, of_module: bool) -> None:
    one, other, use = PAIRS[name]
    holder = nn.Module() if of_module else types.SimpleNamespace()
    holder.a = holder.b = one

    def program(x: torch.Tensor) -> torch.Tensor:
        return use(x, holder.a) + 10 * use(x, holder.b)

    compiled, x = aotdist.compile(program, backend="fx"), torch.ones(3)
    for a, b in ((one, one), (one, other), (other, one), (other, other)):
        holder.a, holder.b = a, b
        assert torch.equal(compiled(x), program(x))
    assert len(compiled.artifacts) <= 4


def test_a_class_may_be_defined_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = aotdist.compile(lambda x: Doubles().act(x), backend="fx")
    assert torch.equal(compiled(torch.ones(1)), torch.full((1,), 2.0))
    monkeypatch.setitem(globals(), "Doubles", Triples)
    assert torch.equal(compiled(torch.ones(1)), torch.full((1,), 3.0))


@pytest.mark.filterwarnings("ignore:aotdist. the program reads the time")
def test_what_the_program_replaces_at_each_call_is_no_news() -> None:
    holder = types.SimpleNamespace(begun=datetime.datetime.now())

    def program(x: torch.Tensor) -> torch.Tensor:
        holder.before, holder.begun = holder.begun, datetime.datetime.now()
        return x * 2

    compiled = aotdist.compile(program, backend="fx")
    for _ in range(3):
        compiled(torch.ones(1))
    assert len(compiled.artifacts) == 1


def test_a_tensor_that_stays_in_two_places_is_no_news() -> None:
    holder = nn.Module()
    holder.last = holder.best = torch.zeros(3)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + holder.last * 2 + holder.best
        holder.last = holder.best = y.detach()
        return y

    compiled, y = aotdist.compile(program, backend="fx"), torch.zeros(3)
    for _ in range(4):
        assert torch.equal(compiled(torch.ones(3)), y := 1 + 3 * y)
    assert len(compiled.artifacts) == 1


class ByLayer(types.SimpleNamespace):
    """As transformers' configs whose layers differ in some numbers."""

    def __getattribute__(self, name):
        if name == "heads":
            raise RuntimeError("it is another number in each layer")
        return super().__getattribute__(name)


class Library(nn.Module):
    """Stands for an installed model: what its forward reads is not looked up."""

    def __init__(self):
        super().__init__()
        self.config = ByLayer(scale=2.0, heads=4)

    def forward(self, x):
        return x * self.config.scale


def test_the_settings_of_an_installed_model_are_watched(monkeypatch):
    monkeypatch.setattr(Library, "__module__", "transformers.models.llama")
    model = aotdist.compile(Library(), backend="fx")
    assert torch.equal(model(torch.ones(1)), torch.full((1,), 2.0))
    model.config.scale = 3.0
    assert torch.equal(model(torch.ones(1)), torch.full((1,), 3.0))


def test_a_place_in_a_class_is_one_place() -> None:
    """`cls.__dict__` is another object at each read."""
    place = Source("Settings", surroundings.Settings).attribute("__dict__")
    first = place.spot()
    others = [vars(int) for _ in range(100)]
    assert place.spot() == first, others
