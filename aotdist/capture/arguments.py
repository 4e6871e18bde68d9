"""The structure of a call's arguments: any pytree of tensors, constants, objects and code."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from aotdist.capture.constants import OpaqueArgument, is_constant, is_leaf, is_number, same_constant
from aotdist.capture.instances import (
    fill_instance,
    is_code,
    is_instance,
    is_same_code,
    make_instance,
    state_of,
)
from aotdist.capture.source import Source
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.functional import FakeTensorMode, mode_of_fake
from aotdist.torch_seam.trees import pytree, tree_children


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor in the arguments; `path` as the user would write it (`args[0]['x']`, `mask`)."""

    path: str


@dataclass(frozen=True, slots=True)
class ConstantLeaf:
    """A constant in the arguments."""

    path: str
    value: Any


@dataclass(frozen=True, slots=True)
class NumberLeaf:
    """A number that is a symbol in the trace; `position` among these of the call."""

    path: str
    position: int
    kind: type[int] | type[float]


@dataclass(frozen=True, slots=True)
class CodeLeaf:
    """A module, a function, a method or a class: calls are specialised on its identity."""

    path: str
    value: Any


@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """An object that is flattened; `position` among those of the call."""

    path: str
    position: int


@dataclass(frozen=True, slots=True)
class UnreadLeaf:
    """A value in an object that is none of these: a program that reads it is refused."""

    path: str
    cls: type


Leaf: TypeAlias = TensorLeaf | ConstantLeaf | NumberLeaf | CodeLeaf | ObjectLeaf | UnreadLeaf


class Numbers(list[Any]):
    """The numbers of a call for which symbols stand; while it is traced, the symbols."""


@dataclass(frozen=True, slots=True)
class Instance:
    """An object among the arguments.

    Args:
        path: of its first occurrence.
        cls: its class.
        spec: pytree structure of its attributes and items.
    """

    path: str
    cls: type
    spec: pytree.TreeSpec


