"""The tile IR: what one kernel computes at each place of its iteration space.

A kernel runs over an iteration space of result variables (`x`) and reduced variables (`r`). At each place
it evaluates expressions over loads and stores their values. One that reduces rows may also add them up: then
they are cut in parts (`p`), and each block goes through one. Expressions are immutable and compared by
value: two results that need one load or one `exp` share it, because it is the same expression.

Floating point below 32 bits is held in registers as float32: a load widens it, a store rounds it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch

from aotdist.kernels.index import Axis, Index, Var
from aotdist.kernels.polynomial import Whole

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
NARROW = frozenset({torch.bfloat16, torch.float16}) | FLOAT8
"""Floating point that is held as float32."""

Reduction = Literal["sum", "prod", "max", "min", "any", "all", "exponentials", "deviations"]
"""How values become one; the last two go with a maximum, and a mean, see `accumulation.online`."""


def held(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a value of `dtype` while it is in a register."""
    return torch.float32 if dtype in NARROW else dtype


@dataclass(frozen=True, slots=True)
class Load:
    """An element of a tensor in memory.

    Where the expression has an argument, that says whether to read it; where it is not read, it is 0.

    Args:
        buffer: the tensor's name.
        index: which element, counted in elements from the first.
        stored: its dtype in memory.
    """

    buffer: str
    index: Index
    stored: torch.dtype


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that is the same everywhere."""

    value: float | int | bool

    def __eq__(self, other: object) -> bool:
        # By their text: -0.0 is not 0.0, and nan is nan.
        return isinstance(other, Constant) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


@dataclass(frozen=True, slots=True)
class Position:
    """An index as a value."""

    index: Index


@dataclass(frozen=True, slots=True)
class Reduce:
    """The reduction of its argument along the reduced variables, or over the rows of a part.

    Args:
        kind: how.
        along: which variables are gone; a sum along `x` has a value for each part.
    """

    kind: Reduction
    along: Axis = "r"


@dataclass(frozen=True, slots=True)
class Round:
    """A value rounded to a narrower dtype."""

    to: torch.dtype


Op: TypeAlias = Load | Constant | Position | Reduce | Round | str
"""What an expression does; a word for an elementwise operation (see `aotdist.kernels.spelling`)."""


@dataclass(frozen=True)
class Expr:
    """A value at each place of an iteration space.

    Args:
        op: what is done.
        args: to which values.
        dtype: of the result, in a register.
    """

    op: Op
    args: tuple[Expr, ...]
    dtype: torch.dtype
    axes: frozenset[Axis] = field(init=False, compare=False, repr=False)
    """Along which variables it may differ from place to place in a block."""
    level: int = field(init=False, compare=False, repr=False)
    """How many reductions are nested in it: all of one level may share a loop."""
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Computed once, from the parts' own: an expression is looked up often and may be deep.
        parts, is_reduced = list(self.parts()), isinstance(self.op, Reduce)
        variables = (var for index in self.own_indices() for var in index.variables())
        own = frozenset[Axis](var.axis for var in variables if var.axis != "p")
        axes = own.union(*(part.axes for part in parts))
        if isinstance(self.op, Reduce):
            axes = frozenset[Axis]({"x"} if self.op.along == "r" else {"r"})
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "level", max((part.level for part in parts), default=0) + is_reduced)
        object.__setattr__(self, "_hash", hash((self.op, self.args, self.dtype)))

    def __hash__(self) -> int:
        return self._hash

    def own_indices(self) -> Iterator[Index]:
        """The index that it reads at, or is."""
        match self.op:
            case Load(_, index, _) | Position(index):
                yield index
            case _:
                pass

    def parts(self) -> Iterator[Expr]:
        """Its operands: the arguments, and the expressions in its index."""
        yield from self.args
        for index in self.own_indices():
            yield from (number for number in index.numbers() if isinstance(number, Expr))

    def indices(self) -> Iterator[Index]:
        """Every index in it."""
        for part in every_part((self,)):
            yield from part.own_indices()

    def substitute(self, places: Mapping[Var, Index]) -> Expr:
        """The same with other indices in the place of variables."""
        return substituted([self], places)[0]


def every_part(roots: Iterable[Expr], known: Container[Expr] = ()) -> Iterator[Expr]:
    """Each distinct subexpression of some roots, operands before their users.

    Args:
        roots: the expressions.
        known: these, and parts of these alone, are left out.
    """
    seen = set[Expr]()
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        expr, is_ready = stack.pop()
        if is_ready:
            yield expr
        elif expr not in seen and expr not in known:
            seen.add(expr)
            stack.append((expr, True))
            stack.extend((part, False) for part in expr.parts())


def substituted(roots: Iterable[Expr], places: Mapping[Var, Index]) -> list[Expr]:
    """Expressions with other indices in the place of variables; shared parts stay shared."""
    roots = list(roots)
    made: dict[Expr, Expr] = {}
    for expr in every_part(roots):
        made[expr] = Expr(_moved(expr.op, places), tuple(made[arg] for arg in expr.args), expr.dtype)
    return [made[root] for root in roots]


def _moved(op: Op, places: Mapping[Var, Index]) -> Op:
    match op:
        case Load(_, index, _) | Position(index):
            return replace(op, index=index.substitute(places))
        case _:
            return op


@dataclass(frozen=True, slots=True)
class Store:
    """A value that a kernel writes at each place of its space, or of its `x` alone.

    Args:
        buffer: the tensor's name.
        index: which element, counted in elements from the first.
        value: what to write.
        stored: the tensor's dtype.
    """

    buffer: str
    index: Index
    value: Expr
    stored: torch.dtype


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel.

    Args:
        name: of the function; what it does, and a number.
        x: the variables that results differ along, the last one fastest.
        r: the variables that are reduced, or the columns of tiles in a kernel without reductions.
        stores: what it writes.
        p: the parts that `x` goes through, if rows are added up; each part has as many.
    """

    name: str
    x: tuple[Var, ...]
    r: tuple[Var, ...]
    stores: tuple[Store, ...]
    p: Var | None = None

    @property
    def num_results(self) -> Whole:
        """Places along `x`, of all parts."""
        return self.num_in_part * (1 if self.p is None else self.p.size)

    @property
    def num_in_part(self) -> Whole:
        """Places along `x`, of one part."""
        return math.prod(var.size for var in self.x)

    @property
    def num_reduced(self) -> Whole:
        """Places along `r`; 1 if there is no such."""
        return math.prod(var.size for var in self.r)

    @property
    def is_tiled(self) -> bool:
        """Whether its blocks are tiles: it iterates along `r` without reducing."""
        return bool(self.r) and not any(isinstance(part.op, Reduce) for part in self.parts())

    def parts(self) -> Iterator[Expr]:
        """Each distinct expression in it, operands before their users."""
        return every_part(store.value for store in self.stores)

    def loads(self) -> list[Load]:
        """Its distinct loads."""
        return [part.op for part in self.parts() if isinstance(part.op, Load)]

    def indices(self) -> Iterator[Index]:
        """Every index in it."""
        for store in self.stores:
            yield store.index
        for part in self.parts():
            yield from part.own_indices()

    def ends(self) -> set[Whole]:
        """The last places that it goes to, of its space and in memory."""
        return {self.num_results, *(index.bounds[1] for index in self.indices())}

    def substitute(self, places: Mapping[Var, Index], x: tuple[Var, ...], r: tuple[Var, ...]) -> Kernel:
        """The same kernel over other variables."""
        values = substituted([store.value for store in self.stores], places)
        stores = tuple(
            replace(store, index=store.index.substitute(places), value=value)
            for store, value in zip(self.stores, values, strict=True)
        )
        return replace(self, x=x, r=r, stores=stores)
