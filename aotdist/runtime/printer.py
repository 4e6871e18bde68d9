"""Prints straight-line Python, with the objects that it names, and loads it.

Composed closures take 30 to 200 us a call for 300 arguments; the same steps printed as one function take
about 6, and the user can read them (`compiled.source`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from aotdist.capture.arguments import Numbers
from aotdist.capture.instances import ArgumentObject, holds_objects, number_of
from aotdist.capture.source import Argument, Given, Held
from aotdist.codegen.python_source import Bindings, identifier, load_function
from aotdist.errors import InternalError
from aotdist.sizes import SCOPE, Expression, NumberStep, concrete, is_symbolic
from aotdist.torch_seam.symbols import SYMBOLIC, expression
from aotdist.torch_seam.trees import pytree, tree_children

_WIDTH = 100

_OWN_NAMES = frozenset(
    {
        *("Node", "call", "region", "args", "kwargs", "ctx"),
        *("given", "matched", "numbers", "objects", "results", "rng", "symbols", "tensors", "values"),
        *("abs", "float", "int", "len", "list", "max", "min", "pow", "round", "staticmethod", "type"),
        *("AttributeError", "IndexError", "KeyError"),
    }
)
"""Names that printed functions use, which names of the user's must not hide."""
_OWN_NUMBERED = re.compile(r"(?:constant_|held_|kept_|made_|o|t)\d+")


class Printer:
    """Collects lines and the objects that they name; `load` makes a function of them.

    Args:
        variables: further variables of the printed functions.
    """

    def __init__(self, variables: Iterable[str]) -> None:
        self._lines: list[str] = []
        self._indent = 0
        self._bindings = Bindings(reserved=(*_OWN_NAMES, *variables))

    def line(self, text: str = "") -> None:
        """Append one line at the current indentation.

        Raises:
            InternalError: it has a line break: a name from the user or a file could then become code.
        """
        if "\n" in text or "\r" in text:
            raise InternalError(f"{text!r} is printed as a line", stage="runtime")
        self._lines.append("    " * self._indent + text if text else "")

    def comment(self, text: str) -> None:
        """Append a comment; newlines in `text` are flattened."""
        self.line(remark(text).lstrip())

    def spread(self, head: str, items: Sequence[str], tail: str) -> None:
        """`head`, comma-separated `items` and `tail` on one line, or the items wrapped over several."""
        whole = f"{head}{', '.join(items)}{tail}"
        if 4 * self._indent + len(whole) <= _WIDTH:
            self.line(whole)
            return
        self.line(head)
        with self.indented():
            row = ""
            for item in items:
                if row and 4 * self._indent + len(row) + len(item) + 2 > _WIDTH:
                    self.line(row.rstrip())
                    row = ""
                row += f"{item}, "
            self.line(row.rstrip())
        self.line(tail.removeprefix(","))

    @contextlib.contextmanager
    def block(self, head: str) -> Generator[None]:
        """Print `head`, and indent what is printed inside."""
        self.line(head)
        with self.indented():
            yield

    @contextlib.contextmanager
    def indented(self) -> Generator[None]:
        """Indent what is printed inside."""
        self._indent += 1
        try:
            yield
        finally:
            self._indent -= 1

    def bind(self, hint: str, value: Any) -> str:
        """The global name of `value`, one for each object."""
        return self._bindings.name(value, like=f"global_{hint}" if _OWN_NUMBERED.fullmatch(hint) else hint)

    def call(self, function: Callable[..., Any], *args: object) -> str:
        """An expression that calls a function, by its own name, with argument expressions."""
        return f"{self.bind(function.__name__.lstrip('_'), function)}({', '.join(map(str, args))})"

    def concrete(self, hint: str, value: Any) -> str:
        """An expression for `value`, with the numbers of the call in place of symbols."""
        name = self.bind(hint, value)
        return self.call(concrete, name, "symbols") if is_symbolic(value) else name

    def source(self) -> str:
        """Everything printed so far."""
        return "\n".join(self._lines) + "\n"

    def load(self, function: str, label: str) -> Callable[..., Any]:
        """Execute what was printed and return its `function`; tracebacks show the printed lines."""
        return load_function(self.source(), function, self._bindings.values(), label)


