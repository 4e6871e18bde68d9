"""Objects, modules and functions among the arguments."""

from __future__ import annotations

import dataclasses
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import UnsupportedProgram


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0
    name: str = "first"


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class Written:
    x: torch.Tensor
    count: int = 0


class Fields(dict[str, torch.Tensor]):
    note: str


class Items(list[torch.Tensor]):
    factor: float


class Layer:
    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys

    def update(self, keys: torch.Tensor) -> None:
        self.keys = torch.cat([self.keys, keys])


class Cache:
    """Grows as that of a language model does."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.last: Layer | None = None
        self.owner = self

    def update(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        if layer < len(self.layers):
            self.layers[layer].update(keys)
        else:
            self.layers.append(Layer(keys * 1))
        self.last = self.layers[layer]
        return self.layers[layer].keys


def seen(value: Any, met: dict[int, int] | None = None) -> Any:
    """What there is to see of a value: contents, classes, which objects are one."""
    met = {} if met is None else met
    match value:
        case torch.Tensor():
            return value.tolist(), value.dtype, value.requires_grad, value._version
        case None | bool() | int() | float() | str() | type() | types.FunctionType():
            return value
        case _ if id(value) in met:
            return "met", met[id(value)]
    met[id(value)] = len(met)
    slots = getattr(type(value), "__slots__", ())
    held = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}
    items = (
        dict(value) if isinstance(value, dict) else list(value) if isinstance(value, (list, tuple)) else ()
    )
    pairs = items.items() if isinstance(items, dict) else enumerate(items)
    return (
        type(value),
        {name: seen(part, met) for name, part in held.items()},
        {key: seen(part, met) for key, part in pairs},
    )


def is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def fields() -> Fields:
    made = Fields(a=torch.ones(3), b=torch.arange(3.0))
    made.note = "n"
    return made


def items() -> Items:
    made = Items([torch.ones(3)])
    made.factor = 3.0
    return made


def cache_step(cache: Cache, x: torch.Tensor) -> Any:
    a, b = cache.update(x, 0), cache.update(x * 2, 1)
    return a.sum() + b.sum(), cache


def fields_step(given: Fields, x: torch.Tensor) -> Any:
    given["c"] = given["a"] * x
    given.note = "written"
    del given["b"]
    return given["c"]


def items_step(given: Items, x: torch.Tensor) -> Any:
    given.append(given[0] * given.factor + x)
    given[0].add_(1)
    return given


def written_step(given: Written, x: torch.Tensor) -> Any:
    given.x = given.x + x
    given.count = 5
    return given.x


def namespace_step(given: types.SimpleNamespace, x: torch.Tensor) -> Any:
    given.inner.total = given.inner.total + x.sum()
    given.new = types.SimpleNamespace(value=x * 3, name="new")
    given.twice = [given.inner, x + 1]
    return given.inner


def replaced_step(given: Batch, x: torch.Tensor) -> Any:
    return dataclasses.replace(given, x=given.x * x * given.scale, name="second")


def namespace() -> types.SimpleNamespace:
    return types.SimpleNamespace(inner=types.SimpleNamespace(total=torch.zeros(())), flag=True)


PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "dataclass": (lambda: Batch(torch.ones(3)), replaced_step),
    "slots": (lambda: Slotted(torch.ones(3)), lambda given, x: given.x * x * given.scale),
    "slots written": (lambda: Written(torch.ones(3)), written_step),
    "dictionary": (fields, fields_step),
    "list": (items, items_step),
    "cache": (Cache, cache_step),
    "namespace": (namespace, namespace_step),
    "in containers": (
        lambda: {"a": [Batch(torch.ones(3))], "b": (Slotted(torch.ones(3)),)},
        lambda given, x: (given["a"][0].x + given["b"][0].x * x, given["a"][0]),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name: str) -> None:
    make, step = PROGRAMS[name]
    compiled = aotdist.compile(step, backend="fx")
    mine, theirs, x = make(), make(), torch.arange(3.0)
    for call in range(3):
        if name in ("dictionary",) and call:
            break
        ours, eagers = compiled(mine, x), step(theirs, x)
        assert seen([mine, ours]) == seen([theirs, eagers])


def test_what_is_returned_is_the_object_that_was_given() -> None:
    compiled = aotdist.compile(lambda batch: batch, backend="fx")
    for batch in (Batch(torch.ones(2)), Batch(torch.zeros(2))):
        assert compiled(batch) is batch


def test_one_artifact_fits_objects_that_hold_the_same() -> None:
    compiled = aotdist.compile(lambda batch: batch.x * batch.scale, backend="fx")
    for value in range(3):
        assert compiled(Batch(torch.full((2,), float(value)))).tolist() == [2.0 * value] * 2
    assert len(compiled_call(compiled).artifacts) == 1
    assert compiled(Batch(torch.ones(2), scale=3.0)).tolist() == [3.0, 3.0]
    assert compiled(Batch(torch.ones(3))).tolist() == [2.0, 2.0, 2.0]
    assert compiled(Slotted(torch.ones(2))).tolist() == [2.0, 2.0]
    assert len(compiled_call(compiled).artifacts) == 4


def test_one_object_twice_is_one_object() -> None:
    def step(a: Batch, b: Batch) -> Any:
        a.x = a.x + 1
        return b.x * 2, a is b

    compiled = aotdist.compile(step, backend="fx")
    batch, other = Batch(torch.ones(2)), Batch(torch.ones(2))
    assert seen(compiled(batch, batch)) == seen((torch.full((2,), 4.0), True))
    assert seen(compiled(batch, other)) == seen((torch.full((2,), 2.0), False))


def test_gradients_arrive_on_tensors_in_objects() -> None:
    compiled = aotdist.compile(lambda batch, x: (batch.x * x).sum(), backend="fx")
    batch = Batch(torch.ones(3, requires_grad=True))
    compiled(batch, torch.arange(3.0)).backward()
    assert batch.x.grad is not None
    assert batch.x.grad.tolist() == [0.0, 1.0, 2.0]


def test_an_object_that_is_assigned_elsewhere_is_the_callers() -> None:
    holder = types.SimpleNamespace(last=None, all=None)

    def step(batch: Batch) -> torch.Tensor:
        holder.last, holder.all = batch, [batch]
        return batch.x + 1

    compiled = aotdist.compile(step, backend="fx")
    for _ in range(2):
        compiled(batch := Batch(torch.ones(2)))
        assert holder.last is batch
        assert holder.all is not None
        assert holder.all[0] is batch


def test_what_is_no_data_may_hang_on_an_object() -> None:
    batch: Any = Batch(torch.ones(2))
    batch.lock, batch.seen, batch.lines = threading.Lock(), {1}, iter(["a"])
    assert aotdist.compile(lambda b: b.x * 2 if b.lock is not None else b.x)(batch).tolist() == [2.0, 2.0]
    for reads in (
        lambda b: b.x * 2 if 1 in b.seen else b.x,
        lambda b: b.x * 2 if isinstance(b.lines, Iterator) else b.x,
        lambda b: b.x * len(b.seen),
    ):
        with pytest.raises(UnsupportedProgram, match=r"`args\[0\]\.(seen|lines)` is a .* reads it"):
            aotdist.compile(reads)(batch)


def test_an_object_that_is_found_elsewhere_too_is_refused() -> None:
    batch = Batch(torch.ones(2))
    with pytest.raises(UnsupportedProgram, match="also finds in `batch`") as raised:
        aotdist.compile(lambda given: given.x + batch.x)(batch)
    assert "not both" in str(raised.value)


def test_an_object_that_is_made_is_one_object_in_all_its_places() -> None:
    def step(cache: Cache, x: torch.Tensor) -> Any:
        layer = Layer(x * 2)
        cache.last, cache.layers = layer, [layer, Layer(x)]
        return [layer], types.SimpleNamespace(layer=layer, keys=layer.keys)

    compiled = aotdist.compile(step, backend="fx")
    mine, theirs = Cache(), Cache()
    for value in range(3):
        x = torch.full((2,), float(value))
        ours = mine, compiled(mine, x)
        assert seen(ours) == seen((theirs, step(theirs, x)))


def test_an_object_that_is_made_with_itself_inside_is_refused_and_nothing_has_happened() -> None:
    def step(cache: Cache, x: torch.Tensor) -> torch.Tensor:
        cache.last = Layer(x * 2)
        cache.last.itself = cache.last
        return x

    cache = Cache()
    with pytest.raises(UnsupportedProgram, match="itself among them"):
        aotdist.compile(step)(cache, torch.ones(2))
    assert cache.last is None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.linear(x) * (2 if self.training else 1)


def test_a_module_is_given() -> None:
    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch.x).square().sum() * batch.scale

    compiled = aotdist.compile(loss_of, backend="fx")
    batch = Batch(torch.randn(2, 3))
    models = [Scaled(), Scaled()]
    for model, training in ((models[0], True), (models[1], True), (models[0], False), (models[0], True)):
        model.train(training)
        expected = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        model.zero_grad()
        compiled(model, batch).backward()
        for param, grad in zip(model.parameters(), expected, strict=True):
            assert param.grad is not None
            assert torch.equal(param.grad, grad)
        assert model.steps % 2 == 0
    assert len(compiled_call(compiled).artifacts) == 3


def test_functions_and_methods_are_given() -> None:
    model = Scaled()
    compiled = aotdist.compile(lambda fn, x: fn(x) + 1, backend="fx")
    x = torch.randn(2, 3)
    for fn in (torch.relu, model.forward, model.forward, nn.functional.gelu, torch.relu):
        assert torch.equal(compiled(fn, x), fn(x) + 1)
    assert len(compiled_call(compiled).artifacts) == 3


def test_what_a_function_that_is_given_reads_counts() -> None:
    scale = types.SimpleNamespace(factor=2.0)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scale.factor

    compiled = aotdist.compile(lambda fn, x: fn(x), backend="fx")
    assert compiled(scaled, torch.ones(1)).item() == 2.0
    scale.factor = 5.0
    assert compiled(scaled, torch.ones(1)).item() == 5.0


def test_methods_of_an_object_read_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(Batch):
        def value(self) -> torch.Tensor:
            return self.x * FACTORS["now"]

    compiled = aotdist.compile(lambda batch: batch.value(), backend="fx")
    assert compiled(Reads(torch.ones(1))).item() == 2.0
    monkeypatch.setitem(FACTORS, "now", 7.0)
    assert compiled(Reads(torch.ones(1))).item() == 7.0


FACTORS = {"now": 2.0}


@pytest.mark.parametrize(
    "value",
    [iter([1]), {1}, threading.Lock(), torch.utils.data.DataLoader([1])],
    ids=lambda v: type(v).__name__,
)
def test_what_is_neither_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UnsupportedProgram, match=r"`args\[0\]` is a .*, neither a tensor nor a constant"):
        aotdist.compile(lambda given: torch.ones(1))(value)


def test_symbolic_sizes() -> None:
    compiled = aotdist.compile(cache_step, backend="fx", settings={"dynamic": True})
    mine, theirs = Cache(), Cache()
    for length in (2, 3, 5, 4):
        x = torch.arange(float(length))
        assert seen(compiled(mine, x)) == seen(cache_step(theirs, x))
    assert len(compiled_call(compiled).artifacts) <= 3


@dataclasses.dataclass
class Progress:
    hidden: torch.Tensor
    steps: int = 0
    seen: dict[str, int] = dataclasses.field(default_factory=lambda: {"rows": 0})
    log: list[Any] = dataclasses.field(default_factory=list)


def progress(state: Progress, x: torch.Tensor) -> torch.Tensor:
    state.steps += 1
    state.seen["rows"] += x.shape[0]
    state.hidden = state.hidden + x.sum() * state.steps
    return x + state.seen["rows"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_that_are_counted_in_are_compiled_once(dynamic: bool) -> None:
    compiled = aotdist.compile(progress, backend="fx", settings={"dynamic": dynamic})
    mine, theirs = Progress(torch.zeros(())), Progress(torch.zeros(()))
    for call in range(5):
        x = torch.linspace(1, 2, 3 + call * dynamic)
        assert seen(compiled(mine, x)) == seen(progress(theirs, x))
        assert repr(mine) == repr(theirs)
    assert len(compiled_call(compiled).artifacts) == 1


def test_so_are_those_in_dictionaries_and_lists_that_are_given() -> None:
    def step(state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        state["n"] += 2
        state["more"][0] = state["more"][0] * 2 + 1
        return x * state["n"] + state["more"][0]

    compiled = aotdist.compile(step, backend="fx")
    mine, theirs = ({"n": 0, "more": [1, "text"]} for _ in range(2))
    for _ in range(5):
        x = torch.randn(3)
        assert torch.equal(compiled(mine, x), step(theirs, x))
        assert mine == theirs
    assert len(compiled_call(compiled).artifacts) == 1
    mine["n"] = 0.5  # type: ignore[assignment]
    assert torch.equal(compiled(mine, x), step({**theirs, "n": 0.5, "more": [*theirs["more"]]}, x))


def test_a_number_that_decides_is_part_of_the_signature() -> None:
    def step(state: Progress, x: torch.Tensor) -> torch.Tensor:
        state.steps += 1
        return x * 2 if state.steps < 3 else -x

    compiled = aotdist.compile(step, backend="fx")
    mine, theirs = Progress(torch.zeros(())), Progress(torch.zeros(()))
    for _ in range(5):
        assert seen(compiled(mine, torch.ones(2))) == seen(step(theirs, torch.ones(2)))
    assert mine.steps == 5


def counts(state: Progress, grad: torch.Tensor) -> None:
    state.steps += 1


def keeps(state: Progress, grad: torch.Tensor) -> None:
    state.hidden = grad


def logs(state: Progress, grad: torch.Tensor) -> None:
    state.log.append(grad.norm())


def looks_up(state: Progress, grad: torch.Tensor) -> None:
    state.seen.setdefault("gradients", 1)


@pytest.mark.parametrize("hook", [counts, keeps, logs, looks_up])
def test_a_backward_that_changes_what_is_given_is_refused(
    hook: Callable[[Progress, torch.Tensor], None],
) -> None:
    def step(state: Progress, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda grad: hook(state, grad))
        return y.sum()

    state = Progress(torch.zeros(2))
    with pytest.raises(UnsupportedProgram, match=r"changes `state.*`, which the call is given"):
        aotdist.compile(step, backend="fx")(state=state, x=torch.ones(2, requires_grad=True))
    assert repr(state) == repr(Progress(torch.zeros(2)))
