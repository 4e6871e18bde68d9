"""Places from which each call reads the tensors and constants of a program."""

from __future__ import annotations

import keyword
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from aotdist.torch_seam.modules import own, shared

UNNAMED = "constant_"
"""Prefix of the names of tensors that the walk has not found: they are kept by identity."""

ABSENT = object()
"""Stands for the value of a place that does not exist; see `Source.read_or`."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """The step `.name`."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """The step `[key]`; keys that are tensors are compared by identity.

    Args:
        key: the key, or the position.
        cls: the class whose methods get and set the item, if the container's own class overrides them; see
            `keeper_of`.
    """

    key: Any
    cls: type[Any] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Item):
            return NotImplemented
        return self.key is other.key or (not isinstance(self.key, torch.Tensor) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, slots=True)
class Applied:
    """The step `function(_)`: something computed from an object, such as the items of a container."""

    function: Callable[[Any], Any]


def built_in_class_of(container: Any) -> type[Any]:
    """The built-in class that stores the items of a list, tuple or dictionary; its methods bypass overrides.

    For any other container, its own class.
    """
    return next((c for c in (OrderedDict, dict, list, tuple) if isinstance(container, c)), type(container))


def keeper_of(container: Any) -> type[Any] | None:
    """`built_in_class_of`, if the container's own class overrides its `__getitem__`; else None."""
    cls = built_in_class_of(container)
    return None if type(container).__getitem__ is cls.__getitem__ else cls


def kept_by(container: Any) -> Any:
    """What a list or a dictionary stores, as a plain list or dictionary, whatever its class makes of it."""
    if isinstance(container, dict):
        return dict(built_in_class_of(container).items(container))
    return list.copy(container)


_WHOLE = slice(None)

Step: TypeAlias = Attribute | Item | Applied
Spot: TypeAlias = tuple[int, Any]
"""The identity of an object or container, and a key in it; see `Source.spot`."""


