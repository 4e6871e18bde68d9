"""What Inductor generated for the CPU, taken out of one process and put into another.

Inductor's own cache pickles; this is text, and the extension modules that hold the kernels. Of the text only
what `call` needs is run again: a generated module imports half of Inductor for names that it mentions once,
which takes 0.9 s in a new process (2 cores, torch 2.13), and the text of the kernels is for compilers.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from types import BuiltinFunctionType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch

from aotdist.codegen.contract import Emitted, Portable, Strides
from aotdist.codegen.python_source import load_function
from aotdist.torch_seam.inductor import extension_module

_ENTRY, _LIBRARY_CALLS, _COMPILES = "call", "extern_kernels", "async_compile"
_OPERATOR = re.compile(r"\btorch\.ops((?:\.\w+)+)")
_serial = itertools.count()


def portable_of(
    call: Callable[..., Any], source: str, output_strides: tuple[Strides | None, ...] | None
) -> Portable | None:
    """Take `call` out of this process; None if it needs something that cannot be taken along.

    Args:
        call: a function that Inductor generated.
        source: the text of its module.
        output_strides: see `Emitted`.
    """
    scope: dict[str, Any] = getattr(call, "__globals__", {})
    if scope.get(_ENTRY) is not call:
        return None
    module = _Module(source)
    functions = module.attributes_of(_LIBRARY_CALLS)
    bound_elsewhere = {_LIBRARY_CALLS} if _are_of_torch(functions, scope.get(_LIBRARY_CALLS)) else set[str]()
    kernels: dict[str, tuple[Path, str]] = {}
    constants: dict[str, torch.Tensor] = {}

    def is_bound(name: str) -> bool:
        value = scope.get(name)
        library = _library_of(value)
        if library is not None:
            kernels[name] = (library, cast("BuiltinFunctionType", value).__name__)
        elif isinstance(value, torch.Tensor):
            constants[name] = value
        return library is not None or isinstance(value, torch.Tensor) or name in bound_elsewhere

    text = module.text_for(_ENTRY, is_bound)
    if text is None or not all(map(is_plain_constant, constants.values())):
        return None
    paths = list(dict.fromkeys(path for path, _ in kernels.values()))
    return Portable(
        source=source,
        text=text,
        output_strides=output_strides,
        libraries=tuple(path.read_bytes() for path in paths),
        kernels={name: (paths.index(path), function) for name, (path, function) in kernels.items()},
        constants=constants,
        functions=tuple(sorted(functions)) if bound_elsewhere else (),
    )


def emitted_from(portable: Portable, label: str) -> Emitted:
    """Load what another process emitted.

    Args:
        portable: what was taken along.
        label: a word for the file name that tracebacks show.

    Raises:
        OSError: its libraries cannot be put where they can be loaded from.
        ImportError: a library does not load here.
        LookupError: it calls an operator, or a kernel, that is not there.
    """
    for dotted in set(_OPERATOR.findall(portable.text)):
        _operator(dotted)
    libraries = _loaded(portable.libraries)
    bound: dict[str, Any] = dict(portable.constants)
    for name, (position, function) in portable.kernels.items():
        bound[name] = _attribute(libraries[position], function)
    bound[_LIBRARY_CALLS] = SimpleNamespace(**{name: getattr(torch, name) for name in portable.functions})
    call = load_function(portable.text, _ENTRY, bound, label)
    return Emitted(call, portable.source, portable.output_strides, portable=lambda: portable)


def _loaded(libraries: Sequence[bytes]) -> list[ModuleType]:
    """The extension modules, from files that are gone when they are loaded.

    What is loaded is what was checked, wherever it was read from. No two have the same path in a process:
    Python would take the second for the first.
    """
    if not libraries:
        return []
    with tempfile.TemporaryDirectory(prefix="aotdist-") as folder:
        paths = [Path(folder, f"library_{next(_serial)}.so") for _ in libraries]
        for path, library in zip(paths, libraries, strict=True):
            path.write_bytes(library)
        return [extension_module(path) for path in paths]


def _operator(dotted: str) -> Any:
    return reduce(_attribute, dotted.split(".")[1:], torch.ops)


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise LookupError(str(error)) from error


def _library_of(value: Any) -> Path | None:
    """The extension module that a kernel is a function of."""
    if not isinstance(value, BuiltinFunctionType):
        return None
    module = value.__self__
    path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    return Path(path) if path and path.endswith(".so") and value.__name__.startswith("kernel") else None


def _are_of_torch(names: Iterable[str], namespace: Any) -> bool:
    return all(getattr(torch, name, None) is getattr(namespace, name, namespace) for name in names)


def is_plain_constant(constant: torch.Tensor) -> bool:
    """Whether dtype, size and elements describe a tensor fully."""
    is_plain = type(constant) is torch.Tensor and constant.layout is torch.strided
    return is_plain and constant.device.type == "cpu" and constant.is_contiguous()


class _Module:
    """The statements of a generated module, by the names that they define."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._statements = ast.parse(source).body
        self._definitions: dict[str, ast.stmt] = {}
        self._defined_twice = set[str]()
        for node in self._statements:
            for name in _defined_by(node):
                if name in self._definitions and not isinstance(node, (ast.Import, ast.ImportFrom)):
                    self._defined_twice.add(name)
                self._definitions[name] = node

    def attributes_of(self, name: str) -> frozenset[str]:
        """The attributes of `name` that any function reads: a branch is a function beside `call`."""
        return frozenset(
            node.attr
            for statement in self._statements
            for node in ast.walk(statement)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        )

    def text_for(self, name: str, is_bound: Callable[[str], bool]) -> str | None:
        """The statements that `name` needs, in order; None if a name that they read is not defined once.

        Args:
            name: a function of the module.
            is_bound: whether a name is bound elsewhere.
        """
        needed, wanted, seen = set[ast.stmt](), [name], {name}
        while wanted:
            name = wanted.pop()
            statement = self._definitions.get(name)
            if statement is None or name in self._defined_twice:
                return None
            if statement in needed:
                continue
            needed.add(statement)
            for read in _names_in(statement) - seen:
                if read == _COMPILES:  # a kernel that is in no extension module
                    return None
                seen.add(read)
                if not is_bound(read) and (read in self._definitions or not hasattr(builtins, read)):
                    wanted.append(read)
        lines = self._source.splitlines()
        in_order = (statement for statement in self._statements if statement in needed)
        texts = ("\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in in_order)
        return "\n".join(texts) + "\n"


def _defined_by(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.Import(names) | ast.ImportFrom(names=names):
            yield from (each.asname or each.name.partition(".")[0] for each in names)
        case ast.Assign(targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        case ast.FunctionDef(name) | ast.ClassDef(name):
            yield name
        case _:
            return


def _names_in(node: ast.stmt) -> set[str]:
    """The names that a statement reads of its module; those that are a function's own are left out."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    read = {each.id for each in names if isinstance(each.ctx, ast.Load)}
    if not isinstance(node, ast.FunctionDef):
        return read
    assigned = {each.id for each in names if isinstance(each.ctx, ast.Store)}
    return read - assigned - {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
