"""What a program reads of the user's objects where no attribute is named: by operators, built-in functions,
statements and library containers. A call that finds another value there is eager's, too."""

from __future__ import annotations

import array
import collections
import enum
import operator
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.capture.constants import same_constant

X = torch.ones(2)
SCALE = 2.0


class Setting:
    """Reads `k` by every way that does not name it."""

    def __init__(self) -> None:
        self.k = 2.0

    def __getitem__(self, key: Any) -> float:
        return self.k

    def __len__(self) -> int:
        return int(self.k)

    def __bool__(self) -> bool:
        return self.k > 3

    def __float__(self) -> float:
        return float(self.k)

    def __index__(self) -> int:
        return int(self.k)

    def __rmul__(self, other: Any) -> Any:
        return other * self.k

    def __neg__(self) -> float:
        return -self.k

    def __iter__(self) -> Iterator[float]:
        yield self.k

    def __contains__(self, value: float) -> bool:
        return value == self.k

    def __eq__(self, other: object) -> bool:
        return self.k == other

    __hash__ = object.__hash__

    def __lt__(self, other: float) -> bool:
        return self.k < other

    def __enter__(self) -> float:
        return self.k

    def __exit__(self, *_: Any) -> None:
        return None

    def __getattr__(self, name: str) -> float:
        if name == "computed":
            return self.__dict__["k"]
        raise AttributeError(name)


def entered(x: torch.Tensor, setting: Setting) -> torch.Tensor:
    with setting as k:
        return x * k


READS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "__getitem__": lambda x, s: x * s[0],
    "__len__": lambda x, s: x * len(s),
    "__bool__": lambda x, s: x * 2 if s else x * 7,
    "__float__": lambda x, s: x * float(s),
    "__index__": lambda x, s: x * operator.index(s),
    "__rmul__": lambda x, s: x * (1.0 * s),
    "__neg__": lambda x, s: x * -s,
    "__iter__": lambda x, s: x * sum(s),
    "__contains__": lambda x, s: x * (3 if 5.0 in s else 4),
    "__eq__": lambda x, s: x * (3 if s == 5.0 else 4),
    "__lt__": lambda x, s: x * (3 if s < 4 else 4),
    "with": entered,
    "__getattr__": lambda x, s: x * s.computed,
    "attrgetter": lambda x, s: x * operator.attrgetter("k")(s),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_special_methods_of_what_is_closed_over(read):
    setting = Setting()

    def program(x):
        return read(x, setting)

    compiled = aotdist.compile(program, backend="fx")
    for k in (2.0, 5.0, 2.0):
        setting.k = k
        assert torch.equal(compiled(X), program(X))


class Stack(nn.Module):
    """A container of the user's: its length, items and delegated attributes follow from a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [2.0, 3.0]

    def __len__(self) -> int:
        return len(self.scales)

    def __getitem__(self, position: int) -> float:
        return self.scales[position]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(self[k] for k in range(len(self)))


def test_special_methods_of_a_module():
    model = Stack()
    aotdist.compile(model, backend="fx")
    assert torch.equal(model(X), X * 5)
    model.scales = [1.0, 1.0, 7.0]
    assert torch.equal(model(X), X * 9)


class Doubled(dict[str, Any]):
    """Gives other items than it keeps."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key) * 2


class DoubledList(list[Any]):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) * 2


