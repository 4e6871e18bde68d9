"""Python source made at run time: names bound to objects, tensors in few characters, shown by tracebacks."""

from __future__ import annotations

import itertools
import keyword
import linecache
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

_NOT_IDENTIFIER = re.compile(r"\W+")
_serial = itertools.count()


def identifier(text: str) -> str:
    """`text` as a valid Python name: `aten.add.Tensor` -> `aten_add_Tensor`."""
    name = _NOT_IDENTIFIER.sub("_", text).strip("_") or "value"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


class Bindings:
    """Global names for objects that generated source mentions but cannot spell.

    The same object gets the same name each time; a name that is taken gets a number.

    Args:
        reserved: names that the source uses for its own locals.
    """

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken: set[str] = set(reserved)
        self._numbers: dict[str, Iterator[int]] = {}  # by stem: a thousand equal ones stay linear
        self._name_of: dict[int, str] = {}
        self._values: dict[str, Any] = {}

    def name(self, value: Any, like: str) -> str:
        """The name that stands for `value`, made from `like` the first time it is asked for."""
        existing = self._name_of.get(id(value))
        if existing is not None:
            return existing
        name = self.reserve(like)
        self._name_of[id(value)] = name
        self._values[name] = value
        return name

    def reserve(self, like: str) -> str:
        """A name made from `like` that stands for nothing else: for the source's own use."""
        name = stem = identifier(like)
        numbers = self._numbers.setdefault(stem, itertools.count(1))
        while name in self._taken:
            name = f"{stem}_{next(numbers)}"
        self._taken.add(name)
        return name

    def values(self) -> Mapping[str, Any]:
        """What to execute the source in."""
        return dict(self._values)


def load_function(source: str, function: str, bound: Mapping[str, Any], label: str) -> Callable[..., Any]:
    """Execute `source` and return its `function`; tracebacks through it show the generated lines.

    Args:
        source: a module's text that defines `function`.
        function: the name to return.
        bound: globals that the text relies on.
        label: a word for the file name that tracebacks show.
    """
    filename = f"<aotdist {label} {next(_serial)}>"
    namespace: dict[str, Any] = dict(bound)
    exec(compile(source, filename, "exec"), namespace)
    loaded = namespace.pop(function)  # out of its own globals: no cycle keeps it and its constants alive
    # An mtime of None keeps linecache from looking for the file on disk and dropping the entry.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(loaded, linecache.cache.pop, filename, None)
    return loaded


_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def tensor_text(dtype: torch.dtype, size: Sequence[Any]) -> str:
    """A tensor of this dtype and size, for a comment: `f32[8, 16]`; sizes may be symbols."""
    return f"{_DTYPES.get(dtype) or str(dtype).removeprefix('torch.')}{list(size)}"
