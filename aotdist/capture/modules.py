"""The state of a module tree: tensors that are inputs, constants to guard, and how to trace with stand-ins.

A parameter or buffer in several places (tied weights) is one input. A `ModuleGuard` compares submodules,
constant attributes, `training` flags, hooks and classes (some conversions change them in place): if one of
these has changed, the artifact does not fit.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aotdist.capture.code import is_users_class
from aotdist.capture.constants import is_constant, same_constant
from aotdist.capture.module_attributes import HOOKS, PrintedSource
from aotdist.capture.source import Source
from aotdist.errors import UnsupportedProgram
from aotdist.origins import inside_module, set_current_line, set_current_module, with_paths
from aotdist.torch_seam.modules import global_module_hooks, own, shared, within

KINDS = ("_parameters", "_buffers")
"""The dictionaries of a module that hold its parameters and buffers."""

# With these a guard reads many dictionaries in C, 0.04 us each; a loop in Python takes 0.07.
_get: Callable[[dict[str, Any], str], Any] = dict[str, Any].get
_has = dict[str, Any].__contains__
_FORWARD = itertools.repeat("forward")

_NAMED = (*KINDS, "_non_persistent_buffers_set")
"""Attributes with names of state, which a program may iterate over (`parameters()`, `state_dict()`)."""


StatePlace: TypeAlias = tuple[dict[str, Any], str]
"""One dictionary entry that holds a tensor: `module._parameters["weight"]`."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A parameter or buffer, once, with every place that holds it.

    Args:
        path: its qualified name; of tied ones, the first.
        value: the tensor now.
        places: where to read it (the first) and where its stand-in goes while tracing (all).
    """

    path: str
    value: torch.Tensor
    places: tuple[StatePlace, ...]

    def source(self) -> Source:
        """Where to read it at each call."""
        owner, key = self.places[0]
        return Source(self.path, owner).item(key, self.path)


def named_modules(roots: Sequence[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Every module below `roots` by qualified name, shared ones once."""
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    for prefix, root in roots:
        for name, module in root.named_modules(memo=seen, prefix=prefix):
            found[name] = module
    return found


def own_tensors(prefix: str, module: nn.Module, kind: str) -> Iterator[tuple[str, StatePlace, torch.Tensor]]:
    """A module's own parameters or buffers: names that begin with the module's, places, and what is there.

    Args:
        prefix: the module's name.
        module: the module.
        kind: one of `KINDS`.
    """
    owner: dict[str, Any] = shared(vars(module)[kind])
    for key, value in own(owner).items():
        if value is not None:
            yield f"{prefix}.{key}" if prefix else key, (owner, key), value


def state_tensors(modules: Mapping[str, nn.Module]) -> list[StateTensor]:
    """Parameters, then buffers, of all `modules`; a tensor in several places once."""
    places: dict[int, list[StatePlace]] = {}
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for kind in KINDS:
        for prefix, module in modules.items():
            for path, place, value in own_tensors(prefix, module, kind):
                _refuse_uninitialised(value, path)
                first.setdefault(id(value), (path, value))
                places.setdefault(id(value), []).append(place)
    return [StateTensor(path, value, tuple(places[key])) for key, (path, value) in first.items()]


def refuse_script(path: str, module: nn.Module) -> None:
    """Refuse a module of TorchScript: its parameters and its code are not Python's.

    Args:
        path: of the module, in the one that is compiled.
        module: the module.

    Raises:
        UnsupportedProgram: it is one.
    """
    if isinstance(module, torch.jit.ScriptModule):
        name = f"`{path}`" if path else "the module"
        raise UnsupportedProgram(
            f"{name} is a {type(module).__name__} of TorchScript (`torch.jit`), which cannot be looked into",
            stage="capture",
            fix="compile the module that it was made of",
        )


def _refuse_uninitialised(value: torch.Tensor, path: str) -> None:
    if is_lazy(value):
        raise UnsupportedProgram(
            f"`{path}` has no shape yet: its module is lazy and was never called",
            stage="capture",
            fix="call the module once before it is compiled",
        )


@contextlib.contextmanager
def swapped(state: Sequence[StateTensor], stand_ins: Sequence[torch.Tensor]) -> Generator[None]:
    """A context in which `stand_ins` are in the places of `state`."""
    entries = [(own(owner), key) for tensor in state for owner, key in tensor.places]
    before = [owner[key] for owner, key in entries]
    try:
        for tensor, stand_in in zip(state, stand_ins, strict=True):
            for owner, key in tensor.places:
                own(owner)[key] = stand_in
        yield
    finally:
        for (owner, key), value in zip(entries, before, strict=True):
            owner[key] = value


def attribute_tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[Source, torch.Tensor]]:
    """Tensors in plain attributes, neither parameter nor buffer."""
    for prefix, module in modules.items():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                path = f"{prefix}.{name}" if prefix else name
                yield Source(path, vars(module)).item(name, path), value


@contextlib.contextmanager
def following_modules(modules: Mapping[str, nn.Module]) -> Generator[None]:
    """Keep `aotdist.origins` informed of the module whose forward, or hook, is running."""
    names = {module: name for name, module in modules.items()}
    try:
        with (
            with_paths(names),
            within(lambda module: inside_module(names[module]) if module in names else None),
        ):
            yield
    finally:
        set_current_module("")
        set_current_line("")


