"""Python numbers that follow from tensors: `step.item()`, and what a program computes of it in Python.

An optimizer computes a few numbers in Python before it hands them to operators: `lr / (1 - beta ** step)`.
Tensors would give other bits, so Python computes these at run time, too: reading a tensor is a node, and so
is each operation of Python's on a number that was read.

While a program runs inside of `Scalars.followed`, a number that is read is a `TracedFloat` or a `TracedInt`.
PyTorch takes these for numbers (they are `SymFloat`s and `SymInt`s). Its functions are called with another
number in their place, a *token*, which the recorder recognises among the arguments of operators. If a token
reaches no operator, PyTorch computed with it on the way, and the program is refused. It is also refused if
Python needs the value: `float(t)`, a key of a dictionary, a text.

A program may branch on such a number (`if rho > 5`) if it follows from tensors whose values are known before
a call. The trace is then for calls with the same answers, see `Scalars.guard`.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from aotdist.errors import UnsupportedProgram
from aotdist.facts import DataGuard
from aotdist.origins import holding
from aotdist.torch_seam.modes import torch_functions_off
from aotdist.torch_seam.symbols import as_pytorchs
from aotdist.torch_seam.trees import pytree
from aotdist.trace.failures import needs_value, only_at_a_call, refusal, wants_number
from aotdist.trace.numbers import data_guards
from aotdist.trace.numbers.python_numbers import functions_recorded

_READ = torch.ops.aten._local_scalar_dense.default
_KINDS: Mapping[torch.dtype, type] = {
    torch.float64: float,
    torch.float32: float,
    torch.bfloat16: float,
    torch.float16: float,
    torch.int64: int,
    torch.int32: int,
}
"""The Python type of an element of a tensor."""
DTYPES: Mapping[type, torch.dtype] = {float: torch.float64, int: torch.int64}
"""The dtypes of tensors that carry Python's numbers without a loss."""
KNOWN = "known"
"""Where nodes of numbers that are known before a call note what these are in the call that is traced."""
_TOKENS_FROM = 1 << 44
"""Tokens are whole numbers from here on: below 2**53, so that floats hold them exactly, and no real sizes."""
_READERS = (torch.Tensor.item, torch.Tensor.tolist)
"""Methods that return the number which they read, so that a token may become a traced number again."""
_CONVERSIONS: Mapping[Any, str] = {
    torch.Tensor.__float__: "float",
    torch.Tensor.__int__: "int",
    torch.Tensor.__complex__: "complex",
}
"""Conversions whose result has to be a number of Python's own, and their names."""

CreateNode: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Node]


