"""Random programs, written out as Python: arithmetic, views, writes, and what they are given.

A program is grown statement by statement while a rehearsal runs on scratch tensors; a statement that
eager PyTorch refuses there is left out. So every program runs in eager, and a failing example prints as
source that can be pasted into a test.
"""

from __future__ import annotations

import itertools
import linecache
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import event, reject
from hypothesis import strategies as st

from aotdist.errors import AotdistError
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.modes import class_functions_off
from aotdist.torch_seam.tensors import storage_id
from tests.semantics.observation import Around, Scene, play
from tests.semantics.vocabulary import (
    ARITHMETIC,
    COPIES_EACH,
    EMPTY_SPLIT,
    INPUTS,
    MODES,
    PARTS,
    SCOPE,
    VIEWS,
    WRITES,
    WRITES_BOTH,
    WRITES_ITEMS,
)

_serial = itertools.count()

REFUSED = (
    RuntimeError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    UserWarning,
    AotdistError,  # aotdist's own classes, by which eager does what it can
)
"""What eager raises for what it does not do."""


@dataclass(frozen=True)
class Program:
    """A program as text.

    Args:
        inputs: an expression for each argument, or the name of an argument that is passed again.
        statements: the body.
        returned: names of what is returned.
        other_inputs: the same for a second call, which may share memory otherwise; empty if it has them too.
        left_out: which of the results with history are not differentiated.
        other_kinds: which of them get a gradient of another kind, plain for wrappers.
    """

    inputs: tuple[str, ...]
    statements: tuple[str, ...]
    returned: tuple[str, ...]
    other_inputs: tuple[str, ...] = ()
    left_out: frozenset[int] = frozenset()
    other_kinds: frozenset[int] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"x{k}" for k in range(len(self.inputs)))

    def source(self) -> str:
        body = [*self.statements, f"return [{', '.join(self.returned)}]"]
        return f"def program({', '.join(self.names)}):\n" + "".join(f"    {line}\n" for line in body)

    def load(self) -> Callable[..., Any]:
        return load(self.source(), "program")

    def layouts(self) -> tuple[tuple[str, ...], ...]:
        """The inputs of each call."""
        return (self.inputs, self.other_inputs or self.inputs, self.inputs)[: 3 if self.other_inputs else 2]

    def arguments(self, inputs: Sequence[str] = ()) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for name, expression in zip(self.names, inputs or self.inputs, strict=True):
            made[name] = eval(expression, {**SCOPE, **made})
        return made

    def scenes(self, fn: Callable[..., Any] | None = None) -> list[Scene]:
        """The same function, `fn` if it is loaded already, called on different numbers."""
        fn = self.load() if fn is None else fn
        return [self._scene(fn, inputs) for inputs in self.layouts()]

    def _scene(self, fn: Callable[..., Any], inputs: Sequence[str]) -> Scene:
        arguments = self.arguments(inputs)
        with class_functions_off():
            for tensor in arguments.values():
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.retain_grad()
        leaves = {f"behind {name}": leaf for name, t in arguments.items() for leaf in leaves_behind(t)}
        return Scene(
            fn,
            tuple(arguments.values()),
            held=leaves,
            left_out=self.left_out,
            other_kinds=self.other_kinds,
            lenient=True,
        )

    def runs_in_eager(self, around: Around = nullcontext, *, backward: bool = True) -> bool:
        """Whether calling it, and differentiating what it returns, works in eager."""
        refusal = self.refused_by_eager(around, backward=backward)
        if refusal is not None:
            event(f"eager: {refusal[:60]}")
        return refusal is None

    def refused_by_eager(self, around: Around = nullcontext, *, backward: bool = True) -> str | None:
        """What eager says if it does not."""
        torch.manual_seed(1)
        try:
            for scene in self.scenes():
                with _warnings_are_errors():  # what the first layout is not warned of, another may be
                    play(scene, scene.fn, around=around, backward=backward)
        except REFUSED as error:
            return str(error)
        return None

    def __repr__(self) -> str:
        calls = ["; ".join(map("{} = {}".format, self.names, inputs)) for inputs in self.layouts()]
        return "\n" + "".join(f"    {call}\n" for call in dict.fromkeys(calls)) + self.source()


