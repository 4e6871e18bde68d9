"""The law of the log of effects: what is undone is as before, what is replayed is as afterwards."""

from __future__ import annotations

import copy
import io
import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from aotdist.capture.assignments import Assignments
from aotdist.capture.effects import (
    Assign,
    Delete,
    Effect,
    EffectLog,
    Print,
    TensorResult,
    Tree,
    any_of,
)
from aotdist.capture.environment import Assignable, Reached
from aotdist.capture.source import ABSENT, Source
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.symbols import expression, new_count, new_float_of_data, shape_env


def state() -> dict[str, Any]:
    """What the changes change: a list, a dictionary inside of it, an object, a set and a deque."""
    holder = types.SimpleNamespace(flag=False, count=3, kept=None)
    return {
        "log": [1, 2],
        "options": {"a": 1, "b": [1]},
        "holder": holder,
        "seen": {1},
        "recent": deque([1, 2], maxlen=2),
        "n": 0,
    }


CHANGES: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "an item is assigned": lambda s: s.update(n=5),
    "an item is new": lambda s: s.update(new="here"),
    "an item is deleted": lambda s: s.pop("n") and None,
    "a list grows": lambda s: s["log"].extend([3, 4]),
    "a list gets shorter": lambda s: s["log"].clear(),
    "an item of a list": lambda s: s["log"].__setitem__(0, "x"),
    "a list in a dictionary": lambda s: s["options"]["b"].append(2),
    "a key of a dictionary": lambda s: s["options"].pop("a") and None,
    "attributes": lambda s: vars(s["holder"]).update(flag=True, count=4, made=[1, (2, 3)]),
    "an attribute is deleted": lambda s: delattr(s["holder"], "flag"),
    "several": lambda s: (s["log"].append(s["n"]), s["options"].update(a=2), s.update(n=1)) and None,
}
HAPPEN_ONCE: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "a set": lambda s: s["seen"].add(2),
    "a deque": lambda s: s["recent"].append(3),
}
"""Undone, and not replayed: their items have no places."""


def watch(held: dict[str, Any]) -> Assignments:
    root = Source("held", held)
    containers = [(root, held), *((root.item(name), held[name]) for name in ("log", "options"))]
    containers.append((root.item("options").item("b"), held["options"]["b"]))
    assignable = Assignable(
        owners=[(root.item("holder"), held["holder"])],
        containers=containers,
        wholes=[(root.item("seen"), held["seen"]), (root.item("recent"), held["recent"])],
    )
    return Assignments({}, Reached(assignable=assignable), ())


def moved(place: Source, held: dict[str, Any]) -> Source:
    """The same place, in another state."""
    steps = place.steps
    if place.root is not held and not isinstance(place.root, dict):
        return Source(place.path, held, (*place.root.source.steps, *steps))
    return Source(place.path, held, steps)


def comparable(held: dict[str, Any]) -> Any:
    return {name: vars(value) if name == "holder" else value for name, value in held.items()}


@pytest.mark.parametrize("name", [*CHANGES, *HAPPEN_ONCE])
def test_undone_is_as_before(name: str) -> None:
    held = state()
    watched, inner = watch(held), {key: id(value) for key, value in held.items()}
    {**CHANGES, **HAPPEN_ONCE}[name](held)
    assert comparable(held) != comparable(state())
    watched.roll_back()
    assert comparable(held) == comparable(state())
    assert {key: id(value) for key, value in held.items()} == inner


@pytest.mark.parametrize("name", CHANGES)
def test_replayed_on_a_fresh_state_is_as_afterwards(name: str) -> None:
    held, fresh = state(), state()
    watched = watch(held)
    CHANGES[name](held)
    after = copy.deepcopy(comparable(held))
    assigned, deleted = watched.collect_constants()
    assert comparable(held) == comparable(state())
    effects: list[Effect] = [Assign(moved(place, fresh), Tree.of(value)) for place, value in assigned]
    effects += [Delete(moved(place, fresh)) for place in deleted]
    log = EffectLog(tuple(effects))
    with log.undone():
        log.replay((), {})
        assert comparable(fresh) == after
    assert comparable(fresh) == comparable(state())
    log.replay((), {})
    assert comparable(fresh) == after


def test_results_stand_where_they_are_computed() -> None:
    held: dict[str, Any] = {"log": [], "kept": None, "norm": 0.0, "count": 1}
    root, out = Source("held", held), io.StringIO()
    env = shape_env(of_data=lambda: False)
    read, count = new_float_of_data(env, max, ()), new_count(env, 7, "count")
    number = read / count
    log = EffectLog(
        (
            Print(out, Tree.of((("norm", number), {}))),
            Assign(root.item("log").items_from(0), Tree.of([{"grad": TensorResult(0)}, number])),
            Assign(root.item("kept"), Tree.of(TensorResult(0))),
            Assign(root.item("count"), Tree.of(count + 2)),
        ),
        numbers=((expression(read), 1), (expression(count), root.item("count"))),
    )
    for k in (1.0, 2.0):
        grad = torch.full((2,), k)
        log.replay((grad, torch.tensor(6.0)), {})
        assert held["kept"] is grad
        assert held["log"][-2]["grad"] is grad
    assert [each for each in held["log"] if isinstance(each, float)] == [6.0, 2.0]
    assert held["count"] == 5
    assert out.getvalue() == "norm 6.0\nnorm 2.0\n"


def test_tensors_are_read_back_from_where_they_were_left() -> None:
    held: dict[str, Any] = {"log": ["earlier"], "kept": None}
    root, recipe = Source("held", held), object()
    log = EffectLog(
        (
            Assign(root.item("log").items_from(1), Tree.of(["grad", TensorResult(1)])),
            Assign(root.item("kept"), Tree.of((TensorResult(0), "beside"))),
        ),
        kept=(recipe, recipe),  # pyright: ignore[reportArgumentType]
    )
    first, second = torch.ones(1), torch.zeros(1)
    with log.undone():
        log.replay((first, second), {})
        assert [id(each) for each in log.tensors_left(())] == [id(first), id(second)]
    assert held == {"log": ["earlier"], "kept": None}


@pytest.mark.parametrize(
    ("known", "fits", "differs"),
    [
        (1, 1, 2),
        (None, None, torch.ones(1)),
        (ABSENT, ABSENT, None),
        (torch.ones(1), torch.zeros(2), None),
        ([torch.ones(1), "x"], [torch.zeros(3), "x"], ["x"]),
        (new_float_of_data(shape_env(of_data=lambda: False), max, ()), 0.5, "0.5"),
    ],
)
def test_what_is_expected_is_found_or_nothing_is_done(known: Any, fits: Any, differs: Any) -> None:
    held: dict[str, Any] = {"n": 0}
    place = Source("held", held).item("found", "held.found")
    log = EffectLog((Assign(Source("held", held).item("n"), Tree.of(1)),), ((place, any_of((known,))),))
    for value, count in ((fits, 1), (differs, 1)):
        held.pop("found", None)
        held.update({} if value is ABSENT else {"found": value})
        if value is fits:
            log.replay((), {})
        else:
            with pytest.raises(UnsupportedProgram, match="`held.found`, and finds .* where its forward left"):
                log.replay((), {})
        assert held["n"] == count