class Scalars:
    """The Python numbers of one trace.

    Attributes:
        values: nodes whose values are known before a call, with the tensors that hold them now.
        reads: whether numbers that are read off tensors are traced, or only those that are traced already.
        is_over: whether the program has run: numbers that it stored become outputs.

    Args:
        values: pairs of a stand-in and the tensor that holds its value, which is known before a call.
        node_of: gives the node that computes a stand-in.
    """

    def __init__(
        self, values: Sequence[tuple[torch.Tensor, torch.Tensor]], node_of: Callable[[torch.Tensor], Node]
    ) -> None:
        self.values = {node_of(stand_in): real for stand_in, real in values}
        self._node_of = node_of
        self._known: dict[Node, Any] = dict(self.values)
        self._asked: list[tuple[Node, bool]] = []
        self._tokens, self._made = dict[float, TracedNumber](), dict[Any, TracedNumber]()
        self._arrived, self._read = set[float](), list[float]()
        self._numbers = itertools.count(_TOKENS_FROM)
        self._create: CreateNode | None = None
        self._root = torch.nn.Module()
        self.reads, self.is_over = True, False

    @contextlib.contextmanager
    def followed(self) -> Generator[None]:
        """In this context, numbers that are read off tensors are traced."""
        with holding(_CURRENT, self), functions_recorded(self.is_traced, self.apply), _Tokens(self):
            yield

    def read(
        self, arguments: tuple[Any, ...], tensor: torch.Tensor, create: CreateNode, root: torch.nn.Module
    ) -> float | None:
        """A token for the number in a tensor; None if Python has no number for it that could be traced.

        Of a condition it is the answer, if that is there before a call: the program chooses by it.

        Args:
            arguments: of the operator that reads it.
            tensor: the tensor.
            create: makes a node.
            root: holds the constants of the graph.
        """
        self._create, self._root = create, root
        if not self.reads:
            return None
        if tensor.dtype is torch.bool:
            with contextlib.suppress(data_guards.NotKnown):
                holds = self._result_of(_READ, arguments)
                self._asked.append((self._number(_READ, arguments, bool).made_by, holds))
                return holds
        if (kind := _KINDS.get(tensor.dtype)) is None:
            return None
        self._read.append(self.token(self._number(_READ, arguments, kind)))
        return self._read[-1]

    def is_traced(self, number: Any) -> bool:
        """Whether a value is one of these numbers."""
        return isinstance(number, _Number)

    def apply(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """The number that `function` computes from numbers, some of them traced: traced itself."""
        arguments = [
            float(one) if isinstance(one, float) and not self.is_traced(one) else one for one in arguments
        ]  # NumPy's floats would be printed as its own
        symbols = [one.symbol if isinstance(one, TracedNumber) else one for one in arguments]
        are_whole = all(type(symbol) in (int, torch.SymInt) for symbol in symbols)
        if are_whole and function in _COMPARISONS:
            return function(*symbols)
        ones = [one.kind(1) if isinstance(one, TracedNumber) else one for one in arguments]
        kind = type(function(*ones))
        if kind is int and any(isinstance(one, float) for one in ones):
            kind = float  # which of them `max` and `min` return is not known
        given = (one.made_by if isinstance(one, TracedNumber) else one for one in arguments)
        number = self._number(function, tuple(given), kind)
        if are_whole and function in _EXACT:
            number.symbol = function(*symbols)
        return number

    def _number(self, function: Callable[..., Any], arguments: tuple[Any, ...], kind: type) -> TracedNumber:
        """The traced number that `function` computes; the same object for the same arguments."""
        key = (function, tuple((type(argument), argument) for argument in arguments))
        if key not in self._made:
            assert self._create is not None, "the first number of all was read"
            node = self._create(function, arguments, {})
            node.meta["val"] = kind(1)
            if self._known.keys() >= set(node.all_input_nodes):
                with contextlib.suppress(ArithmeticError, ValueError):  # the program may not use it
                    self._known[node] = node.meta[KNOWN] = self._result_of(function, arguments)
            self._made[key] = _CLASSES[kind](self, node)
        return self._made[key]

    def token(self, number: TracedNumber) -> float:
        """A new token for `number`."""
        token = number.kind(next(self._numbers))
        self._tokens[token] = number
        return token

    def behind(self, token: Any) -> TracedNumber | None:
        """The number that `token` stands for, if it is a token."""
        return self._tokens.get(token) if type(token) in (float, int) else None

    def tokens_among(self, arguments: Any) -> list[float]:
        """The tokens in the arguments of an operator."""
        return [leaf for leaf in pytree.tree_leaves(arguments) if self.behind(leaf) is not None]

    def arrive(self, tokens: Iterable[float]) -> None:
        """Note that an operator which takes the numbers behind `tokens` was recorded."""
        self._arrived.update(tokens)

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tokens: Sequence[float],
    ) -> Any:
        """Call a function of PyTorch's.

        Args:
            function: the function.
            args: its positional arguments.
            kwargs: its named ones.
            tokens: the tokens among these.

        Raises:
            UnsupportedProgram: it computes with a token, or with one that it reads, without an operator.
        """
        self._read.clear()
        result = function(*args, **kwargs)
        if function in _READERS and (number := self.behind(result)) is not None:
            return number
        if not self._arrived.issuperset([*tokens, *self._read]):
            if function in _CONVERSIONS:
                raise wants_number(_CONVERSIONS[function])
            raise needs_value(getattr(function, "__name__", str(function)))
        return result

    def answer(self, number: TracedNumber) -> bool:
        """Whether `number` is true now; the program branches on it.

        Raises:
            UnsupportedProgram: its value is not known before the call.
        """
        try:
            holds = self._result_of(bool, (number.made_by,))
        except data_guards.NotKnown:
            raise refusal(
                "the program chooses by a number that it computes in the same call",
                fix="use `torch.where`, or `max` and `min`",
            ) from None
        self._asked.append((number.made_by, holds))
        return holds

    def symbol_of(self, number: Any) -> Any:
        """The symbol of a number that the program has stored; an error while the program runs."""
        if not self.is_over:
            raise number.refusal()
        return self.carrying(number).item()

    def carrying(self, number: TracedNumber) -> torch.Tensor:
        """A tensor that takes a number out of the graph."""
        with self.followed():
            tensor = torch.scalar_tensor(number, dtype=DTYPES[number.kind])  # pyright: ignore[reportArgumentType]
        if number.made_by in self._known:
            self._node_of(tensor).meta[KNOWN] = self._known[number.made_by]
        return tensor

    def guard(self) -> DataGuard | None:
        """What the program branched on, to be asked of the tensors that `values` are for; None if nothing."""
        if not self._asked:
            return None
        nodes, holds = zip(*self._asked, strict=True)
        return DataGuard(data_guards.as_function(nodes, list(self.values), self._root), holds)

    def _result_of(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with torch_functions_off():
            return data_guards.result_of(function, arguments, {}, self._root, self._known)


_CURRENT: ContextVar[Scalars | None] = ContextVar("aotdist_scalars", default=None)


def current_scalars() -> Scalars | None:
    """The numbers of the trace that runs, where they are followed."""
    return _CURRENT.get()


class TracedNumber:
    """A number of the trace.

    Args:
        scalars: all of that trace.
        made_by: the node that computes it.

    Attributes:
        symbol: its symbol outside of the graph, if it is an argument, or read or stored by the program.
    """

    kind: type = bool
    symbol: Any = None

    def __init__(self, scalars: Scalars, made_by: Node) -> None:
        self.scalars = scalars
        self.made_by = made_by

    def __bool__(self) -> bool:
        return self.scalars.answer(self)

    def __repr__(self) -> str:
        return f"a number that is only known at a call ({self.made_by.name})"


class _Number(TracedNumber):
    """A number that Python computes with."""

    def refusal(self) -> UnsupportedProgram:
        """The error of who asks for its value."""
        return only_at_a_call()

    @property
    def node(self) -> Any:
        """The attribute by which PyTorch asks a symbolic number for its value.

        Raises:
            UnsupportedProgram: it is none of the call's arguments, and the program runs.
        """
        if self.symbol is None:
            self.symbol = self.scalars.symbol_of(self)
        return self.symbol.node

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """The type that it has in eager, for `isinstance`."""
        return self.kind

    def __bool__(self) -> bool:
        return bool(self.scalars.apply(operator.ne, (self, 0)))

    def _asked(self, *_: Any, **__: Any) -> Any:
        raise self.refusal()

    __float__ = __int__ = __index__ = _asked
    __hash__ = __str__ = __format__ = _asked
    __floor__ = __ceil__ = __trunc__ = __round__ = _asked
    numerator = denominator = property(_asked)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """What NumPy's numbers compute with it: they come first in `decay * rate`."""
        function = getattr(operator, _OF_NUMPY.get(ufunc.__name__, ""), None)
        if function is None or method != "__call__" or options:
            raise self.refusal()
        return self.scalars.apply(function, inputs)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


class TracedFloat(_Number, torch.SymFloat):
    """A `float` of the trace."""

    kind = float


class TracedInt(_Number, torch.SymInt):
    """An `int` of the trace."""

    kind = int


_EXACT = frozenset({operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg})
_COMPARISONS = frozenset({operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne})
"""Operations that sympy computes exactly on whole numbers; the answer of a comparison becomes a guard."""


_CLASSES: Mapping[type, type[TracedNumber]] = {bool: TracedNumber, float: TracedFloat, int: TracedInt}


def _operator(function: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: _Number, *others: Any) -> Any:
        if not all(isinstance(other, (int, float, _Number)) for other in others):
            return NotImplemented
        return self.scalars.apply(function, (*others, self) if reflected else (self, *others))

    return method


_OF_NUMPY = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv", "power": "pow"}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(_Number, f"__{_name}__", _operator(getattr(operator, _name)))
    setattr(_Number, f"__r{_name}__", _operator(getattr(operator, _name), reflected=True))
for _name in ("neg", "pos", "abs", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_Number, f"__{_name}__", _operator(getattr(operator, _name)))


class _Tokens(TorchFunctionMode):
    """Hands tokens to PyTorch in the place of numbers of the trace."""

    def __init__(self, scalars: Scalars) -> None:
        super().__init__()
        self._scalars = scalars

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        tokens: list[float] = []

        def token(number: Any) -> Any:
            if isinstance(number, TracedInt) and number.symbol is not None:
                return as_pytorchs(number.symbol)  # which may be a size
            tokens.append(self._scalars.token(number))
            return tokens[-1]

        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and isinstance(args[0], _Number):
            # The token would be the tensor's data.
            default = torch.get_default_dtype() if args[0].kind is float else torch.int64
            func, kwargs = torch.scalar_tensor, {"dtype": default, **kwargs}
        given, named = pytree.tree_map_only(_Number, token, (args, kwargs))
        return self._scalars.call(func, given, named, tokens)
