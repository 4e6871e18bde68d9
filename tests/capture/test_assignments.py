"""Assignments that the program makes: repeated at every call, wherever they go; undone when capture fails."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import Scene, same_as_eager

TOTAL = torch.zeros(3)
LAST = None
NUMBERS = list[int]


class Stateful(nn.Module):
    """A module of which each test replaces the step."""

    def __init__(self, step: Callable[[Any, torch.Tensor], Any]):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.other = nn.Parameter(torch.ones(3) * 2)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("optional", None)
        self.cache = [torch.zeros(3), torch.zeros(3)]
        self.table = {"a": torch.zeros(3), "n": 1}
        self.state = types.SimpleNamespace(hidden=torch.zeros(3))
        self.step = step

    def forward(self, x):
        self.step(self, x)
        return x * self.weight


def held(model: Stateful) -> dict[str, Any]:
    return {"cache": model.cache, "table": model.table, "state": vars(model.state)}


def assign(model: Any, name: str, value: Any) -> None:
    setattr(model, name, value)


def _exchange(model: Any, x: torch.Tensor) -> None:
    model.state.hidden, model.table["a"] = model.table["a"] + x, model.state.hidden
    model.cache[0], model.state.hidden = model.state.hidden, model.cache[0]


STEPS = {
    "a buffer": lambda m, x: assign(m, "steps", m.steps + 1),
    "a buffer that was None": lambda m, x: assign(m, "optional", x * 2),
    "an attribute that did not exist": lambda m, x: assign(m, "last", x * 2),
    "an attribute, with history": lambda m, x: assign(m, "last", x * m.weight),
    "an attribute, with an input": lambda m, x: assign(m, "last", x),
    "an attribute, with a view of an input": lambda m, x: assign(m, "last", x[1:]),
    "an attribute, with a tuple": lambda m, x: assign(m, "last", (x * 2, {"x": x, "n": 3})),
    "two names for one tensor": lambda m, x: (assign(m, "last", x * 2), assign(m, "also", m.last)),
    "an attribute, in a program with a generic alias": lambda m, x: assign(m, "last", NUMBERS([1]) and x * 2),
    "an item of a list": lambda m, x: m.cache.__setitem__(0, m.cache[0] + x),
    "a list that is emptied and filled": lambda m, x: (m.cache.clear(), m.cache.append(x * m.weight)),
    "every item of a list": lambda m, x: m.cache.__setitem__(slice(None), [c + x for c in m.cache]),
    "an item of a dictionary": lambda m, x: m.table.__setitem__("a", m.table["a"] + x),
    "an attribute of an object": lambda m, x: assign(m.state, "hidden", m.state.hidden + x),
    "a parameter that takes the place of another": lambda m, x: assign(m, "weight", m.other),
    "a buffer twice": lambda m, x: (assign(m, "steps", m.steps + 1), assign(m, "steps", m.steps * 2)),
    "an attribute, with a tensor from elsewhere": lambda m, x: assign(m, "last", m.cache[0]),
    "an attribute, with a list of such": lambda m, x: assign(m, "last", [m.cache[0], m.table["n"]]),
    "two items of a list, exchanged": lambda m, x: m.cache.reverse(),
    "a list that moves up by one": lambda m, x: (m.cache.pop(0), m.cache.append(x * 2)),
    "two kinds of places, exchanged": lambda m, x: _exchange(m, x),
    "what is read back": lambda m, x: (assign(m, "last", x * 2), assign(m, "steps", m.last.sum())),
}


@pytest.mark.parametrize("name", STEPS)
def test_each_kind_of_place(name):
    def build():
        model = Stateful(STEPS[name])
        return Scene(model, (torch.randn(3),), held=held(model))

    compiled = same_as_eager(build, calls=3, compilations=None)
    # One more where the first call brings a place into being that the program then reads.
    assert len(compiled.artifacts) <= 2


@pytest.mark.parametrize("name", STEPS)
def test_each_kind_of_place_without_gradients(name):
    def build():
        model = Stateful(STEPS[name])
        return Scene(model, (torch.randn(3),), held=held(model))

    same_as_eager(build, calls=3, compilations=None, around=torch.no_grad)


@pytest.mark.parametrize("name", ["other", "shift"])
def test_parameters_made_inside_are_refused(name: str) -> None:
    model = Stateful(lambda m, x: assign(m, name, nn.Parameter(m.weight.detach() * x)))
    before = list(model.parameters())
    with pytest.raises(UnsupportedProgram, match="requires grad, and no input"):
        aotdist.compile(model, backend="fx")(torch.randn(3))
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in before]


def test_a_list_that_is_a_queue():
    """What was there, what is computed, and constants, in another order."""

    def step(model: Stateful, x: torch.Tensor) -> None:
        oldest = model.seen.pop(0)
        model.seen.insert(0, len(model.seen))
        if len(model.seen) < 5:
            model.seen.append(oldest)
        model.seen.append(x * model.weight.detach())

    models = [Stateful(step), Stateful(step)]
    for model in models:
        model.seen = [torch.zeros(3), torch.ones(3)]
    first = models[1].seen[0]
    aotdist.compile(models[1], backend="fx")
    for call in range(4):
        for model in models:
            model(torch.full((3,), call + 1.0)).sum().backward()
        assert str(models[0].seen) == str(models[1].seen)
        assert call or models[1].seen[2] is first


@pytest.mark.parametrize("empties", [False, True])
def test_a_list_that_grows(empties):
    """One that is emptied between calls (auxiliary losses) is one kind of call; any other is a new one."""

    def step(model: Stateful, x: torch.Tensor) -> None:
        model.seen.append(x * model.weight * len(model.seen))
        model.seen.append(len(model.seen))

    models = [Stateful(step), Stateful(step)]
    for model in models:
        model.seen = []
    aotdist.compile(models[1], backend="fx")
    for call in range(3):
        for model in models:
            model(torch.full((3,), call + 1.0)).sum().backward()
        theirs, ours = (model.seen for model in models)
        assert theirs[1::2] == ours[1::2] and all(map(torch.equal, theirs[::2], ours[::2]))
        for model in models if empties else ():
            model.seen.clear()
    assert len(compiled_call(models[1]).artifacts) == (1 if empties else 3)


def _exchange_objects(model: Any) -> torch.Tensor:
    model.state, model.spare = model.spare, model.state
    return model.state.hidden


def _exchange_lists(model: Any) -> torch.Tensor:
    model.cache, model.seen = model.seen, model.cache
    model.cache[0] = model.seen[0] + 1
    return model.cache[1]


def _exchange_modules(model: Any) -> torch.Tensor:
    model.first, model.second = model.second, model.first
    return model.first(torch.ones(3))


def _rotate(model: Any) -> torch.Tensor:
    model.states.append(model.states.pop(0))
    return model.states[0].hidden


def _take_turns(model: Any) -> torch.Tensor:
    model.active = model.spare if model.active is not model.spare else model.state
    return model.active.hidden


MOVES = {
    "objects": _exchange_objects,
    "lists": _exchange_lists,
    "modules": _exchange_modules,
    "objects in a list": _rotate,
    "one of two objects": _take_turns,
}


@pytest.mark.parametrize("name", MOVES)
def test_what_a_program_moves_is_found_where_it_was(name):
    """Objects stay themselves, and the call that moves them reads what it finds."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = Stateful(lambda m, x: None)
        model.spare, model.active = types.SimpleNamespace(hidden=torch.full((3,), 5.0)), None
        model.states = [types.SimpleNamespace(hidden=torch.full((3,), n)) for n in (6.0, 7.0, 8.0)]
        model.seen = [torch.full((3,), 9.0), torch.full((3,), 10.0)]
        model.first, model.second = nn.Linear(3, 3), nn.Linear(3, 3)
        model.step = lambda m, x: assign(m, "last", MOVES[name](m) * x)
        models.append(model)
    aotdist.compile(models[1], backend="fx")
    known = [[m.state, m.spare, m.cache, m.seen, m.first, m.second, *m.states] for m in models]
    for call in range(4):
        for model in models:
            model(torch.full((3,), call + 1.0))
        assert torch.equal(models[0].last, models[1].last), call
        now = [[m.state, m.spare, m.cache, m.seen, m.first, m.second, *m.states] for m in models]
        pairs = zip(known, now, strict=True)
        places = [[list(map(id, before)).index(id(one)) for one in after] for before, after in pairs]
        assert places[0] == places[1], call
        assert str(now[0]) == str(now[1]), call


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_are_counted(dynamic):
    def step(model: Stateful, x: torch.Tensor) -> None:
        model.rows = model.rows + x.shape[0]
        model.steps = model.steps + model.rows

    models = [Stateful(step), Stateful(step)]
    models[0].rows = models[1].rows = 0
    aotdist.compile(models[1], backend="fx", settings={"dynamic": dynamic})
    for call in range(4):
        for model in models:
            model(torch.ones(3 + call * dynamic, 3)).sum().backward()
        assert type(models[1].rows) is int
        assert models[0].rows == models[1].rows
        assert torch.equal(models[0].steps, models[1].steps)
    assert len(compiled_call(models[1]).artifacts) == 1