@dataclass(frozen=True, slots=True)
class Arguments:
    """The structure of one call's arguments.

    Args:
        spec: pytree structure of `(args, kwargs)`.
        leaves: the leaves in pytree order, then those of the instances.
        instances: the objects among them, each once; objects inside of others come after these.
        numbers: the numbers among them for which symbols stand.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    instances: tuple[Instance, ...] = ()
    numbers: Numbers = field(default_factory=Numbers, compare=False)

    @property
    def is_plain(self) -> bool:
        """Whether there are tensors and constants only."""
        return all(isinstance(leaf, (TensorLeaf, ConstantLeaf)) for leaf in self.leaves)

    def refuse_objects(self, stage: str, fix: str) -> None:
        """Refuse leaves that are neither tensors nor constants.

        Raises:
            UnsupportedProgram: there is some.
        """
        for leaf in self.leaves:
            match leaf:
                case TensorLeaf() | ConstantLeaf() | NumberLeaf():
                    continue
                case CodeLeaf(value=value):
                    cls = type(value)
                case ObjectLeaf(position=position):
                    cls = self.instances[position].cls
                case UnreadLeaf(cls=cls):
                    pass
            what = f"`{leaf.path}` is an instance of `{cls.__name__}`, neither a tensor nor a constant"
            raise UnsupportedProgram(what, stage=stage, fix=fix)

    def tensor_paths(self) -> list[str]:
        """The paths of the tensor leaves."""
        return [leaf.path for leaf in self.leaves if isinstance(leaf, TensorLeaf)]

    def counts(self) -> list[Source]:
        """The places of the numbers for which symbols stand."""
        leaves = [leaf for leaf in self.leaves if isinstance(leaf, NumberLeaf)]
        return [Source(leaf.path, self.numbers).item(leaf.position, leaf.path) for leaf in leaves]

    def code(self) -> Iterator[tuple[str, Any]]:
        """Modules, functions and classes with their paths, the classes of objects included."""
        yield from ((leaf.path, leaf.value) for leaf in self.leaves if isinstance(leaf, CodeLeaf))
        yield from ((cls.__name__, cls) for cls in dict.fromkeys(each.cls for each in self.instances))

    def unflatten(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[str, Any]]]:
        """`(args, kwargs)` with `tensors` at the tensor leaves; and the objects in them, with their paths."""
        made = [make_instance(instance.cls) for instance in self.instances]
        remaining = iter(tensors)
        values = (self._value(leaf, remaining, made) for leaf in self.leaves)
        args, kwargs = _rebuilt(self.spec, values)
        for instance, empty in zip(self.instances, made, strict=True):
            fill_instance(empty, *_rebuilt(instance.spec, values))
        return args, kwargs, [(each.path, value) for each, value in zip(self.instances, made, strict=True)]

    def match(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[torch.Tensor], list[Any], list[int | float]] | None:
        """Of another call with this structure and these constants: tensors, objects, numbers with symbols.

        None for any other call.
        """
        values, spec = pytree.tree_flatten((args, self._in_order(kwargs)), is_leaf=is_leaf)
        if spec != self.spec:
            return None
        found = _Found()
        leaves = iter(self.leaves)
        if not all(_fits(next(leaves), value, found) for value in values):
            return None
        for position, instance in enumerate(self.instances):
            held = found.objects[position]
            values, spec = pytree.tree_flatten(state_of(held), is_leaf=is_leaf)
            if type(held) is not instance.cls or spec != instance.spec:
                return None
            if not all(_fits(next(leaves), value, found) for value in values):
                return None
        return found.tensors, found.objects, found.numbers

    def _in_order(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """`kwargs` in the order of the first call: the order of keyword arguments does not matter."""
        names = tree_children(self.spec)[1].context
        return {name: kwargs[name] for name in names} if set(kwargs) == set(names) else dict(kwargs)

    def _value(self, leaf: Leaf, tensors: Iterator[torch.Tensor], made: Sequence[Any]) -> Any:
        match leaf:
            case TensorLeaf():
                return next(tensors)
            case ConstantLeaf(value=value) | CodeLeaf(value=value):
                return value
            case NumberLeaf(position=position):
                return self.numbers[position]
            case ObjectLeaf(position=position):
                return made[position]
            case UnreadLeaf(path=path, cls=cls):
                return OpaqueArgument(path, cls.__name__)


class _Found:
    """The tensors, objects and numbers of one call, in order; each object once."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self.numbers = Numbers()
        self._positions: dict[int, int] = {}

    def position(self, value: Any) -> int:
        """The number of an object."""
        if id(value) not in self._positions:
            self._positions[id(value)] = len(self.objects)
            self.objects.append(value)
        return self._positions[id(value)]


def _rebuilt(spec: pytree.TreeSpec, values: Iterator[Any]) -> Any:
    return pytree.tree_unflatten(list(itertools.islice(values, spec.num_leaves)), spec)


def _fits(leaf: Leaf, value: Any, found: _Found) -> bool:
    """Whether `value` fits a leaf; if so, it is added to `found`."""
    match leaf:
        case TensorLeaf():
            if not isinstance(value, torch.Tensor):
                return False
            found.tensors.append(value)
            return True
        case NumberLeaf(kind=kind):
            found.numbers.append(value)
            return type(value) is kind
        case ConstantLeaf(value=constant):
            return same_constant(constant, value)
        case CodeLeaf(value=code):
            return is_same_code(code, value)
        case ObjectLeaf(position=position):
            return is_instance(value) and found.position(value) == position
        case UnreadLeaf(cls=cls):
            return type(value) is cls


def read_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], counted: Container[str] = ()
) -> tuple[Arguments, list[torch.Tensor], list[Any]]:
    """The structure of a call, its tensors, and its objects.

    Args:
        args: positional arguments.
        kwargs: the others.
        counted: paths of numbers for which symbols stand.

    Raises:
        UnsupportedProgram: a leaf is none of tensor, constant, object and code.
    """
    found, paths = _Found(), list[str]()
    leaves: list[Leaf] = []

    def read(pairs: Sequence[tuple[str, Any]], *, of_instance: bool) -> None:
        for path, value in pairs:
            leaf = _leaf(path, value, found, counted, of_instance=of_instance)
            leaves.append(leaf)
            if isinstance(leaf, ObjectLeaf) and leaf.position == len(paths):
                paths.append(path)

    pairs, spec = _named_leaves((args, dict(kwargs)), _path)
    read(pairs, of_instance=False)
    instances: list[Instance] = []
    while len(instances) < len(found.objects):
        held, path = found.objects[len(instances)], paths[len(instances)]
        pairs, state = _named_leaves(state_of(held), functools.partial(_path_in, path))
        read(pairs, of_instance=True)
        instances.append(Instance(path, type(held), state))
    arguments = Arguments(spec, tuple(leaves), tuple(instances), found.numbers)
    return arguments, found.tensors, found.objects


