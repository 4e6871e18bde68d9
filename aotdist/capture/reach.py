"""The walk of what a callable can reach besides its arguments: closures, globals, attributes.

It finds modules (their parameters and buffers are inputs of the program), constants (part of the signature)
and tensors (inputs, if the trace uses them). It enters functions of the user's, `functools.partial`, bound
methods, built-in containers, and those attributes of objects, classes and imported modules whose names are
in the code that it has entered. It does not enter functions of torch, the standard library or installed
packages.
"""

from __future__ import annotations

import collections
import functools
import os
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from aotdist.capture.code import is_users_class, is_users_code, is_users_module, names_in, special_methods
from aotdist.capture.constants import is_constant
from aotdist.capture.draws import is_python_generator
from aotdist.capture.environment import (
    EnteredCode,
    Reached,
    is_clock,
    is_tensor,
    items_of,
    keys_of,
    name_of,
)
from aotdist.capture.instances import STEPPERS
from aotdist.capture.leaked_tensors import attributes_of
from aotdist.capture.module_attributes import (
    computed_once,
    hooks_of,
    is_watched,
    library_functions,
    library_settings,
    names_of_state,
)
from aotdist.capture.modules import KINDS, own_tensors, refuse_script
from aotdist.capture.readers import cells_of, defaults_of, empty_cells_of, is_array, reader_of, wrapped_by
from aotdist.capture.source import Source, keeper_of
from aotdist.subclasses.protocol import is_of_own_class, is_wrapper

_BUILT_IN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GenericAlias,  # `list[int]`, whose attributes are those of the class
)
_FUNCTION_METHODS = frozenset({"forward", "setup_context", "backward", "jvp"})
_TENSOR_METHODS = frozenset({"__torch_function__", "__new__", "__init__", "__getattr__", "__setattr__"})
_CONSTRUCTORS = frozenset({"__new__", "__init__", "__post_init__"})
_CACHE = type(functools.lru_cache(len))
_LIBRARY_CONTAINERS = (collections.UserDict, collections.UserList, collections.ChainMap)
"""Containers whose methods are not entered; they keep their items in an attribute."""


def reach(
    target: Any,
    arguments: Iterable[tuple[Source, torch.Tensor]],
    code: Iterable[tuple[str, Any]],
    excluded: Iterable[Any] = (),
) -> Reached:
    """Walk a function, a module or another callable; see the docstring of this file.

    Args:
        target: what to walk.
        arguments: tensors among the arguments, whose attributes it can reach.
        code: modules, functions and classes among the arguments, by name.
        excluded: containers that it does not enter: the program gets their items in another way.
    """
    walk = _Walk(seen=dict.fromkeys(map(id, excluded)))
    path = "" if isinstance(target, nn.Module) else getattr(target, "__name__", type(target).__name__)
    for source, tensor in arguments:
        walk.paths[source.path] += 1
        walk.look_at(source, tensor)
    walk.visit(Source(path, target), target)
    for name, value in code:
        walk.visit(Source(name, value), value)
    walk.follow_names()
    walk.tie_gradients()
    walk.note_absent()
    return walk.reached.after(walk.code)