class Counting:
    """What holds the places of the next test: an object in an object, with a list and a dictionary."""

    def __init__(self) -> None:
        self.steps, self.hidden = 0, torch.zeros(3)
        self.seen: list[Any] = []
        self.table = {"n": 0, "last": torch.zeros(3)}


def counts_in_what_it_finds(holder: Any, x: torch.Tensor) -> torch.Tensor:
    holder.state.steps += 1
    holder.state.hidden = holder.state.hidden + x
    holder.state.seen.append(x * 2)
    holder.state.table["n"] += 2
    holder.state.table["last"] = x * holder.state.table["n"]
    return x * holder.state.steps


def in_a_module() -> tuple[Any, Callable[..., Any]]:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = Counting()

        forward = counts_in_what_it_finds

    module = Holding()
    return module, module


def in_a_closure() -> tuple[Any, Callable[..., Any]]:
    holder = types.SimpleNamespace(state=Counting())
    return holder, lambda x: counts_in_what_it_finds(holder, x)


def in_an_object_of_a_list() -> tuple[Any, Callable[..., Any]]:
    holders = [types.SimpleNamespace(state=Counting())]
    return holders[0], lambda x: counts_in_what_it_finds(holders[0], x)


@pytest.mark.parametrize("build", [in_a_module, in_a_closure, in_an_object_of_a_list])
def test_what_holds_a_place_may_be_replaced_between_calls(build):
    """Each call assigns where it finds the object, the list, the dictionary: not in those of the capture."""
    (theirs, eager), (ours, function) = build(), build()
    function = aotdist.compile(function, backend="fx")
    kept: list[list[Counting]] = [[theirs.state], [ours.state]]
    for call in range(8):
        x = torch.full((3,), call + 1.0)
        assert torch.equal(eager(x), function(x))
        for holder, states in zip((theirs, ours), kept, strict=True):
            if call == 2:
                holder.state = Counting()
                states.append(holder.state)
            elif call == 4:
                holder.state.seen, holder.state.table = [], dict(holder.state.table)
            elif call == 5:
                holder.state = states[0]
        assert repr([vars(state) for state in kept[0]]) == repr([vars(state) for state in kept[1]])