@dataclass(slots=True, eq=False)
class Argument:
    """The root of places that begin at a tensor among the arguments, another one at each call.

    Args:
        position: of the tensor among the arguments' tensors.
        example: the tensor of the captured call; None after the capture. Not a weak reference: with one,
            `swap_tensors` would fail.
    """

    position: int
    example: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Given:
    """The root of places in lists, dictionaries and objects among the arguments, others at each call.

    Args:
        name: `args`, `kwargs` or `objects`: the variable of the printed call.
    """

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The root of places in an object or a container that is at a place itself.

    Another one may be there at each call (`self.state = State()`). So each call looks it up when it begins,
    and assignments go to the one that it found.

    Args:
        source: the place of the object.
        example: the object that the captured call found.
    """

    source: Source
    example: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.example is other.example

    def __hash__(self) -> int:
        return id(self.example)


@dataclass(frozen=True, slots=True)
class Source:
    """A place reached from an object by attributes and items.

    Args:
        path: how the user would write it (`model.blocks.0.scale`); for messages only.
        root: the object where to start, kept alive; or an `Argument`, a `Given` or a `Held`.
        steps: the attributes and items to follow from there.
    """

    path: str
    root: Any
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.root, dict):  # calls of all threads read it
            object.__setattr__(self, "root", shared(self.root))

    @property
    def is_of_argument(self) -> bool:
        """Whether the place begins at a tensor among the arguments, and so is another one at each call."""
        return isinstance(self.root, Argument)

    def attribute(self, name: str, path: str | None = None) -> Source:
        """The place `self.name`."""
        return Source(
            path or (f"{self.path}.{name}" if self.path else name), self.root, (*self.steps, Attribute(name))
        )

    def item(self, key: Any, path: str | None = None, cls: type[Any] | None = None) -> Source:
        """The place `self[key]`."""
        return Source(path or f"{self.path}[{key!r}]", self.root, (*self.steps, Item(key, cls)))

    def item_at(self, position: int, key: Any, cls: type[Any] | None = None) -> Source:
        """As `item`; in the path, a key that is a tensor or a module is its position among the keys."""
        is_object = isinstance(key, (torch.Tensor, nn.Module))
        path = f"{self.path}[<{type(key).__name__} {position}>]" if is_object else None
        return self.item(key, path, cls)

    def whole_list(self) -> Source:
        """All items of the list at `self`."""
        return self.item(_WHOLE, self.path)

    def items_from(self, first: int) -> Source:
        """The items of the list at `self` from position `first` on, which were appended."""
        return self.item(slice(first, None), f"{self.path}[{first}:]")

    @property
    def is_grown_list(self) -> bool:
        """Whether the place was made by `items_from`."""
        match self.steps[-1:]:
            case (Item(key=slice(start=int())),):
                return True
            case _:
                return False

    def whole(self) -> Source:
        """The place of the list, for one made by `items_from`."""
        return replace(self.owner(), path=self.path.rpartition("[")[0])

    @property
    def is_whole_list(self) -> bool:
        """Whether the place was made by `whole_list`."""
        return self.steps[-1:] == (Item(_WHOLE),)

    def lies_in(self, other: Source) -> bool:
        """Whether the place is `other`, or reached through it."""
        return self.root is other.root and self.steps[: len(other.steps)] == other.steps

    def applied(self, function: Callable[[Any], Any], path: str) -> Source:
        """The result of `function` for the value of the place; it cannot be written."""
        return Source(path, self.root, (*self.steps, Applied(function)))

    def container(self) -> Source | None:
        """The place from which a computed one (`applied`) is computed; None for others."""
        return self.owner() if self.steps and isinstance(self.steps[-1], Applied) else None

    def read(self) -> Any:
        """The value of the place now."""
        value: Any = own(self.root.example if isinstance(self.root, (Argument, Held)) else self.root)
        for step in self.steps:
            if isinstance(step, Attribute):
                value = getattr(value, step.name)
            elif isinstance(step, Applied):
                value = step.function(value)
            else:
                value = value[step.key] if step.cls is None else step.cls.__getitem__(value, step.key)
        return value

    def read_or(self, default: Any) -> Any:
        """The value of the place now; `default` if it does not exist."""
        try:
            return self.read()
        except (KeyError, IndexError, AttributeError, TypeError, ValueError):
            return default

    def found(self) -> Any:
        """The value of the place now; a `Held` root is looked up again. None if it does not exist."""
        root = self.root.source.found() if isinstance(self.root, Held) else self.root
        return replace(self, root=root).read_or(None)

    def write(self, value: Any) -> None:
        """Assign `value` to the place; `ABSENT` deletes what is there."""
        if value is ABSENT and self.read_or(ABSENT) is ABSENT:
            return
        owner, last = self._owner()
        match last:
            case Attribute(name=name):
                delattr(owner, name) if value is ABSENT else setattr(owner, name, value)
            case Item(key=key, cls=cls):
                cls = cls or type(owner)
                cls.__delitem__(owner, key) if value is ABSENT else cls.__setitem__(owner, key, value)
            case Applied():
                raise TypeError(f"{self.path} is computed, not a place")

    def spot(self) -> Spot:
        """The identity of the owner of the place, and its key there: equal for all sources of one place.

        Without steps, the root's identity.

        Raises:
            AttributeError, IndexError, KeyError: the place does not exist any more.
        """
        if not self.steps:
            return id(self.root), None
        owner, last = self._owner()
        match last:
            case Attribute(name=name):
                held = getattr(owner, "__dict__", None)  # of a class it is another object at each read
                return (id(shared(held)) if isinstance(held, dict) and name in held else id(owner)), name
            case Item(key=slice() as key):
                return id(owner), (key.start, key.stop)  # slices have no hash before Python 3.12
            case Item(key=key):
                return id(shared(owner)), key
            case Applied(function=function):
                return id(owner), function

    def owner(self) -> Source:
        """The place of the object or container of which this one is an attribute or an item."""
        return Source(self.path, self.root, self.steps[:-1])

    def _owner(self) -> tuple[Any, Step]:
        return self.owner().read(), self.steps[-1]

    def expression(self, bind: Callable[[str, Any], str]) -> str:
        """Python source that reads the place; `bind(hint, value)` names an object in its globals."""
        first = self.root.example if isinstance(self.root, Held) else self.root
        text = bind(_owner_hint(self.path, first), self.root)
        for step in self.steps:
            match step:
                case Attribute(name=name):
                    is_named = name.isidentifier() and not keyword.iskeyword(name)
                    text = f"{text}.{name}" if is_named else f"getattr({text}, {name!r})"
                case Item(key=key, cls=type() as cls):
                    text = f"{bind(cls.__name__, cls)}.__getitem__({text}, {_literal(key, bind)})"
                case Item(key=key):
                    text += f"[{_literal(key, bind)}]"
                case Applied(function=function):
                    # No variable of a printed call is named `type`.
                    name = "type" if function is type else bind(function.__name__, function)
                    text = f"{name}({text})"
        return text

    def assignment(self, value: str, bind: Callable[[str, Any], str]) -> str:
        """Python source that assigns the value of an expression; `bind` as for `expression`."""
        match self.steps[-1]:
            case Item(key=key, cls=type() as cls):
                owner, key = self.owner().expression(bind), _literal(key, bind)
                return f"{bind(cls.__name__, cls)}.__setitem__({owner}, {key}, {value})"
            case _:
                return f"{self.expression(bind)} = {value}"

    def deletion(self, bind: Callable[[str, Any], str]) -> str:
        """Python source that deletes the value; `bind` as for `expression`."""
        match self.steps[-1]:
            case Item(key=key, cls=type() as cls):
                owner, key = self.owner().expression(bind), _literal(key, bind)
                return f"{bind(cls.__name__, cls)}.__delitem__({owner}, {key})"
            case _:
                return f"del {self.expression(bind)}"


def held_in(places: Iterable[Source]) -> list[Held]:
    """The `Held` roots of `places`, each once."""
    return list(dict.fromkeys(place.root for place in places if isinstance(place.root, Held)))


def _owner_hint(path: str, root: Any) -> str:
    """A name for the root of a place: `blocks_3` for that of `blocks.3.scale`."""
    if isinstance(root, types.CellType):
        return f"{path} cell"
    if isinstance(root, types.FunctionType):
        return root.__name__
    if isinstance(root, list):
        return path
    return path.rpartition(".")[0] or ("root" if isinstance(root, dict) else type(root).__name__)


def _literal(key: Any, bind: Callable[[str, Any], str]) -> str:
    if isinstance(key, slice):
        return ":" if key.start is None else f"{key.start}:"
    return repr(key) if type(key) in (str, int, bool) else bind("key", key)
