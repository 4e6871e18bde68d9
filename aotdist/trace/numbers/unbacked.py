"""Numbers that depend on data: how many elements a mask selects, what `count.item()` returns.

They are unknown while a program is captured. PyTorch's fakes give each a symbol without a value (*unbacked*:
`u0`), and sizes are expressions of these. In the graph, a node reads the number off a tensor, and others
compute with it. Numbers are never saved: the backward reads a number again, off a tensor that is saved.

Conditions on a number (`torch._check(count <= 4)`) are checked by nodes, too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from aotdist.sizes import NumberStep
from aotdist.torch_seam.nodes import spell
from aotdist.torch_seam.symbols import (
    SYMBOLIC,
    bind_unbacked,
    checks_of,
    depends_on_data,
    int_of_bool,
    new_float_of_data,
    num_checks,
    number_kind,
    symbols_of,
)
from aotdist.trace.failures import refusal
from aotdist.trace.tracer import Tracer

if TYPE_CHECKING:
    from aotdist.torch_seam.functional import FakeTensor
    from aotdist.torch_seam.symbols import ShapeEnv

_ATEN = torch.ops.aten
_ASSERT = _ATEN._assert_scalar.default
_ITEM = _ATEN._local_scalar_dense.default
_OTHER_NUMBERS = "numbers that depend on data are not as the program was compiled for"
"""The error of a call in which an operator would take another path than the one that was recorded."""
_OF_TWO: Mapping[Any, Callable[[Any, Any], Any]] = {max: torch.sym_max, min: torch.sym_min}
"""What computes each of these functions for two whole numbers."""
MEASURES: Mapping[Any, Callable[..., Any]] = {
    "size": _ATEN.sym_size.int,
    "stride": _ATEN.sym_stride.int,
    "storage_offset": _ATEN.sym_storage_offset.default,
}
"""The operator for each method of tensors by which PyTorch's paths read a number."""