def test_a_key_that_did_not_exist():
    def build():
        model = Stateful(lambda m, x: m.table.__setitem__("new", x * 2))
        return Scene(model, (torch.randn(3),), held=held(model))

    same_as_eager(build, calls=3, compilations=2)


def test_globals_and_cells():
    def accumulate(x):
        global TOTAL, LAST
        TOTAL, LAST = TOTAL + x, x * 2
        return x

    compiled = aotdist.compile(accumulate, backend="fx")
    try:
        for _ in range(3):
            compiled(torch.ones(3))
        assert torch.equal(TOTAL, torch.full((3,), 3.0)) and torch.equal(LAST, torch.full((3,), 2.0))
    finally:
        globals().update(TOTAL=torch.zeros(3), LAST=None)


def test_a_global_that_does_not_exist_yet():
    def program(x):
        global CREATED
        CREATED = x * 2
        return x

    compiled = aotdist.compile(program, backend="fx")
    try:
        compiled(torch.ones(3))
        assert torch.equal(globals()["CREATED"], torch.full((3,), 2.0))
        compiled(torch.zeros(3))
        assert torch.equal(globals()["CREATED"], torch.zeros(3))
    finally:
        globals().pop("CREATED", None)


def test_a_cell_that_is_still_empty():
    def build():
        def program(x):
            nonlocal last
            last = x * 2
            return x

        if build is None:
            last = None
        return program, lambda: last

    program, read = build()
    compiled = aotdist.compile(program, backend="fx")
    compiled(torch.ones(3))
    compiled(torch.zeros(3))
    assert torch.equal(read(), torch.zeros(3))


@dataclasses.dataclass
class Seen:
    """What a program notes of a call."""

    value: torch.Tensor | None
    count: int = 0