def _leaf(path: str, value: Any, found: _Found, counted: Container[str], *, of_instance: bool) -> Leaf:
    if isinstance(value, torch.Tensor):
        found.tensors.append(value)
        return TensorLeaf(path)
    if path in counted and is_number(value):
        found.numbers.append(value)
        return NumberLeaf(path, len(found.numbers) - 1, type(value))
    if is_constant(value):
        return ConstantLeaf(path, value)
    if is_code(value):
        return CodeLeaf(path, value)
    if is_instance(value):
        return ObjectLeaf(path, found.position(value))
    if of_instance:
        return UnreadLeaf(path, type(value))
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UnsupportedProgram(
        f"`{path}` is a {kind}, neither a tensor nor a constant",
        stage="capture",
        fix="pass `torch.from_numpy(array)`, or the number itself (`scalar.item()`)"
        if type(value).__module__ == "numpy"
        else "pass its tensors, register its class with `torch.utils._pytree.register_pytree_node`, "
        "or close over it",
    )


def _named_leaves(
    given: Any, path: Callable[[Sequence[Any]], str]
) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    try:
        pairs, spec = pytree.tree_flatten_with_path(given, is_leaf=is_leaf)
    except ValueError:  # a class was registered without keys
        values, spec = pytree.tree_flatten(given, is_leaf=is_leaf)
        return [(f"leaf {position} of the arguments", value) for position, value in enumerate(values)], spec
    return [(path(keys), value) for keys, value in pairs], spec


def _path(key_path: Sequence[Any]) -> str:
    group, *rest = key_path
    text = "args" if group.idx == 0 else ""
    for position, key in enumerate(rest):
        # The first key beneath kwargs is the argument's name: the user wrote `mask`, not `kwargs['mask']`.
        text += str(key.key) if group.idx == 1 and position == 0 else pytree.keystr((key,))
    return text


def _path_in(owner: str, key_path: Sequence[Any]) -> str:
    """The path of an attribute, or an item, of the object at `owner`."""
    group, *rest = key_path
    if group.idx == 0 and rest:
        name, *rest = rest
        owner += f".{name.key}"
    return owner + "".join(pytree.keystr((key,)) for key in rest)


UserFakes: TypeAlias = tuple[FakeTensorMode | None, frozenset[int]]
"""The mode of the user's fake tensors, in which to trace, and the identities of those that a call may use."""

NO_FAKES: UserFakes = (None, frozenset())
"""Every tensor of the call is real."""


def fakes_of(
    named: Iterable[tuple[str, torch.Tensor]],
    closed_over: Callable[[], Collection[int]],
    around: FakeTensorMode | None = None,
) -> UserFakes:
    """The fake tensors of a call.

    Args:
        named: the tensors among the arguments, with their names.
        closed_over: returns identities of tensors that the program may close over.
        around: the mode to take if no argument is a fake tensor.

    Raises:
        UnsupportedProgram: they are of several modes.
    """
    mode, first, found = around, "", set[int]()
    for path, tensor in named:
        other = mode_of_fake(tensor)
        if other is None:
            continue
        if found and other is not mode:
            raise UnsupportedProgram(
                f"`{path}` is a fake tensor of another mode than `{first}`",
                stage="capture",
                fix="make all fake tensors in one `FakeTensorMode`",
            )
        mode, first = other, first or path
        found.add(id(tensor))
    if mode is None:
        return NO_FAKES
    return mode, frozenset(found.union(closed_over()))
