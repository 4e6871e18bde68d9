"""What a traced stand-in shows to the user's code: the class of the tensor that it stands for.

Beneath the user's code a stand-in is a `FunctionalTensor`. If it stands for a tensor of a user's class, it
has that class, and that tensor's own `__dict__`, while the user's code runs: `type(x)`, methods, attributes
and `__torch_function__` are those of eager. This guise is taken off for each operator, and when the user's
code returns. If there is such a tensor, plain tensors of the trace show `torch.Tensor`: such classes look.

Wrapper tensors need none of this: their stand-ins are built by the class itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch

from aotdist.capture.constants import is_constant
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.classes import attributes_from_users
from aotdist.torch_seam.functional import FunctionalTensor, given_attributes, is_disguised

_assign: Callable[[Any, str, Any], None] = object.__setattr__
"""The class may have a `__setattr__` of its own."""


@dataclass(slots=True)
class _Guise:
    """One tensor's guise.

    Args:
        tensor: who wears it, held weakly: autograd replaces the result of `zeros_like` by another tensor,
            with another version counter, if anybody else holds it.
        cls: the class that it shows.
        attributes: the `__dict__` that it shows.
        beneath: its own class and `__dict__`, while it wears the guise.
    """

    tensor: ReferenceType[torch.Tensor]
    cls: type[torch.Tensor]
    attributes: dict[str, Any]
    beneath: tuple[type[torch.Tensor], dict[str, Any]] | None = None

    def put_on(self) -> None:
        tensor = self.tensor()
        if tensor is not None and self.beneath is None:
            beneath = type(tensor), vars(tensor)
            _assign(tensor, "__class__", self.cls)
            _assign(tensor, "__dict__", self.attributes)
            self.beneath = beneath

    def take_off(self) -> None:
        tensor = self.tensor()
        if tensor is not None and self.beneath is not None:
            self.cls, self.attributes = type(tensor), vars(tensor)
            cls, attributes = self.beneath
            _assign(tensor, "__class__", cls)
            _assign(tensor, "__dict__", attributes)
            self.beneath = None


class Guises:
    """The guises of one trace."""

    def __init__(self) -> None:
        self._of: dict[int, _Guise] = {}
        self._plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bare: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._are_worn = self._has_classes = False
        self._depth = 0

    def give(self, tensor: torch.Tensor, cls: type[torch.Tensor], attributes: dict[str, Any]) -> torch.Tensor:
        """Let `tensor` show this class and these attributes to the user's code.

        Raises:
            UnsupportedProgram: the class cannot be assigned to an object.
        """
        self._has_classes = True
        for plain, example in self._plain:
            hand_over_attributes([plain], [example])
            _without_attributes(plain)
            self._give(plain, type(example), vars(example))
        self._plain.clear()
        return self._give(tensor, cls, attributes)

    def stands_for_plain(self, tensor: torch.Tensor, example: torch.Tensor) -> None:
        """Note a stand-in for a `torch.Tensor`, or for a parameter."""
        if self._has_classes:
            self._give(tensor, type(example), vars(example))
        else:
            self._plain.append((tensor, example))
            self._bare.append((tensor, example))

    def stands_for_wrapper(self, tensor: torch.Tensor, example: torch.Tensor) -> None:
        """Note a stand-in that a wrapper's class has built, which has no attributes of the user's."""
        self._bare.append((tensor, example))

    def show(self, result: Any) -> Any:
        """Let the result of an operator show what the user's code is to see; returns it."""
        if self._has_classes and self._are_worn and not self._depth:
            for item in result if isinstance(result, (list, tuple)) else (result,):
                if type(item) is FunctionalTensor:
                    self._give(item, torch.Tensor, {})
        return result

    def _give(
        self, tensor: torch.Tensor, cls: type[torch.Tensor], attributes: dict[str, Any]
    ) -> torch.Tensor:
        if id(tensor) in self._of:
            self._of[id(tensor)].take_off()
        guise = self._of[id(tensor)] = _Guise(self._reference(tensor), cls, attributes)
        try:
            guise.put_on()
        except TypeError as error:
            raise UnsupportedProgram(
                f"tensors are of the class {cls.__name__}, which no other tensor can be given ({error})",
                stage="joint",
                fix=f"give {cls.__name__} no `__slots__`, or pass `x.as_subclass(torch.Tensor)`",
            ) from None
        if not self._are_worn:
            guise.take_off()
        return tensor

    def worn(self) -> AbstractContextManager[None]:
        """A context for the user's code, in which tensors have their attributes."""
        for tensor, example in self._bare:
            is_plain = isinstance(tensor, FunctionalTensor)
            for name, value in appearance(example)[1].items():
                if is_plain or is_constant(value):
                    vars(tensor).setdefault(name, value)
        self._bare.clear()
        return self._while(are_worn=True)

    def hidden(self) -> AbstractContextManager[None]:
        """A context for functions that the user's code hands to an operator; they are traced separately."""
        return self._while(are_worn=False)

    @contextmanager
    def _while(self, *, are_worn: bool) -> Generator[None]:
        before, self._are_worn = self._are_worn, are_worn
        self._change(are_worn)
        try:
            yield
        finally:
            self._are_worn = before
            if before is not are_worn:
                self._change(before)

    def _change(self, are_worn: bool) -> None:
        for guise in list(self._of.values()):
            if are_worn:
                guise.put_on()
            else:
                guise.take_off()

    @property
    def are_worn(self) -> bool:
        """Whether the user's code runs."""
        return self._are_worn

    @contextmanager
    def off(self, tensors: Iterable[torch.Tensor]) -> Generator[None]:
        """A context for operators, in which tensors (those of `among`) wear no guise."""
        guises = [self._of[id(tensor)] for tensor in tensors]
        for guise in guises:
            guise.take_off()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._are_worn:
                for guise in guises:
                    guise.put_on()

    def among(self, values: Iterable[Any]) -> list[torch.Tensor]:
        """Those of `values`, and of lists among them, that wear a guise."""
        found: list[torch.Tensor] = []
        for value in values:
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, torch.Tensor) and self._wears_one(item):
                    found.append(item)
        return found

    def _wears_one(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is FunctionalTensor:
            return False
        guise = self._of.get(id(tensor))
        if guise is None and is_disguised(tensor):
            guise = self._of[id(tensor)] = self._given_by_the_program(tensor)
        return guise is not None and guise.beneath is not None

    def _given_by_the_program(self, tensor: torch.Tensor) -> _Guise:
        """The guise of a tensor whose `__class__` the program has assigned."""
        everything, attributes = vars(tensor), given_attributes(tensor)  # type: ignore[arg-type]
        own = {name: value for name, value in everything.items() if name not in attributes}
        _assign(tensor, "__dict__", attributes)
        return _Guise(self._reference(tensor), type(tensor), attributes, (FunctionalTensor, own))

    def _reference(self, tensor: torch.Tensor) -> ReferenceType[torch.Tensor]:
        """A weak reference that removes the guise when the tensor is gone: another may get its `id`."""
        of, key = self._of, id(tensor)

        def forget(reference: ReferenceType[torch.Tensor]) -> None:
            if key in of and of[key].tensor is reference:
                del of[key]

        return ref(tensor, forget)

    def class_of(self, tensor: torch.Tensor) -> type[torch.Tensor] | None:
        """The class that a tensor shows, if it shows one."""
        guise = self._of.get(id(tensor))
        return None if guise is None else guise.cls

    def forget_attributes(self) -> None:
        """Drop the attributes, whose values are the caller's."""
        for tensor, _ in self._plain:
            _without_attributes(tensor)
        self._plain.clear()
        for guise in list(self._of.values()):  # dropping attributes may free a tensor, and its guise
            guise.attributes = {}


def hand_over_attributes(stand_ins: Iterable[torch.Tensor], examples: Iterable[torch.Tensor]) -> None:
    """Give tensors the attributes of their stand-ins, where these wear no guise."""
    for stand_in, example in zip(stand_ins, examples, strict=True):
        if isinstance(stand_in, FunctionalTensor):
            given, held = given_attributes(stand_in), vars(example)
            for name in held.keys() - given.keys():
                del held[name]
            held.update(given)


def _without_attributes(stand_in: torch.Tensor) -> None:
    if isinstance(stand_in, FunctionalTensor):
        for name in given_attributes(stand_in):
            delattr(stand_in, name)


def show_as(tensor: torch.Tensor, cls: type[torch.Tensor], attributes: Mapping[str, Any]) -> None:
    """Let a real tensor be of a class, with these attributes."""
    if type(tensor) is not cls:
        _assign(tensor, "__class__", cls)
    vars(tensor).update(attributes)


def appearance(tensor: torch.Tensor) -> tuple[type[torch.Tensor], dict[str, Any]]:
    """The class that a traced plain tensor shows, and its attributes."""
    if isinstance(tensor, FunctionalTensor):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return torch.nn.Parameter if is_parameter else torch.Tensor, given_attributes(tensor)
    return type(tensor), attributes_from_users(tensor)