class NotesObjects(nn.Module):
    """Assigns and appends objects that it makes, reads those of the call before, and returns one of them."""

    def __init__(self, *, hidden: bool):
        super().__init__()
        self.linear, self.hidden = nn.Linear(3, 3), hidden
        self.last, self.all = Seen(torch.zeros(3)), []

    def forward(self, x):
        before = self.last.count if self.last.value is None else self.last.count + self.last.value
        y = self.linear(x) + before
        self.last = Seen(None if self.hidden else y.detach(), self.last.count + 1)
        self.all.append(self.last)
        self.pair = {"one": [self.last, Seen(x * 2)]}
        return y, self.last


@pytest.mark.parametrize("hidden", [False, True])
def test_objects_that_are_assigned_are_made_at_each_call(hidden):
    eager, ours = (NotesObjects(hidden=hidden) for _ in range(2))
    ours.load_state_dict(eager.state_dict())
    aotdist.compile(ours, backend="fx")
    for number in range(1, 5):
        x = torch.ones(3) * number
        (expected, _), (result, last) = eager(x), ours(x)
        assert torch.equal(result, expected)
        assert last is ours.last is ours.all[-1] is ours.pair["one"][0]
        assert str([eager.all, eager.pair]) == str([ours.all, ours.pair])
        assert len(set(map(id, ours.all))) == number


def test_a_recurrent_module():
    """It assigns itself the list of its own parameters."""

    def build():
        return Scene(nn.GRU(3, 4, batch_first=True), (torch.randn(2, 5, 3),))

    same_as_eager(build, calls=2, compilations=None)


REFUSED = {
    "a tensor that is deleted": (lambda m, x: m.table.pop("a"), "a tensor is taken out of `table.a`"),
    "a module that it makes": (
        lambda m, x: assign(m, "last", nn.Sequential(nn.Linear(3, 3))),
        "`last` is assigned a Sequential that holds tensors",
    ),
    "a set": (lambda m, x: assign(m, "last", {x * 2}), "`last` is assigned a set that holds tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_is_refused(name):
    step, message = REFUSED[name]
    model = Stateful(step)
    cache, attributes = list(model.cache), set(vars(model))
    aotdist.compile(model, backend="fx")
    with pytest.raises(UnsupportedProgram, match=message):
        model(torch.ones(3))
    assert len(model.cache) == len(cache) and all(a is b for a, b in zip(model.cache, cache, strict=True))
    assert set(vars(model)) - attributes <= {"_compiled_call_impl", "source", "graphs", "explain"}


@pytest.mark.parametrize("name", STEPS)
def test_assignments_are_undone_when_capture_fails(name):
    def step_and_fail(model, x):
        STEPS[name](model, x)
        raise KeyError("mine")

    model = Stateful(step_and_fail)
    before = {**vars(model), **model._parameters, **model._buffers, **held(model)}
    items = list(model.cache), dict(model.table), dict(vars(model.state))
    aotdist.compile(model, backend="fx")
    with pytest.raises(KeyError, match="mine"):
        model(torch.ones(3))
    after = {**vars(model), **model._parameters, **model._buffers, **held(model)}
    assert all(after[key] is value for key, value in before.items())
    assert not hasattr(model, "last") and not hasattr(model, "shift")
    after = list(model.cache), dict(model.table), dict(vars(model.state))
    assert str(after) == str(items)


class HookedWhenCalled(nn.Module):
    """Registers a hook at its first call, as transformers' models for `output_hidden_states=True`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.is_hooked = False

    def forward(self, x, mask):
        if not self.is_hooked:
            self.layer.register_forward_hook(lambda _module, _args, out: out * 2)
            self.is_hooked = True
        y = self.layer(x)
        return y[mask] if mask.dtype is torch.bool else y


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_hooks_of_a_trace_are_registered_once(dtype):
    """Sizes that depend on data take a second trace."""
    torch.manual_seed(0)
    model = HookedWhenCalled()
    twin = copy.deepcopy(model)
    compiled = aotdist.compile(model, backend="fx")
    for _ in range(3):
        x, mask = torch.randn(4, 3), torch.tensor([1, 0, 1, 1]).to(dtype)
        assert torch.equal(compiled(x, mask), twin(x, mask))
    assert len(model.layer._forward_hooks) == len(twin.layer._forward_hooks) == 1
    assert len(compiled_call(model).artifacts) == 1
