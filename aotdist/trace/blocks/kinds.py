"""The kind of a call of a module: all that decides what it records. Two calls of one kind record the same."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aotdist.capture.ambient import ambient
from aotdist.capture.constants import is_constant
from aotdist.origins import current_tags
from aotdist.subclasses.protocol import Constant, Plain, Wrapper, is_wrapper, plain_tensors, recipe_of
from aotdist.torch_seam.autograd import in_backward
from aotdist.torch_seam.block_gradients import hears_saved_tensors
from aotdist.torch_seam.functional import (
    FakeMetadata,
    FakeTensor,
    FunctionalTensor,
    comparable,
    functional_value,
    memory_of,
)
from aotdist.torch_seam.modes import num_modes, torch_functions_off, under_transform

_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")
_MOST_OBJECTS = 500
"""To compare more objects, 2 us each, takes longer than to trace (a module may refer to its parent)."""
_CONSTANTS = frozenset({bool, int, float, str, type(None)})
"""The classes of most of what hangs on a module."""
_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, type, types.ModuleType)
_OF_TENSOR_PARALLELISM = ("torch.distributed.tensor.", "torch.distributed.device_mesh")
_STATE = ("_parameters", "_buffers", "_modules")
Attribute = tuple[int, str]
"""The number of a module, and the name of an attribute."""


class Unfit(Exception):
    """A call that has to be traced; the message says why."""


@dataclass(frozen=True, slots=True)
class Reads:
    """The attributes of modules that a call read, and what they were.

    Args:
        inside: those of modules in the block.
        outside: those of others, which the program may have changed since, with the modules.
    """

    inside: Mapping[Attribute, Hashable]
    outside: Mapping[tuple[int, str], tuple[nn.Module, Hashable]]

    @classmethod
    def of(cls, kind: Kind, reads: Mapping[tuple[int, str], nn.Module]) -> Reads:
        """What a call of a kind read; `reads` has modules by identity and name of the attribute."""
        numbers = {id(module): number for number, module in kind.modules.items()}
        named = ((numbers[module], name) for module, name in reads if module in numbers)
        inside = {at: kind.attributes[at] for at in named if at in kind.attributes}
        others = ((at, module) for at, module in reads.items() if at[0] not in numbers)
        return cls(inside, {at: (module, _shown(module, at[1])) for at, module in others})

    def hold_for(self, kind: Kind) -> bool:
        """Whether another call would read the same."""
        return all(kind.attributes.get(at) == value for at, value in self.inside.items()) and all(
            _shown(module, name) == value for (_, name), (module, value) in self.outside.items()
        )

    def of_call(self, kind: Kind) -> dict[tuple[int, str], nn.Module]:
        """What another call reads: modules, by identity and name of the attribute."""
        inside = {(id(kind.modules[number]), name): kind.modules[number] for number, name in self.inside}
        return inside | {at: module for at, (module, _) in self.outside.items()}


def _shown(module: nn.Module, name: str) -> Hashable:
    """An attribute of a module by value, if it is a constant, else by identity; None if there is none."""
    value = vars(module).get(name)
    return (type(value), repr(value)) if is_constant(value) else id(value)


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of one call of a module.

    Args:
        key: equal for calls of one kind.
        attributes: what hangs on the modules in it besides their state, by the module's number and the name.
            Only those that a call reads decide what it records: few read the number of a layer.
        tensors: the traced tensors that the call can reach through the module and its arguments, each once,
            in an order that calls of one kind share.
        modules: the modules in it, by their numbers.
        held: objects that `key` knows by their identity.
    """

    key: Hashable
    attributes: Mapping[Attribute, Hashable]
    tensors: tuple[torch.Tensor, ...]
    modules: Mapping[int, nn.Module]
    held: tuple[Any, ...]

    def is_still(self, before: Kind) -> bool:
        """Whether it equals an earlier kind, tensors included: `self.buffer = other` changes these."""
        same = list(map(id, self.tensors)) == list(map(id, before.tensors))
        return same and (self.key, self.attributes) == (before.key, before.attributes)

    def plains(self) -> list[FunctionalTensor]:
        """The plain tensors beneath `tensors`, in order."""
        return [plain for tensor in self.tensors for plain in plain_tensors(tensor)]  # type: ignore[misc]


