"""What an artifact may contain, and checks of what is read from one: values by the types of our data.

The classes and functions that are listed here may be in a file, and nothing else. Everything that is read
passes here before it is used or printed into a program: an index is a number, and a name is a Python name.
The printers may then trust it as they trust what was traced.
"""

from __future__ import annotations

import builtins
import functools
import json
import keyword
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NewType, TypeAlias, Union

import torch
from torch.distributed.device_mesh import DeviceMesh

from aotdist import facts
from aotdist.aliasing import metadata as changes
from aotdist.artifacts.live import GroupName, MeshName, Place
from aotdist.capture.captured import Returned
from aotdist.capture.effects import Assign, Check, Delete, EffectLog, Print, TensorResult, Tree
from aotdist.codegen.ahead import PackedLaunch
from aotdist.codegen.contract import Fusion, KernelSummary
from aotdist.codegen.triton import Packed, Result
from aotdist.convention import bases as synthetic_base
from aotdist.errors import AotdistError, BadArtifact, InternalError
from aotdist.program import Row, Slot
from aotdist.runtime.derive import BackwardRequest
from aotdist.settings import Settings
from aotdist.subclasses import protocol
from aotdist.subclasses.protocol import SPARSE_PARTS, Wrapper
from aotdist.torch_seam.autograd import CreationMeta
from aotdist.torch_seam.dtensor import layout_kinds
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.trees import TreeSpec


@dataclass(frozen=True, slots=True)
class NodeAt:
    """A node of a graph, by its position."""

    position: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The metadata of a tensor that a node computes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_OURS: tuple[type[Any], ...] = (
    *(NodeAt, Shape, Slot, Settings, Returned, Check, MeshName, GroupName, Place),
    *(EffectLog, Assign, Delete, Print, Tree, TensorResult),
    *(BackwardRequest, PackedLaunch, Result, Fusion, KernelSummary),
    *(protocol.Plain, protocol.Constant, protocol.Wrapper),
    *(synthetic_base.Member, synthetic_base.Span, synthetic_base.ViewBase, synthetic_base.BasePlan),
    *(facts.Facts, facts.BackwardFacts, facts.Choice),
    *(facts.NodeOut, facts.Untouched, facts.DataWritten),
    *(facts.NotATensor, facts.Fresh, facts.IsInput, facts.Kept, facts.Keep, facts.MetadataWrite),
    *(facts.ViewOfInput, facts.ViewOfIntermediate, facts.ViewOfOutput, facts.ViewStep, facts.FunctionView),
    *(facts.Inside, facts.ObservedGrad),
)

CLASSES: Mapping[str, type[Any]] = {str(cls.__name__): cls for cls in _OURS}
"""Dataclasses of ours by name, which are written field by field."""

NOT_WRITTEN = ("cache_folder", "cache_bytes")
"""Fields of `Settings` that belong to the machine, and are taken from the process that loads a file."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "data_of": facts.data_of,
    "assign_data": changes.assign_data,
    "release_history": changes.release_history,
    "detach_": torch.Tensor.detach_,
    "retain_grad": torch.Tensor.retain_grad,
    "requires_grad_": torch.Tensor.requires_grad_,
    **{name: getattr(operator, name) for name in ("add", "mul", "floordiv", "truediv", "mod", "pow", "neg")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_")},
    **{name: getattr(torch, name) for name in ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not")},
}
"""Functions that graphs, views and metadata writes call besides operators; the last rows are for sizes."""

HIGHER_ORDER = frozenset({"cond"})
"""Higher-order operators that graphs may call."""

NAMES_OF_FUNCTIONS: Mapping[int, str] = {id(function): name for name, function in FUNCTIONS.items()}
"""The names of `FUNCTIONS`, by identity."""

Test: TypeAlias = Callable[[Any], bool]

MAX_INT = 2**63 - 1
"""Of PyTorch's numbers; a file has no others."""

ERRORS_OF_READING = (
    *(LookupError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError),
    *(ArithmeticError, NameError, SyntaxError, MemoryError, StopIteration),
)
"""Errors that reading a damaged file may raise; `RecursionError` is a `RuntimeError`."""

_MAX_SHOWN = 60


