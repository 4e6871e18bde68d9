"""Names that the user's code reads and assigns: globals, and attributes of any object."""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aotdist.origins import is_of_a_package, is_of_python, is_user_file

_PROMPTS = ("<stdin>", "<string>", "<ipython")
"""Code typed at a prompt or passed to `exec` has no file, and is the user's all the same."""
_ATTRIBUTE_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_FIELD_OF = {
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME"), "globals"),
    **dict.fromkeys(_ATTRIBUTE_READS, "loaded"),
    "STORE_GLOBAL": "assigned",
    "STORE_ATTR": "stored",
}
"""The field of `Names` to which the name in an instruction is added."""
_LOADS = ("LOAD_", "STORE_FAST_LOAD_")
_LOADS_OF_OTHERS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_CLOSURE"})
_COMPUTED_READS = frozenset({"dir", "getattr", "vars"})
_GETTERS = frozenset({"attrgetter", "methodcaller"})  # of `operator`, by either way of importing
_NOT_CALLED_IN_USE = frozenset(
    {
        "__init__",
        "__new__",
        "__post_init__",
        "__init_subclass__",
        "__set_name__",
        "__del__",
    }  # create and destroy
    | {"__repr__", "__dir__", "__sizeof__"}  # display
    | {"__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__"}  # copy
)
"""Special methods that are not called where an object is used."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a function mentions, the functions defined in it included.

    Args:
        globals: global variables that it reads.
        assigned: global variables that it assigns.
        stored: attributes that it assigns, of any object.
        loaded: attributes that it reads.
        appended: variables and attributes that it appends to (`append`, `extend`), and items of them with
            constant keys (`name['key']`).
        used: variables, attributes and items that it reads or assigns in any other way.
        texts: string constants in it, those in tuples too.
    """

    globals: frozenset[str]
    assigned: frozenset[str]
    stored: frozenset[str]
    loaded: frozenset[str]
    appended: frozenset[str]
    used: frozenset[str]
    texts: frozenset[str]

    @property
    def attributes(self) -> frozenset[str]:
        """Attributes that it reads or assigns."""
        return self.stored | self.loaded

    def reads_by_computed_name(self) -> bool:
        """Whether it may read attributes by names that it computes (`getattr`, `vars`)."""
        named = self.globals | self.attributes
        return not (
            self.globals.isdisjoint(_COMPUTED_READS)
            and named.isdisjoint(_GETTERS)
            and "__dict__" not in self.attributes
        )


@functools.cache
def names_in(code: types.CodeType) -> Names:
    """The names that `code` mentions."""
    found: dict[str, set[str]] = {field.name: set() for field in dataclasses.fields(Names)}
    for each in _with_inner(code):
        instructions = list(dis.get_instructions(each))
        for instruction in instructions:
            if instruction.opname in _FIELD_OF:
                found[_FIELD_OF[instruction.opname]].add(instruction.argval)
        appended, used = _appended_and_used(instructions)
        found["appended"] |= appended
        found["used"] |= used
        found["texts"].update(_texts_in(each.co_consts))
    return Names(**{field: frozenset(names) for field, names in found.items()})


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """A piece of code, and that of the functions defined in it."""
    yield code
    for constant in filter(inspect.iscode, code.co_consts):
        yield from _with_inner(constant)


def _texts_in(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts_in(constant)


def _appended_and_used(instructions: Sequence[dis.Instruction]) -> tuple[set[str], set[str]]:
    appended: set[str] = set()
    used: set[str] = set()
    for position, instruction in enumerate(instructions):
        if not instruction.opname.startswith(_LOADS) or instruction.opname in _LOADS_OF_OTHERS:
            continue
        following = instructions[position + 1 : position + 4]
        # Later Pythons load two variables at once.
        found = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        names = [name for name in found if isinstance(name, str)]  # what `assert` raises has none
        if _appends(following[:1]):
            appended.update(names)
        elif _is_item(following):
            items = {f"{name}[{following[0].argval!r}]" for name in names}
            (appended if _appends(following[2:]) else used).update(items)
        else:
            used.update(names)
    return appended, used


def _appends(following: Sequence[dis.Instruction]) -> bool:
    return any(one.opname in _ATTRIBUTE_READS and one.argval in ("append", "extend") for one in following)


def _is_item(following: Sequence[dis.Instruction]) -> bool:
    """Whether an item is read, assigned or counted in (`d[key] += 1`) by a constant key."""
    match following:
        case [dis.Instruction(opname="LOAD_CONST"), step, *more]:
            counts = [each.opname for each in (step, *more)] == ["COPY", "COPY"]
            return counts or step.opname in ("BINARY_SUBSCR", "STORE_SUBSCR") or step.argrepr == "[]"
        case _:
            return False


def special_methods(cls: type) -> dict[str, types.FunctionType]:
    """The user's methods of a class that operators, built-in functions and statements call.

    Own and inherited ones, by name: `__getitem__`, `__len__`, `__enter__`.
    """
    found: dict[str, types.FunctionType] = {}
    for base in reversed(cls.__mro__):
        if is_users_class(base):
            is_generated = "__dataclass_fields__" in vars(base)
            for name, value in vars(base).items():
                is_special = name.startswith("__") and name.endswith("__") and name not in _NOT_CALLED_IN_USE
                if is_special and isinstance(value, types.FunctionType):
                    # What `dataclass` generates compares fields, or refuses to assign them.
                    if not (is_generated and value.__code__.co_filename == "<string>"):
                        found[name] = value
    return found


def is_users_code(code: types.CodeType) -> bool:
    """Whether a function was written by the user, rather than installed."""
    return _is_users_file(code.co_filename)


def is_users_module(module: types.ModuleType) -> bool:
    """Whether an imported module is a file of the user's."""
    return _is_users_file(getattr(module, "__file__", None) or "<builtin>")


def is_users_class(cls: type) -> bool:
    """Whether a class was written by the user, rather than installed."""
    module = sys.modules.get(cls.__module__)
    return cls.__module__ == "__main__" or (module is not None and is_users_module(module))


@functools.cache
def _is_users_file(filename: str) -> bool:
    if is_of_python(filename) or is_of_a_package(filename):
        return False
    return is_user_file(filename) or filename.startswith(_PROMPTS)