def kind_of(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    known_stand_in: Callable[[torch.Tensor], torch.Tensor | None],
    *,
    runs_hooks: bool,
) -> Kind:
    """The kind of a call.

    Args:
        module: what is called.
        args: its arguments.
        kwargs: likewise.
        known_stand_in: gives the stand-in of a real tensor; None for one that has none yet.
        runs_hooks: whether the module's own hooks run in the call, rather than around it.

    Raises:
        Unfit: what it records depends on more than can be compared.
    """
    if in_backward() or under_transform() or hears_saved_tensors():
        raise Unfit("it is called in a backward, in a checkpoint or under a transform of `torch.func`")
    with torch_functions_off():
        described = _Described(None if runs_hooks else module, known_stand_in)
        inside = (described.value(module), *map(described.argument, (args, tuple(kwargs.items()))))
        tensors = tuple(tensor for _, tensor in described.tensors.values())
        around = (ambient(), tuple(current_tags().items()), num_modes())
        key = (inside, _described_tensors(tensors), around)
    return Kind(key, described.attributes, tensors, described.modules, tuple(described.held))


class _Described:
    """Describes a module, its attributes and state, and arguments, as something to compare.

    Args:
        root: the module whose hooks are left out, if one's are.
        known_stand_in: see `kind_of`.

    Attributes:
        tensors: the traced tensors, by identity, each with its position among them.
        held: objects that are described by their identity.
        attributes: see `Kind`.
        modules: likewise.
    """

    def __init__(
        self, root: nn.Module | None, known_stand_in: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> None:
        self._root, self._known_stand_in = root, known_stand_in
        self._numbers: dict[int, int] = {}
        self.tensors: dict[int, tuple[int, torch.Tensor]] = {}
        self.held: list[Any] = []
        self.attributes: dict[Attribute, Hashable] = {}
        self.modules: dict[int, nn.Module] = {}
        self._is_given = False

    def argument(self, value: Any) -> Hashable:
        """An argument; objects in arguments are described by what they hold, as the call may change it."""
        self._is_given = True
        return self.value(value)

    def value(self, value: Any) -> Hashable:
        """A value; modules, containers and objects by what they hold."""
        kind = type(value)
        if kind in _CONSTANTS:
            return kind, repr(value)  # 0.0 is not -0.0
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._once(value, self._module)
        if isinstance(value, (list, tuple)):
            return kind, tuple(map(self.value, value))
        if isinstance(value, dict):
            return kind, tuple((self.value(key), self.value(item)) for key, item in value.items())
        if is_constant(value):
            return kind, repr(value)
        if isinstance(value, torch.SymInt):
            return kind, comparable(value)
        if isinstance(value, (set, frozenset)):
            return kind, frozenset(map(self.value, value))
        return self._object(value)

    def _tensor(self, value: torch.Tensor) -> Hashable:
        traced = self._known_stand_in(value)
        if traced is None:
            self.held.append(value)
            return "a tensor of the program", id(value)
        if traced._backward_hooks:
            raise Unfit("a tensor that it is given has hooks")
        position, _ = self.tensors.setdefault(id(traced), (len(self.tensors), traced))
        return "tensor", position

    def _once(self, value: Any, describe: Callable[[Any], Hashable]) -> Hashable:
        """`describe(value)` the first time; a number from then on."""
        number = self._numbers.get(id(value))
        if number is not None:
            return "again", number
        number = self._numbers[id(value)] = len(self._numbers)
        if number == _MOST_OBJECTS:
            raise Unfit(f"it reaches more than {_MOST_OBJECTS} modules and objects")
        return number, type(value), describe(value)

    def _module(self, module: nn.Module) -> Hashable:
        attributes = vars(module)
        names = () if module is self._root else _HOOKS
        hooks = [hook for name in names for hook in attributes[name].values()]
        if not all(map(_is_of_tensor_parallelism, hooks)):
            raise Unfit(f"a module in it has hooks ({type(module).__name__})")
        if "forward" in attributes:
            raise Unfit(f"the forward of a module in it is replaced ({type(module).__name__})")
        number = self._numbers[id(module)]
        self.modules[number] = module
        found: list[Hashable] = list(map(self.value, hooks))
        for name, value in attributes.items():
            if name in _STATE:
                found.append((name, self.value(value)))
            elif "_hooks" not in name:
                self.attributes[number, name] = self.value(value)
        return tuple(found)

    def _object(self, value: Any) -> Hashable:
        self.held.append(value)
        if isinstance(value, functools.partial):
            return "partial", self.value(value.func), self.value(value.args), self.value(value.keywords)
        if isinstance(value, types.MethodType):
            return "method", id(value.__func__), self.value(value.__self__)
        if type(value).__module__.startswith(_OF_TENSOR_PARALLELISM):
            if type(value).__eq__ is not object.__eq__:
                return type(value), value  # placements, meshes
            return type(value), tuple((name, self.value(item)) for name, item in vars(value).items())
        if isinstance(value, types.FunctionType):
            cells = (cell.cell_contents for cell in value.__closure__ or ())
            return "function", id(value.__code__), self.value(value.__defaults__), *map(self.value, cells)
        attributes: dict[str, Any] | None = getattr(value, "__dict__", None)
        if self._is_given and not isinstance(value, _FUNCTIONS):  # which the call may change: it is compared
            if attributes is None or isinstance(value, Iterable):
                raise Unfit(f"it is given an object ({type(value).__name__}) that hides what it holds")
            return "object", self._once(value, lambda _: self.value(attributes))
        if isinstance(value, _FUNCTIONS) or attributes is None:
            return "object", id(value)
        constants = tuple((name, repr(item)) for name, item in attributes.items() if is_constant(item))
        is_data = len(constants) == len(attributes)  # two that hold the same are alike
        return "object", None if is_data else id(value), self._once(value, lambda _: constants)


def _is_of_tensor_parallelism(hook: Any) -> bool:
    """Whether a hook is one with which `parallelize_module` redistributes what a module takes and gives."""
    return (getattr(hook, "__module__", None) or "").startswith(_OF_TENSOR_PARALLELISM)


def _described_tensors(tensors: Iterable[torch.Tensor]) -> tuple[Hashable, ...]:
    """The metadata of tensors, and which of them share memory."""
    memories: dict[int, int] = {}
    return tuple((described_tensor(tensor, memories), tensor.requires_grad) for tensor in tensors)


def described_tensor(tensor: torch.Tensor, memories: dict[int, int]) -> Hashable:
    """The metadata of a traced tensor, as something to compare.

    Args:
        tensor: the tensor.
        memories: a number for each memory, in the order of first use; it is added to.

    Raises:
        Unfit: it is sparse, a constant or of a size that depends on data, or it cannot be compared.
    """
    recipe = recipe_of(tensor) if is_wrapper(tensor) else None
    found: list[Hashable] = [recipe]
    for plain in plain_tensors(tensor):
        value = functional_value(plain) if isinstance(plain, FunctionalTensor) else plain
        found += (metadata_of(value), memories.setdefault(memory_of(plain), len(memories)))
    if recipe is not None and not _is_comparable(recipe):
        raise Unfit(f"a {type(tensor).__name__} cannot be compared")
    return tuple(found)


def metadata_of(value: torch.Tensor) -> FakeMetadata:
    """The metadata of a fake.

    Raises:
        Unfit: it is no fake, or its metadata do not describe it.
    """
    metadata = FakeMetadata.of(value) if isinstance(value, FakeTensor) else None
    if metadata is None:
        raise Unfit("a tensor is sparse, a constant, or of a size that depends on data")
    return metadata


def _is_comparable(value: Any) -> bool:
    """Whether a recipe, or a part of one, compares by value."""
    if type(value) in _CONSTANTS:
        return True
    if isinstance(value, Plain):
        return all(type(number) is int for number in (*value.size, *value.stride))
    if isinstance(value, Wrapper):
        return all(map(_is_comparable, (value.context, value.size, value.stride, value.attributes)))
    if isinstance(value, Constant):
        return _is_comparable(value.value)
    if isinstance(value, (list, tuple)):
        return all(map(_is_comparable, value))
    is_shared = type(value).__module__.startswith("torch.distributed")
    return is_shared or isinstance(value, type) or is_constant(value)