def remark(text: str) -> str:
    """A comment at the end of a line; newlines in `text` are flattened."""
    return f"  # {' '.join(text.split())}"


def sequence(items: list[str]) -> str:
    """A tuple display: `(a, b)`, `(a,)`, `()`."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


Unbacked: TypeAlias = Mapping[str, int | NumberStep]
"""Unbacked symbols (numbers that depend on data): the position of the result that holds each, or how Python
computes it."""


def print_step(printer: Printer, step: NumberStep) -> str:
    """The expression of a number that Python computes."""
    return printer.call(step.function, *(print_size(printer, arg) for arg in step.args))


def print_size(printer: Printer, size: Expression) -> str:
    """The expression of a number, with the modules that it names bound."""
    for name, value in SCOPE.items():
        if f"{name}." in size:
            bound = printer.bind(name, value)
            assert bound == name, "names of expressions are reserved"
    return size


def variable_names(paths: Iterable[str], reserved: Iterable[str]) -> list[str]:
    """A different Python name for each path, none of them `reserved`: `blocks.3.a` -> `blocks_3_a`."""
    taken: set[str] = {*_OWN_NAMES, *reserved}
    names: list[str] = []
    for path in paths:
        stem = name = identifier(path)
        count = 1
        while name in taken or _OWN_NUMBERED.fullmatch(name):
            name, count = f"{stem}_{count}", count + 1
        taken.add(name)
        names.append(name)
    return names


def binder(
    printer: Printer, variables: Sequence[str], held: Sequence[Held] = ()
) -> Callable[[str, Any], str]:
    """What names the root objects of places: a global for each, or the variable of an argument."""
    names = {each: f"held_{position}" for position, each in enumerate(held)}

    def bind(hint: str, value: Any) -> str:
        if isinstance(value, Given):
            return value.name
        if isinstance(value, Held):
            return names[value]
        if isinstance(value, Numbers):
            return "numbers"
        return variables[value.position] if isinstance(value, Argument) else printer.bind(hint, value)

    return bind


def print_tree(printer: Printer, spec: pytree.TreeSpec, names: Iterator[str]) -> str:
    """The expression of a value with this structure and with leaves `names`."""
    if spec.is_leaf():
        return next(names)
    if spec.type in (tuple, list):
        items = [print_tree(printer, child, names) for child in tree_children(spec)]
        return sequence(items) if spec.type is tuple else f"[{', '.join(items)}]"
    if spec.type is dict:
        items = [
            f"{print_literal(printer, key)}: {print_tree(printer, child, names)}"
            for key, child in zip(spec.context, tree_children(spec), strict=True)
        ]
        return f"{{{', '.join(items)}}}"
    if not holds_objects(spec):
        leaves = [next(names) for _ in range(spec.num_leaves)]
        unflatten = printer.bind("unflatten", pytree.tree_unflatten)
        return f"{unflatten}([{', '.join(leaves)}], {printer.bind('structure', spec)})"
    items = [print_tree(printer, child, names) for child in tree_children(spec)]
    unflatten = printer.bind("unflatten", pytree.SUPPORTED_NODES[spec.type].unflatten_fn)
    shown = f"{unflatten}([{', '.join(items)}], {printer.bind('context', spec.context)})"
    number = number_of(spec)
    return shown if number is None else f"(made_{number} := {shown})"


def print_literal(printer: Printer, value: Any) -> str:
    """The literal of `value`, if Python has one, else a global name."""
    if isinstance(value, ArgumentObject):
        return f"objects[{value.position}]"
    if isinstance(value, SYMBOLIC):
        return print_size(printer, expression(value))
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple, torch.Size) and is_symbolic(value):
        items = [print_literal(printer, item) for item in value]
        shown = f"[{', '.join(items)}]" if type(value) is list else sequence(items)
        return printer.call(torch.Size, shown) if type(value) is torch.Size else shown
    if isinstance(value, slice) and is_symbolic(value):
        parts = (print_literal(printer, part) for part in (value.start, value.stop, value.step))
        return printer.call(slice, *parts)
    plain = type(value) in (int, str, bool, type(None)) or (
        isinstance(value, (list, tuple))
        and type(value) in (list, tuple)
        and all(type(item) is int for item in value)
    )
    return repr(value) if plain else printer.bind("value", value)