class Unbacked:
    """The numbers of one trace that depend on data, and the nodes that read, compute and check them.

    Attributes:
        copies: a copy of each tensor of one element that was read, by the tensor's node.
        copied: these copies, by the copies' nodes.
        numbers: the numbers that were read or computed, by the name of the symbol, in order.
        steps: how those that Python computed follow from others.
        returned: names of those that the forward returns.

    Args:
        env: has their symbols.
        tracer: records the graph.
        size: gives the node of a symbolic number that is known before a call.
    """

    def __init__(self, env: ShapeEnv, tracer: Tracer, size: Callable[[Any], Any]) -> None:
        self.copies: dict[Node, FakeTensor] = {}
        self.copied: dict[Node, FakeTensor] = {}
        self.numbers: dict[str, Any] = {}
        self.steps: dict[str, NumberStep] = {}
        self.returned: frozenset[str] = frozenset()
        self._env = env
        self._graph, self._stamp = tracer.graph, tracer.stamp
        self._size = size
        self._read: dict[str, Node] = {}
        self._computed: dict[str, Node] = {}
        self._operands: dict[str, tuple[Any, ...]] = {}
        self._texts: dict[str, str] = {}
        self._num_checks = 0
        self._checked: set[str] = set()

    def read_off(self, node: Node) -> None:
        """Record nodes that read the unbacked symbols which first appear in a node's value."""
        bind_unbacked(self._env, node)
        self._read_off(node)

    @contextmanager
    def reading_off_new_nodes(self) -> Generator[None]:
        """`read_off` the nodes that PyTorch's own mode records in this context; it binds their symbols."""
        with self._new_nodes() as made:
            yield
        for node in made:
            self._read_off(node)

    def node_of(self, number: Any) -> Node:
        """The node that computes a number."""
        return self._node(number.node.expr)

    def is_traced(self, number: Any) -> bool:
        """Whether a number depends on data; the numbers of an optimizer are of other classes."""
        return type(number) in SYMBOLIC and depends_on_data(number)

    def apply(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """The result of a function of Python's: for whole numbers an expression, for floats a new symbol.

        A sympy expression of floats could round otherwise. A node is recorded once an operator takes the
        number.
        """
        if function in _OF_TWO and all(number_kind(number) is int for number in arguments):
            return functools.reduce(_OF_TWO[function], arguments)
        number = new_float_of_data(self._env, function, arguments)
        name = str(number.node.expr)
        self.numbers[name], self.steps[name] = number, NumberStep.of(function, arguments)
        self._operands[name] = arguments
        return number

    def needed_for(self, names: Iterable[str]) -> list[str]:
        """The names of all numbers that these follow from, themselves included, in order."""
        names = set(names)
        pending = list(names)
        while pending:
            step = self.steps.get(pending.pop())
            new = set() if step is None else (self.numbers.keys() & step.symbols) - names
            names |= new
            pending += new
        return [*(name for name in self.numbers if name in names), *sorted(names - self.numbers.keys())]

    def read_outside(self, name: str) -> FakeTensor | None:
        """The tensor to read a number off after the graph has run, if no node in the graph reads it."""
        read: Any = self._read.get(name)
        while read is not None and not read.users and read.target is torch.sym_ite:
            read = read.args[0]  # of a boolean
        if read is None or read.target is not _ITEM or read.users.keys() - {self._read[name]}:
            return None
        is_new = read.args[0].meta["phase"] == read.meta["phase"]
        return self.copied.get(read.args[0]) if is_new else None

    def require(self, error: type[Exception], check: Callable[[], None], text: str) -> None:
        """Register a check of the program's: a condition that numbers have to meet at every call.

        Args:
            error: the exception that the program raises if it fails.
            check: registers it with PyTorch.
            text: the exception's message.

        Raises:
            UnsupportedProgram: a graph cannot raise that error.
        """
        if error is not RuntimeError:
            what = (
                f"the program raises {error.__name__} if a number that depends on data is not as it has to be"
            )
            raise refusal(what, fix="check it by `torch._check`, or outside of the compiled function")
        before = set(map(str, checks_of(self._env)))
        check()
        new = set(map(str, checks_of(self._env))) - before
        self._texts.update(dict.fromkeys(new, text))

    def check(self) -> None:
        """Record nodes for the checks that are new since the last call; called before every operator."""
        if num_checks(self._env) == self._num_checks:
            return
        self._num_checks = num_checks(self._env)
        for expr in checks_of(self._env):
            spelled = str(expr)
            if spelled not in self._checked:
                self._checked.add(spelled)
                text = self._texts.get(spelled, f"{_OTHER_NUMBERS}: {spelled}")
                self._made(_ASSERT, (self._node(expr), text), None)

    def _read_off(self, node: Node) -> None:
        if isinstance(node.meta.get("val"), SYMBOLIC):
            self._as_number(node)
        for symbol, path in node.meta.get("unbacked_bindings", {}).items():
            if (read := self._follow(node, path)) is not None:
                self._note_read(symbol, read)

    def _note_read(self, symbol: Any, node: Node) -> None:
        self._read[str(symbol)] = node
        self.numbers.update(symbols_of(symbol, self._env))

    def _follow(self, node: Node, path: Sequence[Any]) -> Node | None:
        """A node that reads the number at a path in what `node` returns; None for a path of another kind."""
        match [_key(step) for step in path]:
            case []:
                return node
            case ["ConvertIntKey"]:
                return self._as_number(self._made(torch.sym_ite, (node, 1, 0), int_of_bool(node.meta["val"])))
            case [int() as position, *_]:
                picked = self._made(operator.getitem, (node, position), node.meta["val"][position])
                return self._follow(picked, path[1:])
            case [measure, *dim] if measure in MEASURES:
                read = MEASURES[measure]
                return self._as_number(self._made(read, (node, *dim), read(node.meta["val"], *dim)))
            case _:
                return None

    def _node(self, expr: Any) -> Node:
        spelled = str(expr)
        known = self._computed.get(spelled)
        if known is None or known._erased:
            known = self._computed[spelled] = self._new(expr)
        return known

    def _new(self, expr: Any) -> Node:
        symbols = symbols_of(expr, self._env)
        known = self._read.keys() | self.steps.keys()
        others = {name: number for name, number in symbols.items() if name not in known}
        if any(map(depends_on_data, others.values())):
            raise refusal(
                "a number is needed that depends on data, and no tensor tells it", fix="keep it a tensor"
            )
        nodes = {name: self._read[name] for name in symbols.keys() & self._read.keys()}
        nodes |= {name: self._size(number) for name, number in others.items()}
        nodes |= {name: self._step(name) for name in symbols.keys() & self.steps.keys()}
        with self._new_nodes() as made:
            node = spell(expr, nodes, self._graph)
        for number in made:
            self._as_number(number)
        return node

    def _step(self, name: str) -> Node:
        """The node of a number that Python computes."""
        known = self._computed.get(name)
        if known is None or known._erased:
            args = (self._size(arg) if isinstance(arg, SYMBOLIC) else arg for arg in self._operands[name])
            made = self._made(self.steps[name].function, tuple(args), self.numbers[name])
            known = self._computed[name] = self._as_number(made)
        return known

    @contextmanager
    def _new_nodes(self) -> Generator[list[Node]]:
        """A list that, when the context is left, is filled with the nodes that were recorded inside."""
        made: list[Node] = []
        before = next(iter(reversed(self._graph.nodes)), None)
        yield made
        made += reversed(list(takewhile(lambda node: node is not before, reversed(self._graph.nodes))))

    def _made(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Node:
        node = self._graph.create_node("call_function", target, args)
        node.meta.update(self._stamp(), val=value, original_aten=target)
        return node

    def _as_number(self, node: Node) -> Node:
        """Mark a node to be recomputed in the backward rather than saved."""
        stamp = {**self._stamp(), "original_aten": node.target}
        node.meta.update({**stamp, **node.meta, "policy": "must_recompute"})
        return node


def _key(step: Any) -> int | str:
    """A step of one of PyTorch's paths: a position, the name of a method, or the kind of the step."""
    for name in ("idx", "name"):
        if hasattr(step, name):
            return getattr(step, name)
    return type(step).__name__