@dataclass(slots=True)
class _Named:
    """An object whose attributes are read by name; `may_gain`: whether it may have more at another call."""

    source: Source
    value: Any
    may_gain: bool = True
    looked_up: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Walk:
    """The walk.

    Attributes count if their names are in code that was entered, and attributes lead to more code. So the two
    are walked in turns until nothing new is found (`follow_names`).

    Args:
        reached: what it has found so far.
        code: the names in the code that it has entered.
        seen: the first place of each object, by identity; None for functions found in classes.
        inputs: the places of tensors that are inputs in any case.
        named: objects whose attributes are read by name.
        of_class: the attributes of each class that were not looked up yet; see `_users_attributes`.
        paths: how many tensors and outermost modules, which name the inputs of the program, have each path.
        logs: lists that code appends to, which are entered when all else was: what they hold is read from
            where else it is found.
    """

    reached: Reached = field(default_factory=Reached)
    code: EnteredCode = field(default_factory=EnteredCode)
    seen: dict[int, Source | None] = field(default_factory=dict)
    inputs: dict[int, Source] = field(default_factory=dict)
    named: list[_Named] = field(default_factory=list)
    of_class: dict[type, dict[str, type]] = field(default_factory=dict)
    paths: collections.Counter[str] = field(default_factory=collections.Counter[str])
    logs: list[tuple[Source, Any]] = field(default_factory=list)

    def visit(self, source: Source, value: Any) -> None:
        """Enter a value, and all that is found in it."""
        self._follow(iter([(source, value)]))

    def _follow(self, places: Iterator[tuple[Source, Any]]) -> None:
        pending = [places]  # a chain of objects may be longer than Python's stack is high
        while pending:
            found = next(pending[-1], None)
            if found is None:
                pending.pop()
                continue
            source, value = found
            if is_constant(value):
                self.reached.constants.extend([found] if source.steps else [])
            elif type(value) is list and name_of(source) in self.code.appended:
                self.logs.append(found)
            else:
                pending.append(self._enter(source, value))
                self.reached.clocks.extend([(source.path, value)] if is_clock(value) else [])

    def _enter(self, source: Source, value: Any) -> Iterator[tuple[Source, Any]]:
        """Note a value that is no constant, unless it was seen before; returns what it contains."""
        if id(value) in self.seen:
            self._note_tie(source, value)
            return
        self.seen[id(value)] = source = self._of_its_own_name(source, value)
        if isinstance(value, torch.Tensor):
            self.reached.tensors.append((source, value))
            if id(value) in self.inputs:
                self.reached.ties.append((source, self.inputs[id(value)]))
            if source.steps:
                place = source.applied(is_tensor, f"whether {source.path} is a tensor")
                self.reached.constants.append((place, True))
            self.look_at(source, value)
        elif isinstance(value, (torch.Generator, *_BUILT_IN)):
            self._identity(source, value)
            self.reached.generators.extend([value] if isinstance(value, torch.Generator) else [])
            holder = getattr(value, "__self__", None)
            if isinstance(holder, (list, dict)) or is_python_generator(holder):  # of `grads.append`
                yield source.attribute("__self__", source.path), holder
        elif is_python_generator(value):
            self._identity(source, value)
            self.reached.python_generators.append((source.path, value))
        else:
            yield from self._inside(source, value)

    def _of_its_own_name(self, source: Source, value: Any) -> Source:
        """The same place; of a tensor or a module, under a path of its own: closures may name them alike."""
        if not isinstance(value, (torch.Tensor, nn.Module)):
            return source
        self.paths[source.path] = number = self.paths[source.path] + 1
        return replace(source, path=f"{source.path}#{number}") if number > 1 else source

    def _note_tie(self, source: Source, value: Any) -> None:
        """Note a further place of an object: at another call, two objects may be in the two places.

        Imported modules are left out, which many files import.
        """
        first = self.seen[id(value)]
        if first is not None and not isinstance(value, types.ModuleType):
            self.reached.ties.append((source, first))

    def look_at(self, source: Source, tensor: torch.Tensor, *, of_module: bool = False) -> None:
        """Note a tensor whose attributes are read by name, and may be assigned unless it is a wrapper.

        A tensor that was not seen before is an argument, or of a module, and so an input. If the walk finds
        it elsewhere, too, the two places are tied: at another call, two tensors may be there.
        """
        first = self.seen.get(id(tensor))
        if first is None:
            self.inputs.setdefault(id(tensor), source)
        elif first is not source and id(tensor) not in self.inputs:
            self.reached.ties.append((first, source))
        if is_of_own_class(tensor):
            self.seen.setdefault(id(tensor), source)
        if not is_wrapper(tensor):
            self.reached.assignable.owners.append((source, tensor))
        self.named.append(_Named(source, tensor, not (of_module or is_wrapper(tensor))))

    def follow_names(self) -> None:
        """Look up all names in all objects that are read by name, until nothing new is found."""
        before: tuple[int, int, bool] | None = None
        while (now := (len(self.code.names), len(self.named), self.code.any_name)) != before or self.logs:
            if now == before:
                self._follow(self._enter(*self.logs.pop()))
            before = now
            for named in list(self.named):
                for place, inner in list(self._attributes(named)):
                    self.visit(place, inner)
        for named in self.named:
            if isinstance(named.value, type) and is_users_class(named.value):
                absent = self.code.stored.difference(*map(vars, named.value.__mro__))
                self.reached.assignable.classes.append((named.source, named.value, absent))

    def tie_gradients(self) -> None:
        """Tie tensors that are gradients to the `.grad` of their leaves, if the program may read that."""
        if "grad" not in self.code.names and not self.code.any_name:
            return
        for named in self.named:
            tensor = named.value
            if isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.grad is not None:
                place = self.seen.get(id(tensor.grad)) or self.inputs.get(id(tensor.grad))
                if place is not None:
                    self.reached.ties.append((place, named.source.attribute("grad")))

    def note_absent(self) -> None:
        """Make the absence of attributes that the program may look for a part of the signature.

        `ModuleGuard` does so for modules. For plain tensors and functions it matters only if the program uses
        `getattr` or `hasattr`. Parameters and buffers, of which there are many, are left out.
        """
        tests: dict[frozenset[str], Callable[[Any], Any]] = {}  # one for all objects with the same attributes
        for named in self.named:
            if isinstance(named.value, (torch.Tensor, types.FunctionType)) and not (
                named.may_gain and (self.code.any_name or self.code.asks)
            ):
                continue
            if not isinstance(named.value, (nn.Module, type, types.ModuleType)):
                own = frozenset() if self.code.any_name else frozenset(_own_attributes(named.value))
                if own not in tests:
                    absent = _has_none_of(frozenset(self.code.names - own))
                    tests[own] = _num_attributes if self.code.any_name else absent
                test = tests[own]
                place = named.source.applied(test, f"attributes that {named.source.path} does not have")
                self.reached.constants.append((place, test(named.value)))

    def _inside(self, source: Source, value: Any) -> Iterator[tuple[Source, Any]]:
        """The content of a value, except for attributes, which `follow_names` looks up."""
        read = reader_of(value, self.code.names)
        if read is not None or is_array(value):  # an array may be replaced by another one
            self._identity(source, value)
        match value:
            case _ if read is not None:
                yield source.applied(read, f"what {source.path} holds"), read(value)
            case types.FunctionType():
                self._identity(source, value)
                yield from self._function_state(value)
            case _ if names := _names_of_parts(value):
                yield from ((source.attribute(name, source.path), getattr(value, name)) for name in names)
            case functools.partial():
                names = ("func", "args", "keywords")
                yield from ((source.attribute(name), getattr(value, name)) for name in names)
            case list() | tuple() | dict() | types.MappingProxyType():
                yield from self._items(source, value)
            case nn.Module():
                yield from self._module(source, value)
            case types.ModuleType() if not is_users_module(value):
                pass
            case set() | frozenset() | deque():
                yield from self._unnamed_items(source, value)
            case _:
                self._object(source, value)

    def _module(self, source: Source, value: nn.Module) -> Iterator[tuple[Source, Any]]:
        self._identity(source, value)
        self.reached.modules.append((source, value))
        for path, module in value.named_modules(prefix=source.path):
            self.seen[id(module)] = Source(path, module)
            yield from self._of_module(path, module)
        if any(map(is_parametrized, value.modules())):
            yield from computed_once()

    def _object(self, source: Source, value: Any) -> None:
        self.code.names |= names_of_state(type(value))
        if isinstance(value, _CACHE):
            self.reached.caches.append(value)
        if hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
            self.reached.assignable.owners.append((source, value))
        if hasattr(value, "__dict__") or is_users_class(type(value)):
            self.named.append(_Named(source, value))
        if source.steps and not isinstance(value, types.ModuleType):
            self._what_it_is(source, value)

    def _what_it_is(self, source: Source, value: Any) -> None:
        """Make an object's class, or its identity, part of the signature."""
        if isinstance(value, (type, *STEPPERS)):
            self._identity(source, value)
        elif is_users_class(type(value)) or (hasattr(value, "__dict__") and not callable(value)):
            self._identity(source.applied(type, f"the class of {source.path}"), type(value))
        else:
            self.reached.opaque.append((source, value))

    def _unnamed_items(self, source: Source, value: Any) -> Iterator[tuple[Source, Any]]:
        """The items of a deque, by position; a set, whose items have no places, is noted as a whole."""
        if not isinstance(value, frozenset):
            self.reached.assignable.wholes.append((source, value))
        if isinstance(value, deque):
            yield from self._items(source, value)
        elif is_constant(tuple(value)):
            items = source.applied(frozenset, f"the items of {source.path}")
            self.reached.constants.append((items, frozenset(value)))
        else:
            self._identity(source, value)

    def _of_module(self, path: str, module: nn.Module) -> Iterator[tuple[Source, Any]]:
        refuse_script(path, module)
        self.named.append(_Named(Source(path, module), module))
        for kind in KINDS:
            for name, (owner, key), tensor in own_tensors(path, module, kind):
                self.look_at(Source(name, owner).item(key, name), tensor, of_module=True)
        yield from hooks_of(path, module)
        yield from library_settings(path, module)
        yield from library_functions(path, module)

    def _identity(self, source: Source, value: Any) -> None:
        if source.steps:
            self.reached.identities.append((source, value))

    def _items(self, source: Source, value: Any) -> Iterator[tuple[Source, Any]]:
        """The items of a container; one that holds only constants is a constant itself."""
        if isinstance(value, (list, dict)):
            self.reached.assignable.containers.append((source, value))
        keys = keys_of(value)
        items = items_of(value)
        if is_constant(items):
            self.reached.constants.append((source.applied(items_of, source.path), items))
        elif (are_constants := is_constant(keys)) or all(
            is_constant(key) or isinstance(key, (torch.Tensor, nn.Module)) for key in keys
        ):
            if are_constants:
                self.reached.constants.append((source.applied(keys_of, f"the keys of {source.path}"), keys))
            else:  # tensors, modules, as in the state of an optimizer: items are read by them, and counted
                number = source.applied(len, f"the number of items of {source.path}")
                self.reached.constants.append((number, len(value)))
            cls = keeper_of(value)
            for position, key in enumerate(keys):
                item = value[key] if cls is None else cls.__getitem__(value, key)
                yield source.item_at(position, key, cls), item

    def _attributes(self, named: _Named) -> Iterator[tuple[Source, Any]]:
        """The attributes of `named.value` whose names were not looked up before."""
        value = named.value
        if isinstance(value, type):
            made = frozenset[str]() if issubclass(value, nn.Module) else _CONSTRUCTORS
            yield from self._from_classes(value, made)
            yield from self._from_classes(type(value))
            return
        own = _own_attributes(value)
        everything = self.code.any_name or _may_read_all(value)
        wanted = (own.keys() if everything else self.code.names & own.keys()) - named.looked_up
        if isinstance(value, torch.Tensor) and is_wrapper(value):
            wanted = {name for name in wanted if is_constant(own[name])}
        named.looked_up |= wanted
        for name in sorted(wanted):
            if not isinstance(value, nn.Module) or not is_watched(name, own[name]):
                yield named.source.attribute(name), own[name]
        if not isinstance(value, types.ModuleType):
            yield from self._from_classes(type(value))

    def _from_classes(self, cls: type, extra: frozenset[str] = frozenset()) -> Iterator[tuple[Source, Any]]:
        """Attributes of the user's classes among the bases of `cls` whose names were not looked up before."""
        unread = self.of_class.get(cls)
        if unread is None:
            unread = self.of_class[cls] = _users_attributes(cls)
            extra |= _FUNCTION_METHODS if issubclass(cls, torch.autograd.Function) else frozenset()
            extra |= _TENSOR_METHODS if issubclass(cls, torch.Tensor) else frozenset()
            extra |= special_methods(cls).keys()
        for name in sorted(unread.keys() & self.code.names | unread.keys() & extra):
            yield from self._class_attribute(unread.pop(name), name)

    def _class_attribute(self, cls: type, name: str) -> Iterator[tuple[Source, Any]]:
        """The content of a method's code, or an attribute of another kind, of a user's class."""
        value = vars(cls)[name]
        match value:
            case property():
                function = value.fget
            case functools.cached_property():
                function = value.func
            case staticmethod() | classmethod():
                function = value.__func__
            case types.FunctionType():
                function = value
            case _ if hasattr(value, "__get__") and is_users_class(type(value)):  # what reads it is a method
                place = Source(cls.__name__, cls).attribute("__dict__")
                yield place.item(name, f"{cls.__name__}.{name}"), value
                return
            case _:
                yield Source(cls.__name__, cls).attribute(name), value
                return
        if isinstance(function, types.FunctionType) and id(function) not in self.seen:
            self.seen[id(function)] = None
            place = Source(cls.__name__, cls).attribute("__dict__")
            self._identity(place.item(name, f"{cls.__name__}.{name}"), value)
            yield from self._function_state(function, special=name in special_methods(cls))

    def _function_state(
        self, fn: types.FunctionType, *, special: bool = False
    ) -> Iterator[tuple[Source, Any]]:
        """What a function can read besides its arguments: cells, defaults, globals.

        Args:
            fn: the function.
            special: whether it is a special method; see `EnteredCode.enter`, `_may_read_all`.
        """
        if not is_users_code(fn.__code__):
            yield from wrapped_by(fn)
            return
        names = names_in(fn.__code__)
        itself = Source(fn.__name__, fn)
        self._identity(itself.attribute("__code__"), fn.__code__)  # which IPython's autoreload replaces
        self.reached.assignable.owners.append((itself, fn))
        self.named.append(_Named(itself, fn))
        self.code.enter(names, special=special)
        yield from cells_of(fn)
        self.reached.assignable.variables.extend(empty_cells_of(fn))
        yield from defaults_of(fn)
        if not names.attributes.isdisjoint(("environ", "getenv")):
            yield Source("os", os).attribute("environ"), os.environ
        read = names.globals | (names.texts if "globals" in names.globals else frozenset())
        for name in sorted(read & fn.__globals__.keys()):
            yield Source(name, fn.__globals__).item(name, name), fn.__globals__[name]
        for name in sorted(names.assigned - names.globals):
            self.reached.assignable.variables.append(Source(name, fn.__globals__).item(name, name))