class ModuleGuard:
    """A guard: whether a module tree is as it was at capture. Every call asks, so it has to be quick.

    It takes about 20 us for 80 modules with 320 constants.

    Args:
        modules: the modules, by qualified name.
        state: their parameters and buffers.
        read: names of the attributes that the program's code reads, if all of its code is known.
        open_: spots (`Source.spot`) of constants that may differ from call to call, which are not compared.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        state: Sequence[StateTensor],
        read: frozenset[str] | None = None,
        open_: Container[tuple[int, str]] = (),
    ) -> None:
        hooks: list[Mapping[Any, Any]] = [
            getattr(module, name) for module in modules.values() for name in HOOKS
        ]
        hooks += global_module_hooks()
        children = [vars(module)["_modules"] for module in modules.values()]
        named = [vars(module).get(kind, ()) for module in modules.values() for kind in _NAMED]
        self._held = tuple((holder, tuple(holder.values())) for holder in (*hooks, *children) if holder)
        self._named = tuple(holder for holder in named if holder)
        self._constants = tuple(
            (vars(module), name, value, f"{prefix}.{name}" if prefix else name)
            for prefix, module in modules.items()
            for name, value in vars(module).items()
            if is_constant(value) and not isinstance(value, PrintedSource)
            # It is set where backward hooks are registered, which are compared themselves.
            if name != "_is_full_backward_hook"
            if (id(vars(module)), name) not in open_
        )
        self._without_forward = tuple(vars(m) for m in modules.values() if "forward" not in vars(m))
        self._owners = tuple(own for own, _, _, _ in self._constants)
        self._attribute_names = tuple(name for _, name, _, _ in self._constants)
        self._values = tuple(value for _, _, value, _ in self._constants)
        self._unset = tuple(_unset_places(modules.values()))
        self._modules = tuple(modules.values())
        self._classes = tuple(map(type, self._modules))
        # A new attribute may hide one of the class, or the program may look for it by name.
        self._attributes = tuple(map(vars, self._modules))
        # A call reads all parameters and buffers, so it notices missing ones; new ones are noticed here.
        # Comparing names would take 7 us for 300 dictionaries; comparing lengths takes 3 us for 225, and half
        # of that for those that were empty: most are, as each module has seven dictionaries of hooks.
        self._empty = tuple(holder for holder in (*hooks, *children, *named) if not holder)
        self._counted = (*self._attributes, *self._named)
        self._counts = list(map(len, self._counted))
        shared: dict[frozenset[str], frozenset[str]] = {}  # by modules of one kind
        self._names = tuple(shared.setdefault(names, names) for names in map(frozenset, self._attributes))
        self._read = tuple(read if _is_of_known_code(cls) else None for cls in self._classes)
        self._ties = tuple((tensor.places[0], other) for tensor in state for other in tensor.places[1:])

    def __call__(self) -> bool:
        """Whether everything is as it was."""
        if tuple(map(type, self._modules)) != self._classes:
            return False
        if any(self._empty):
            return False
        if list(map(len, self._counted)) != self._counts and not self._has_noted_attributes():
            return False
        for holder, values in self._held:
            if tuple(holder.values()) != values:
                return False
        found = map(_get, self._owners, self._attribute_names)
        if not all(map(operator.is_, found, self._values)) and not self._has_equal_constants():
            return False
        if any(map(_has, self._without_forward, _FORWARD)):
            return False
        for owner, key in self._unset:
            if owner.get(key, "is gone") is not None:
                return False
        return not self._ties or all(one[a] is other[b] for (one, a), (other, b) in self._ties)

    def _has_equal_constants(self) -> bool:
        return all(same_constant(own.get(name), value) for own, name, value, _ in self._constants)

    def _has_noted_attributes(self) -> bool:
        """Whether the only difference is new attributes that the program does not read; these are noted."""
        counts, num_modules = list(map(len, self._counted)), len(self._modules)
        if counts[num_modules:] != self._counts[num_modules:]:
            return False
        for attributes, names, read in zip(self._attributes, self._names, self._read, strict=True):
            new = attributes.keys() - names
            if new if read is None else not read.isdisjoint(new):
                return False
        self._counts = counts
        return True

    def constants(self) -> Iterator[tuple[Source, Any]]:
        """Attributes that are constants, with their places."""
        for held, name, value, path in self._constants:
            yield Source(path, held).item(name, path), value

    def described(self) -> dict[str, str]:
        """All that is compared, by name, as text: for reports of why a call needed another artifact."""
        values = {f"`{path}`": repr(value) for _, _, value, path in self._constants}
        held = [", ".join(_describe(value) for value in values) for _, values in self._held]
        classes = ", ".join(cls.__qualname__ for cls in self._classes)
        return values | {
            "hooks and submodules": "; ".join(held),
            "names of parameters and buffers": ", ".join(itertools.chain.from_iterable(self._named)),
            "classes of modules": classes,
            "tied weights": str(len(self._ties)),
        }


def _is_of_known_code(cls: type) -> bool:
    """Whether the attributes that a module's code reads are known: of the user's and of PyTorch's modules."""
    return is_users_class(cls) or cls.__module__.partition(".")[0] == "torch"


def _unset_places(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str]]:
    """Places of parameters and buffers that are None, where a tensor may appear later."""
    for module in modules:
        for owner in (vars(module)[kind] for kind in KINDS):
            yield from ((owner, key) for key, value in owner.items() if value is None)


def _describe(value: Any) -> str:
    return getattr(value, "__qualname__", type(value).__name__)