class Instances(collections.OrderedDict[str, Any]):
    """Gives a new object at each look, as transformers' activations do."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Kept(nn.Module):
    """Reads, writes and deletes items of containers that get them by methods of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Doubled(scale=torch.ones(2), power=2, steps=0)
        self.items = DoubledList([torch.ones(2), 3])
        self.activations = Instances(relu=nn.ReLU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (
            self.activations["relu"](x) * self.table["scale"] ** self.table["power"]
            + self.items[0] * self.items[1]
        )
        self.table["scale"], self.items[0] = self.table["scale"] + x, x * 3
        self.table["steps"] = self.table.get("steps") + 1
        self.table.pop("once", None)
        return y


def test_items_that_a_container_keeps_and_gives_otherwise():
    eager, model = Kept(), Kept()
    aotdist.compile(model, backend="fx")
    for step in range(5):
        if step == 2:
            for each in (eager, model):
                each.table["scale"], each.table["once"] = torch.ones(2), 1
        assert torch.equal(model(X * step), eager(X * step))
        assert str(model.table) == str(eager.table) and str(model.items) == str(eager.items)


@dataclass
class Log:
    """Generated methods compare fields: they are not what a program reads."""

    steps: int = 0
    scale: float = 2.0
    seen: list[int] = field(default_factory=list)


def test_generated_methods_add_nothing_to_a_signature():
    log = Log()
    compiled = aotdist.compile(lambda x: x * log.scale, backend="fx")
    for _ in range(3):
        log.steps += 1
        compiled(X)
    assert len(compiled.artifacts) == 1
    log.scale = 4.0
    assert torch.equal(compiled(X), X * 4)


class Computed:
    """A descriptor of the user's."""

    k = 2.0

    def __get__(self, instance: Any, owner: type | None = None) -> float:
        return self.k


class Counting(type):
    quota = 2.0


class Described(metaclass=Counting):
    computed = Computed()


class Made:
    """Reads a global where it is made."""

    def __init__(self, x: torch.Tensor) -> None:
        self.scaled = x * SCALE


def changed_global(value: float) -> None:
    globals()["SCALE"] = value


@pytest.fixture(autouse=True)
def as_they_were() -> Iterator[None]:
    yield
    changed_global(2.0)
    Computed.k = Counting.quota = 2.0


ORDERED = collections.OrderedDict(a=2.0)
DICTIONARY = collections.UserDict(a=2.0)
LIST = collections.UserList([2.0])
CHAIN = collections.ChainMap({"a": 2.0})
BENEATH = {"a": 2.0}
PROXY = types.MappingProxyType(BENEATH)
BYTES = bytearray(b"\x02")
NUMBERS = array.array("d", [2.0])
ELSEWHERE: dict[str, tuple[Callable[[], float], Callable[[float], None]]] = {
    "a descriptor": (lambda: Described().computed, lambda value: setattr(Computed, "k", value)),
    "a metaclass": (lambda: Described.quota, lambda value: setattr(Counting, "quota", value)),
    "globals()": (lambda: globals()["SCALE"], changed_global),
    "OrderedDict": (lambda: ORDERED["a"], lambda value: ORDERED.update(a=value)),
    "UserDict": (lambda: DICTIONARY["a"], lambda value: DICTIONARY.update(a=value)),
    "UserList": (lambda: LIST[0], lambda value: LIST.__setitem__(0, value)),
    "ChainMap": (lambda: CHAIN["a"], lambda value: CHAIN.update(a=value)),
    "MappingProxyType": (lambda: PROXY["a"], lambda value: BENEATH.update(a=value)),
    "bytearray": (lambda: BYTES[0], lambda value: BYTES.__setitem__(0, int(value))),
    "array.array": (lambda: NUMBERS[0], lambda value: NUMBERS.__setitem__(0, value)),
}


@pytest.mark.parametrize(("read", "change"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_where_else_a_constant_may_be(read, change):
    compiled = aotdist.compile(lambda x: x * read(), backend="fx")
    for value in (2.0, 5.0):
        change(value)
        assert torch.equal(compiled(X), X * value)
    change(2.0)


def test_what_a_constructor_reads():
    compiled = aotdist.compile(lambda x: Made(x).scaled, backend="fx")
    assert torch.equal(compiled(X), X * 2)
    changed_global(5.0)
    assert torch.equal(compiled(X), X * 5)


class Store:
    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.entered = 0

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.held[key] = value

    def __enter__(self) -> Store:
        self.entered += 1
        return self

    def __exit__(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize("make", [Store, collections.UserDict], ids=["the user's", "UserDict"])
def test_items_are_assigned_at_every_call(make):
    store = make()

    def program(x):
        store["double"] = x * 2
        return x + 1

    compiled = aotdist.compile(program, backend="fx")
    for k in (1, 2, 3):
        compiled(X * k)
        held = store.held if isinstance(store, Store) else store.data
        assert type(held["double"]) is torch.Tensor
        assert torch.equal(held["double"], X * 2 * k)


def test_what_a_context_manager_counts():
    store = Store()

    def program(x):
        with store:
            return x * 2

    compiled = aotdist.compile(program, backend="fx")
    for _ in range(3):
        compiled(X)
    assert (store.entered, len(compiled.artifacts)) == (3, 1)


class Node:
    """One of a chain."""

    following: Node | None = None
    scale = 2.0


def test_long_chains_of_objects():
    first = last = Node()
    for _ in range(100):
        last.following = Node()
        last = last.following

    def program(x):
        node = first
        while node.following is not None:
            node = node.following
        return x * node.scale

    compiled = aotdist.compile(program, backend="fx")
    assert torch.equal(compiled(X), X * 2)
    last.scale = 3.0
    assert torch.equal(compiled(X), X * 3)


class Kind(enum.StrEnum):
    A = "a"


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize("key", [Kind.A, Level.LOW])
def test_enumerations_as_keys(key):
    scales = {key: torch.full((2,), 2.0)}

    def program(x):
        scales[key] = scales[key] * 2
        return x * scales[key]

    compiled = aotdist.compile(program, backend="fx")
    assert torch.equal(compiled(X), X * 4)
    assert torch.equal(compiled(X), X * 8)


def test_attributes_that_are_no_identifiers():
    holder = types.SimpleNamespace()
    vars(holder)["a-b"] = torch.full((2,), 2.0)

    def program(x):
        return x * getattr(holder, "a-b")

    compiled = aotdist.compile(program, backend="fx")
    assert torch.equal(compiled(X), X * 2)
    vars(holder)["a-b"] = torch.full((2,), 3.0)
    assert torch.equal(compiled(X), X * 3)


class Owner:
    """Keeps its own compiled method, and reads attributes by names that it computes."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.compiled = aotdist.compile(self.scaled, backend="fx")

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self, "sc" + "ale")


def test_an_object_that_keeps_what_was_compiled():
    owner = Owner(2.0)
    assert torch.equal(owner.compiled(X), X * 2)
    assert torch.equal(owner.compiled(X), X * 2)
    assert len(owner.compiled.graphs) == 1
    owner.scale = 3.0
    assert torch.equal(owner.compiled(X), X * 3)


def test_a_compiled_function_that_is_replaced():
    owner, other = Owner(2.0), Owner(3.0)

    def program(x):
        return owner.compiled(x)

    compiled = aotdist.compile(program, backend="fx")
    assert torch.equal(compiled(X), X * 2)
    owner.compiled = other.compiled
    assert torch.equal(compiled(X), X * 3)


class Many:
    """A class that assigns attributes which it does not have, to itself and to another."""

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        Many.total = 1.0
        Other.total = x
        return x * 2


class Other:
    pass


def test_attributes_that_classes_lack():
    many = Many()
    compiled = aotdist.compile(lambda x: many.begin(x), backend="fx")
    for value in (1.0, 2.0):
        compiled(X * value)
        assert Many.total == 1.0
        assert torch.equal(Other.total, X * value)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.0, -0.0),
        (complex(0.0), complex(-0.0)),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        (range(0, 10, 3), range(0, 11, 3)),
        (slice(1, 2), slice(True, 2)),
        (1, 1.0),
        (1, True),
        ((0.0,), (-0.0,)),
    ],
)
def test_equal_constants_that_are_not_interchangeable(a, b):
    assert not same_constant(a, b)
    assert same_constant(a, a)


def test_nan_is_itself():
    assert same_constant(float("nan"), float("nan"))
    assert same_constant(complex("nan"), complex("nan"))