def _users_attributes(cls: type) -> dict[str, type]:
    """The names of the attributes that a class has from the user's classes, each with that class."""
    owners = {name: base for base in reversed(cls.__mro__) for name in vars(base)}
    users = {base for base in cls.__mro__ if is_users_class(base)}
    return {name: owner for name, owner in owners.items() if owner in users}


def _own_attributes(value: Any) -> Mapping[str, Any]:
    """An object's own attributes, by name; guards call it at every call, so it is quick."""
    if hasattr(type(value), "__slots__"):
        return dict(attributes_of(value))
    return getattr(value, "__dict__", {})


def _may_read_all(value: Any) -> bool:
    """Whether all attributes of an object count, not only those whose names are in code.

    They do if code that is not entered reads them (of a library's tensor class, or a container), or if a
    special method of the user's class computes names.
    """
    cls = type(value)
    if isinstance(value, torch.Tensor):
        return is_of_own_class(value) and not is_users_class(cls)
    return isinstance(value, _LIBRARY_CONTAINERS) or any(
        names_in(method.__code__).reads_by_computed_name() for method in special_methods(cls).values()
    )


def _names_of_parts(value: Any) -> tuple[str, ...]:
    """The attributes that make up a method, or what `aotdist.compile` makes of a function; none of others.

    Other attributes of the latter change with each artifact.
    """
    if isinstance(value, types.MethodType):
        return ("__self__", "__func__")
    is_compiled = type(value).__module__ == "aotdist.compiled" and "__wrapped__" in vars(value)
    return ("__wrapped__",) if is_compiled else ()


def _num_attributes(value: Any) -> int:
    return len(_own_attributes(value))


def _has_none_of(names: frozenset[str]) -> Callable[[Any], bool]:
    def has_none_of(value: Any) -> bool:
        return names.isdisjoint(_own_attributes(value))

    return has_none_of