@contextmanager
def only_ours() -> Generator[None]:
    """A block that uses what was read from a file: errors of Python or PyTorch in it mean a damaged file.

    Raises:
        BadArtifact: in place of such an error.
    """
    try:
        yield
    except InternalError as error:
        raise damaged(f"the artifact contradicts itself: {error.what}") from error
    except AotdistError:
        raise
    except ERRORS_OF_READING as error:
        what = f"the artifact contradicts itself ({type(error).__name__}: {error})"
        # contextlib re-raises a `StopIteration` that is the cause of an error, instead of the error.
        raise damaged(what) from None


def damaged(what: str) -> BadArtifact:
    """The error for a file with contents that aotdist never writes."""
    return BadArtifact(what, stage="store", fix="make the artifact again, or copy it again")


def require(value: Any, hint: Any, where: str) -> Any:
    """`value`, if it is of a type.

    Args:
        value: what was read.
        hint: the type, as in annotations; `Any` is for data without code, see `is_data`.
        where: what it belongs to, for the error.

    Raises:
        BadArtifact: it is of another type.
    """
    if not test_of(hint)(value):
        raise damaged(f"{where} is {_shown(value)}, and not {_name(hint)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(typing.get_args(hint))}"
    named = isinstance(hint, type) and not typing.get_args(hint)
    return hint.__name__ if named else str(hint).replace("typing.", "")


def made(cls: type[Any], fields: Mapping[str, Any]) -> Any:
    """An instance of one of our dataclasses, with its fields checked.

    Raises:
        BadArtifact: a field is missing, unknown, of another type, or a text that is not allowed there.
    """
    hints = _hints(cls)
    for name in fields:
        if name not in hints:
            raise damaged(f"a `{cls.__name__}` has no `{name}`")
    for name, value in fields.items():
        require(value, hints[name], f"`{cls.__name__}.{name}`")
    value = cls(**fields)
    fault = next((what for what, holds in _RULES.get(cls, ()) if not holds(value)), None)
    if fault is not None:
        raise damaged(f"a `{cls.__name__}` has {fault}")
    return value


@functools.cache
def _hints(cls: type[Any]) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def test_of(hint: Any) -> Test:
    """The test whether a value is of a type; our dataclasses are checked when made, so here by class only."""
    if isinstance(hint, NewType):
        return lambda value: type(value) is int and 0 <= value <= MAX_INT
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return lambda value: type(value) is str and value in args
    if origin in (Union, types.UnionType):
        tests = [test_of(arg) for arg in args]
        return lambda value: any(test(value) for test in tests)
    if origin is type:
        return lambda value: isinstance(value, type)
    if origin is Callable:
        return _is_function
    return _test_of_container(origin, args) if origin else lambda value: isinstance(value, hint)


def _test_of_container(origin: Any, args: tuple[Any, ...]) -> Test:
    if origin is Row:
        return _all_are(Row, test_of(args[1]))
    if origin is tuple and args[-1:] != (...,):
        tests = [test_of(arg) for arg in args]
        return lambda value: (
            type(value) is tuple
            and len(value) == len(tests)
            and all(test(part) for test, part in zip(tests, value, strict=True))
        )
    if issubclass(origin, Mapping):
        key, part = map(test_of, args)
        return lambda value: type(value) is dict and all(key(k) and part(v) for k, v in value.items())
    kinds = (tuple, list) if origin is Sequence else origin
    return _all_are(kinds, test_of(args[0]))


def _all_are(kinds: Any, test: Test) -> Test:
    return lambda value: isinstance(value, kinds) and all(map(test, value))


def _is_int(value: Any) -> bool:
    return type(value) is int and -MAX_INT <= value <= MAX_INT


def _is_float(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or _is_int(value)


def is_line(value: Any) -> bool:
    """Whether it is a text of one line, as in comments and names of slots."""
    return type(value) is str and not any(end in value for end in "\n\r\0")


def is_name(value: Any) -> bool:
    """Whether it is a Python identifier, and no keyword."""
    return type(value) is str and value.isidentifier() and not keyword.iskeyword(value)


def _is_attribute(value: Any) -> bool:
    return is_name(value) and not value.startswith("__")


def is_attribute_path(value: Any) -> bool:
    """Whether it is a path from a wrapper to a tensor inside: `._local_tensor._data`."""
    parts = value[1:].split(".") if type(value) is str and value.startswith(".") else [""]
    return all(_is_attribute(part) or part in SPARSE_PARTS for part in parts)


def _is_function(value: Any) -> bool:
    """Whether it is an operator, one of `FUNCTIONS`, or a callable dataclass of ours."""
    return isinstance(value, (OpOverload, facts.Inside)) or id(value) in NAMES_OF_FUNCTIONS


_LEAVES = (bool, int, float, complex, str, type(None))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_OBJECTS = (DeviceMesh, CreationMeta, TreeSpec, Returned, TensorResult, type)


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text, or a dtype, device, layout or the like."""
    return type(value) in _LEAVES or isinstance(value, _OF_TORCH)


def is_data(value: Any) -> bool:
    """Whether it is data (numbers, texts, classes, meshes, in containers), and neither code nor a tensor."""
    if is_plain(value) or isinstance(value, _OBJECTS) or value is ...:
        return True
    if isinstance(value, (tuple, list, frozenset)):
        return all(map(is_data, value))
    if isinstance(value, dict):
        return all(is_data(key) and is_data(part) for key, part in value.items())
    if isinstance(value, slice):
        return all(map(is_data, (value.start, value.stop, value.step)))
    return isinstance(value, (*_layouts(), *typing.get_args(facts.Place)))


@functools.cache
def _layouts() -> tuple[type[Any], ...]:
    return tuple(cls for cls, _ in layout_kinds().values())


_SIMPLE: Mapping[Any, Test] = {
    Any: is_data,
    bool: lambda value: type(value) is bool,
    int: _is_int,
    float: _is_float,
    str: lambda value: type(value) is str,
    type(None): lambda value: value is None,
}


def _are_names(pairs: Sequence[tuple[Any, ...]]) -> bool:
    return all(_is_attribute(name) for name, *_ in pairs)


def _is_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, Exception)


_POINTER = re.compile(r"\*[a-z0-9]+")


def _is_of_triton(metadata: str) -> bool:
    """Whether the kernel's name in its metadata is an identifier: files and functions are named after it."""
    fields = json.loads(metadata)
    return isinstance(fields, dict) and is_name(fields.get("name"))


_ASKED = ("is_leaf", "_version", "grad", "grad_fn")
"""Attributes of inputs that printed calls may read, see `Facts.asked`."""
_PATH = "a path that is no path of attributes"
_NAMES = "a name that is none"

_RULES: Mapping[type[Any], Sequence[tuple[str, Test]]] = {
    Slot: (
        ("a name of several lines", lambda it: is_line(it.path)),
        (_PATH, lambda it: it.inner == "" or is_attribute_path(it.inner)),
        ("the role of a symbolic size, which no file holds", lambda it: it.role != "size"),
    ),
    facts.Inside: ((_PATH, lambda it: is_attribute_path(it.path)),),
    facts.ViewStep: ((_NAMES, lambda it: _are_names(it.kwargs)),),
    facts.MetadataWrite: ((_NAMES, lambda it: _are_names(it.kwargs)),),
    facts.ObservedGrad: (("a name of several lines", lambda it: is_line(it.path)),),
    facts.Facts: (
        (
            "a question that autograd is not asked",
            lambda it: all(asked in _ASKED for _, asked, _ in it.asked),
        ),
        (
            "numbers that depend on data, which no file holds",
            lambda it: not it.numbers and not it.data_guards,
        ),
    ),
    Wrapper: ((_NAMES, lambda it: _are_names(it.attributes)),),
    Check: (("an error that is none of Python's", lambda it: _is_exception(it.error)),),
    Print: (("something to call", lambda it: it.logger is None and it.file is None),),
    PackedLaunch: ((_NAMES, lambda it: is_name(it.name)),),
    Packed: (
        (_NAMES, lambda it: all(map(is_name, (*it.pointers, *it.blocks)))),
        ("a type that no tensor has", lambda it: all(map(_POINTER.fullmatch, it.pointers.values()))),
        ("what Triton does not say of a kernel", lambda it: _is_of_triton(it.metadata)),
    ),
}
"""Conditions on our dataclasses besides the types of their fields, with the words for an error."""