def leaves_behind(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that gradients of a tensor arrive at."""
    found, stack = [], [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            found += [node.variable] if hasattr(node, "variable") else []
            stack += [following for following, _ in node.next_functions]
    return found


@contextmanager
def _warnings_are_errors() -> Generator[None]:
    """Every warning raises, and is given every time, or a search would not repeat."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(action="error"):
            yield
    finally:
        torch.set_warn_always(False)


def load(source: str, name: str) -> Callable[..., Any]:
    """Run `source` as if it were a file of the user's, so that error messages can show its lines."""
    filename = f"generated_{next(_serial)}.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = dict(SCOPE)
    exec(compile(source, filename, "exec"), scope)
    return scope[name]


def is_strided_complex(tensor: torch.Tensor) -> bool:
    """Whether complex numbers lie apart."""
    return tensor.dtype.is_complex and not tensor.is_contiguous()


class _Rehearsal:
    """Runs statements on scratch tensors, to leave out those that eager refuses."""

    def __init__(self, arguments: dict[str, torch.Tensor]) -> None:
        self.scope: dict[str, Any] = {**SCOPE, **arguments}
        self.names = list(arguments)
        self.statements: list[str] = []

    def writes_what_it_reads(self, a: str, b: str) -> bool:
        """Whether a write of `a` that reads `b` would meet its own results: eager's are arbitrary then."""
        first, second = self.scope[a], self.scope[b]
        with class_functions_off():
            owners = [{storage_id(plain) for plain in plain_tensors(tensor)} for tensor in (first, second)]
        return a != b and not owners[0].isdisjoint(owners[1])

    def runs(self, statement: str) -> bool:
        """Run a statement; whether eager takes it."""
        try:
            with _warnings_are_errors():
                exec(statement, self.scope)
        except REFUSED:
            return False
        return True

    def add(self, statement: str, names: Sequence[str]) -> None:
        """Make a statement that was run a part of the program; it defines `names`."""
        self.statements.append(statement)
        self.names += names

    def allows(self, template: str, a: str, b: str, *, writes: bool) -> bool:
        """Whether the statement means the same to eager every time."""
        if "view(torch." in template and self.scope[a].dtype is torch.bool:
            return False  # written through such a view, a boolean is neither true nor false
        if template == WRITES_BOTH and a == b:
            return False  # where it is a view, its history and its base's are not the same afterwards
        if template == WRITES_ITEMS and a == b:
            return False
        factors = [self.scope[a], *([self.scope[b]] if "{b}" in template else [])]
        if writes and "mul" in template and any(map(is_strided_complex, factors)):
            return False  # with gaps between them, complex numbers are multiplied, and rounded, one by one
        if template == COPIES_EACH and self.scope[b].requires_grad:
            return False  # it has no derivative: what it writes has a history that nobody can go through
        if template == EMPTY_SPLIT and self.scope[a].shape[:1] == (0,):
            return False
        return not (writes and "{b}" in template and self.writes_what_it_reads(a, b))


@dataclass(frozen=True)
class Vocabulary:
    """What programs are drawn from.

    Args:
        inputs: expressions for arguments.
        squares: others, which all arguments of a program are made by, or none.
        values: expressions of new tensors and of views.
        several: expressions of several views at once.
        writes: statements.
        modes: what stands before a statement.
        repeat_inputs: whether an argument may be given twice.
        share_memory: whether an argument may be a part of another.
        other_layouts: whether a second call may share memory otherwise.
        leave_out: whether some results are not differentiated.
        other_kinds: whether some get a gradient of another kind.
        max_statements: how long programs get.
    """

    inputs: tuple[str, ...] = tuple(INPUTS.values())
    squares: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = (ARITHMETIC, VIEWS)
    several: tuple[str, ...] = ()
    writes: tuple[str, ...] = WRITES
    modes: tuple[str, ...] = MODES
    repeat_inputs: bool = True
    share_memory: bool = False
    other_layouts: bool = False
    leave_out: bool = False
    other_kinds: bool = False
    max_statements: int = 8


@st.composite
def programs(draw: st.DrawFn, vocabulary: Vocabulary | None = None, **options: Any) -> Program:
    """A program that runs in eager PyTorch (its backward may still fail there).

    Args:
        draw: hypothesis' own.
        vocabulary: what to draw from.
        options: or its fields.
    """
    words = vocabulary or Vocabulary(**options)
    count = draw(st.integers(1, 3))
    if words.squares and draw(st.booleans()):
        words = replace(words, inputs=words.squares)
    inputs = draw(_inputs(words, count))
    other = draw(_inputs(words, count)) if words.other_layouts else ()
    program = Program(inputs, (), (), other)
    torch.manual_seed(1)  # sizes may depend on numbers that the rehearsal draws
    try:
        rehearsals = [_Rehearsal(program.arguments(inputs)) for inputs in dict.fromkeys(program.layouts())]
    except (RuntimeError, IndexError):
        reject()
    for position in range(draw(st.integers(1, words.max_statements))):
        _draw_statement(draw, words, rehearsals, f"t{position}")
    rehearsal = rehearsals[0]
    returned = draw(st.lists(st.sampled_from(rehearsal.names), max_size=4))
    some = st.frozensets(st.integers(0, 3), max_size=3)
    return replace(
        program,
        statements=tuple(rehearsal.statements),
        returned=tuple(returned),
        left_out=draw(some) if words.leave_out else frozenset(),
        other_kinds=draw(some) if words.other_kinds else frozenset(),
    )


@st.composite
def _inputs(draw: st.DrawFn, words: Vocabulary, count: int) -> tuple[str, ...]:
    chosen: list[str] = []
    for position in range(count):
        before = [f"x{k}" for k in range(position)]
        again = before if words.repeat_inputs else []
        parts = [part.format(a=name) for name in before for part in PARTS] if words.share_memory else []
        kinds = (kind for kind in (words.inputs, again, parts) if kind)
        chosen.append(draw(st.one_of(*(st.sampled_from(kind) for kind in kinds))))
    return tuple(chosen)


def _draw_statement(draw: st.DrawFn, words: Vocabulary, rehearsals: Sequence[_Rehearsal], name: str) -> None:
    kinds = [*words.values, words.several, words.writes]
    template = draw(st.one_of(*(st.sampled_from(kind) for kind in kinds if kind)))
    names = rehearsals[0].names
    a, b = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    writes = template in words.writes
    if not all(rehearsal.allows(template, a, b, writes=writes) for rehearsal in rehearsals):
        return
    text, mode = template.format(a=a, b=b), draw(st.sampled_from(words.modes))
    new = (name, f"{name}b") if template in words.several else () if writes else (name,)
    text = f"{', '.join(new)}, *_ = {text}" if len(new) > 1 else f"{name} = {text}" if new else text
    if all(rehearsal.runs(f"{mode}{text}") for rehearsal in rehearsals):
        for rehearsal in rehearsals:
            rehearsal.add(f"{mode}{text}", new)
