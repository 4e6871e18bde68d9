"""Kernels as Triton source.

A kernel without reductions is straight-line code over a block of places. A kernel that reduces has a block of
results by a block of reduced elements: persistent, if one block holds all that is reduced, else with loops:
one for each level of reductions that need each other (the sum of exponentials needs the maximum), and a last
one for elementwise results that need them. A loop recomputes what an earlier one computed at the same place.
A kernel that adds up rows loops over those of its part, a block of rows at a time. A kernel that reduces
nothing may have tiles for blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from aotdist.kernels.access import axes_of, axis_of, fast_axis, is_divided, vector_length
from aotdist.kernels.accumulation import combined_lanes, identity, kind_of, lanes_of, maximum_of, updated
from aotdist.kernels.index import Atom, Axis, Index, Lookup, Quotient, Remainder, Var
from aotdist.kernels.ir import (
    FLOAT8,
    NARROW,
    Constant,
    Expr,
    Kernel,
    Load,
    Position,
    Reduce,
    Round,
    Store,
    every_part,
)
from aotdist.kernels.launching import num_stages_of
from aotdist.kernels.polynomial import Polynomial, Values, Whole, number_at
from aotdist.kernels.spelling import TYPES, block_of, number, spelled

BLOCK_NUMBER = "tl.program_id(0)"
LARGE = 2**31
"""Beyond 32 bits."""
SIDE_BY_SIDE = 8
"""Elements that a thread has side by side of a block, 16 bytes of 16-bit floating point."""
IS_LARGE = "IS_LARGE"
"""The argument that says whether places lie there, of kernels where that depends on the call."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A kernel as text.

    Args:
        name: of the function.
        inputs: names of the tensors that it reads, in the order of its arguments.
        outputs: names of those that it writes, after them.
        blocks: its last arguments, which are constants.
        sizes: its arguments before them: numbers that differ from call to call.
        body: its lines.
        over: outputs that are stored over an input, and so are no arguments, with that input.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    blocks: tuple[str, ...]
    sizes: tuple[Polynomial, ...]
    body: tuple[str, ...]
    over: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def tensors(self) -> list[str]:
        """Its first arguments."""
        written = (name for name in self.outputs if name not in self.over)
        return [*(f"in_{name}" for name in self.inputs), *(f"out_{name}" for name in written)]

    @property
    def source(self) -> str:
        """A function for `triton.jit`, with its decorator."""
        names = [name_of_size(at) for at in range(len(self.sizes))]
        blocks = (f"{block}: tl.constexpr" for block in self.blocks)
        header = f"@triton.jit\ndef {self.name}({', '.join([*self.tensors, *names, *blocks])}):"
        meanings = [f"# {name} = {size}" for name, size in zip(names, self.sizes, strict=True)]
        return "\n".join([header, *(f"    {line}" for line in (*meanings, *self.body))]) + "\n"


def name_of_size(at: int) -> str:
    """What a kernel calls one of its sizes."""
    return f"size{at}"


def is_large(ends: Iterable[Whole], values: Values | None) -> bool:
    """Whether places lie beyond 32 bits.

    Args:
        ends: the last ones.
        values: of symbols, see `number_at`.
    """
    return any(number_at(end, values) >= LARGE for end in ends)


def print_kernel(kernel: Kernel, *, is_persistent: bool) -> Printed:
    """Print a kernel.

    Args:
        kernel: what to print.
        is_persistent: whether all that is reduced fits into one block.
    """
    inputs = tuple(dict.fromkeys(load.buffer for load in kernel.loads()))
    outputs = tuple(store.buffer for store in kernel.stores)
    writer = _Writer(kernel)
    body = tuple(_body(writer, is_persistent=is_persistent))
    blocks = ("XBLOCK", *(("RBLOCK",) if kernel.r else ()), *((IS_LARGE,) if writer.may_be_large else ()))
    return Printed(kernel.name, inputs, outputs, blocks, tuple(writer.sizes), body)


def _body(writer: _Writer, *, is_persistent: bool) -> Iterator[str]:
    kernel = writer.kernel
    if kernel.p is not None:
        yield from writer.rows_of_a_part()
        return
    if kernel.is_tiled:
        yield from writer.tile()
        return
    yield from writer.x()
    if not kernel.r:
        for store in kernel.stores:
            yield from writer.store(store)
    elif is_persistent:
        yield f"r = {writer.block_of_r()}"
        yield from writer.r()
        for store in kernel.stores:
            yield from writer.store(store)
    else:
        pending = [store for store in kernel.stores if _is_along_r(store)]
        for level in sorted({part.level for part in kernel.parts() if isinstance(part.op, Reduce)}):
            now = [store for store in pending if store.value.level < level]
            yield from writer.reductions(level, now)
            pending = [store for store in pending if store not in now]
        for store in kernel.stores:
            if not _is_along_r(store):
                yield from writer.store(store)
        yield from writer.stores_along_r(pending)


def _is_along_r(store: Store) -> bool:
    return "r" in store.value.axes | axes_of(store.index)


def _is_fold(value: Expr) -> bool:
    """Whether a value is a sum over the rows of a part."""
    return isinstance(value.op, Reduce) and value.op.along == "x"


def _axes_of_store(store: Store) -> set[Axis]:
    """Along which axes a block has places to write."""
    if _is_fold(store.value):
        return {"r"}
    return {"x", "r"} if _is_along_r(store) else {"x"}


class _Writer:
    """Writes the lines of one kernel, and names its values."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._names: dict[Expr, str] = {}
        self._num_names = 0
        self._variables: dict[Var, str] = {
            var: axis if len(variables) == 1 else str(var)
            for axis, variables in (("p", (kernel.p,) if kernel.p else ()), ("x", kernel.x), ("r", kernel.r))
            for var in variables
        }
        self.sizes: dict[Polynomial, str] = {}
        """Numbers that differ from call to call, and what they are called."""
        ends = kernel.ends()
        self._is_large = is_large((end for end in ends if isinstance(end, int)), None)
        self.may_be_large = not self._is_large and any(isinstance(end, Polynomial) for end in ends)
        """Whether it depends on the call if places lie beyond 32 bits."""

    def x(self) -> Iterator[str]:
        """The places of the block's results."""
        column = "[:, None]" if self.kernel.r else ""
        yield f"x = {self._wide(BLOCK_NUMBER)} * XBLOCK + tl.arange(0, XBLOCK){column}"
        yield from self._x_digits()

    def _x_digits(self) -> Iterator[str]:
        if self.kernel.num_in_part != 1:
            yield f"xmask = x < {self._number(self.kernel.num_in_part)}"
        yield from self._digits("x", self.kernel.x)

    def _wide(self, places: str) -> str:
        """Places with as many bits as the kernel needs."""
        if self.may_be_large:
            return f"{places}.to(tl.int64 if {IS_LARGE} else tl.int32)"
        return f"{places}.to(tl.int64)" if self._is_large else places

    def _number(self, number: Whole) -> str:
        if isinstance(number, int):
            return str(number)
        return self.sizes.setdefault(number, name_of_size(len(self.sizes)))

    def block_of_r(self) -> str:
        """Places of a block along what is reduced, from the first."""
        return self._wide("tl.arange(0, RBLOCK)[None, :]")

    def r(self) -> Iterator[str]:
        """The places of the block along what is reduced."""
        yield f"rmask = r < {self._number(self.kernel.num_reduced)}"
        yield from self._digits("r", self.kernel.r)

    def _digits(self, name: Axis, variables: Sequence[Var]) -> Iterator[str]:
        if len(variables) == 1:
            return  # it is the place itself
        step: Whole = 1
        for var in reversed(variables):
            quotient = name if step == 1 else f"{name} // {self._number(step)}"
            size = "" if var is variables[0] else f" % {self._number(var.size)}"
            yield f"{var} = {quotient}{size}"
            step *= var.size

    def rows_of_a_part(self) -> Iterator[str]:
        """A loop over the rows of a part, and the sums over these."""
        yield f"p = {self._wide(BLOCK_NUMBER)}"
        yield f"r = {self.block_of_r()}"
        yield from self.r()
        sums = [store for store in self.kernel.stores if _is_fold(store.value)]
        rows = [store for store in self.kernel.stores if not _is_fold(store.value)]
        totals = {expr: self._name() for expr in dict.fromkeys(store.value for store in sums)}
        for expr, total in totals.items():
            yield f"{total} = tl.full([XBLOCK, RBLOCK], 0, {TYPES[expr.dtype]})"
        values = [*(expr.args[0] for expr in totals), *(store.value for store in rows)]
        fixed = [expr for expr in every_part(values, self._names) if "x" not in expr.axes]
        yield from self._values(fixed, self._names)
        inner = dict(self._names)
        stages = num_stages_of(self.kernel)
        more = f", num_stages={stages}" if stages > 1 else ""
        yield f"for start in tl.range(0, {self._number(self.kernel.num_in_part)}, XBLOCK{more}):"
        body = ["x = start + tl.arange(0, XBLOCK)[:, None]", *self._x_digits()]
        body += [*self._values(values, inner), *(self._stored(store, inner) for store in rows)]
        mask = self._mask({"x", "r"})
        body += [f"{total} += tl.where({mask}, {inner[expr.args[0]]}, 0)" for expr, total in totals.items()]
        yield from (f"    {line}" for line in body)
        for expr, total in totals.items():
            name = self._names[expr] = self._name()
            yield f"{name} = tl.sum({total}, 0)[None, :]"
        yield from (self._stored(store, self._names) for store in sums)

    def tile(self) -> Iterator[str]:
        """All of a kernel of tiles: neighbouring blocks have neighbouring columns."""
        num_columns = f"tl.cdiv({self._number(self.kernel.num_reduced)}, RBLOCK)"
        yield f"block = {self._wide(BLOCK_NUMBER)}"
        yield f"x = block // {num_columns} * XBLOCK + tl.arange(0, XBLOCK)[:, None]"
        yield from self._x_digits()
        yield f"r = block % {num_columns} * RBLOCK + tl.arange(0, RBLOCK)[None, :]"
        yield from self.r()
        for store in self.kernel.stores:
            yield from self.store(store)

    def store(self, store: Store) -> Iterator[str]:
        """Compute a value and write it."""
        yield from self._values([store.value], self._names)
        yield self._stored(store, self._names)

    def reductions(self, level: int, stores: Sequence[Store]) -> Iterator[str]:
        """One loop for all reductions of a level, and for the stores that can run in it."""
        wanted = [e for e in self.kernel.parts() if isinstance(e.op, Reduce) and e.level == level]
        values = [expr.args[0] for expr in wanted] + [store.value for store in stores]
        yield from self._before_the_loop(values)
        lanes = {expr: [self._name() for _ in lanes_of(expr)] for expr in wanted}
        # A sum of exponentials keeps the greatest value, too.
        with_maximum = {
            maximum_of(expr): names for expr, names in lanes.items() if kind_of(expr) == "exponentials"
        }
        maxima = {expr: [names[1]] for expr, names in with_maximum.items() if lanes.pop(expr, None)}
        for expr, names in lanes.items():
            lanes_of_block = self._num_lanes(expr)
            for name, start in zip(names, lanes_of(expr), strict=True):
                yield f"{name} = tl.full([XBLOCK, {lanes_of_block}], {start})"
        inner = dict(self._names)
        body = [*self._values(values, inner), *(self._stored(store, inner) for store in stores)]
        for expr, names in lanes.items():
            body += self._updated_lanes(expr, names, inner)
        yield from self._loop(body)
        lanes |= maxima
        for expr, names in lanes.items():
            name = self._names[expr] = self._name()
            yield f"{name} = {self._combined_lanes(expr, names)}"

    def _num_lanes(self, expr: Expr) -> str:
        """How many accumulators a loop has along `r`; a sum of exponentials has fewer, see `SIDE_BY_SIDE`."""
        is_together = kind_of(expr) == "exponentials" and fast_axis(self.kernel) == "r"
        return f"RBLOCK // {SIDE_BY_SIDE}" if is_together else "RBLOCK"

    def _combined_lanes(self, expr: Expr, lanes: Sequence[str]) -> str:
        return combined_lanes(expr, lanes, self._number(self.kernel.num_reduced))

    def _updated_lanes(self, expr: Expr, lanes: Sequence[str], names: Mapping[Expr, str]) -> Iterator[str]:
        """Lines that add a block of values to the accumulators of a reduction, under the mask."""
        mask, value = self._mask({"x", "r"}), self._reduced_value(expr, names)
        if kind_of(expr) == "exponentials":
            none = f"tl.where({mask}, {value}, {identity(maximum_of(expr))})"
            yield f"{', '.join(lanes)} = {updated(expr, lanes, none)}"
            return
        more = updated(expr, lanes, value)
        if len(lanes) == 1:
            yield f"{lanes[0]} = tl.where({mask}, {more}, {lanes[0]})"
            return
        now = [self._name() for _ in lanes]
        yield f"{', '.join(now)} = {more}"
        yield from (f"{lane} = tl.where({mask}, {new}, {lane})" for lane, new in zip(lanes, now, strict=True))

    def stores_along_r(self, stores: Sequence[Store]) -> Iterator[str]:
        """A loop for what is stored element by element."""
        if not stores:
            return
        values = [store.value for store in stores]
        yield from self._before_the_loop(values)
        inner = dict(self._names)
        body = [*self._values(values, inner)]
        yield from self._loop([*body, *(self._stored(store, inner) for store in stores)])

    def _before_the_loop(self, values: Sequence[Expr]) -> Iterator[str]:
        """Values that are the same in all iterations of a loop."""
        fixed = [expr for expr in every_part(values, self._names) if "r" not in expr.axes]
        yield from self._values(fixed, self._names)

    def _loop(self, body: Iterable[str]) -> Iterator[str]:
        yield f"for start in range(0, {self._number(self.kernel.num_reduced)}, RBLOCK):"
        for line in (f"r = start + {self.block_of_r()}", *self.r(), *body):
            yield f"    {line}"

    def _values(self, roots: Iterable[Expr], names: dict[Expr, str]) -> Iterator[str]:
        """Lines that give names to some values and to what they need."""
        for expr in list(every_part(roots, names)):
            if isinstance(expr.op, Constant):
                names[expr] = number(expr.op, expr.dtype)
                continue
            line = self._computed(expr, names)
            names[expr] = self._name()
            yield f"{names[expr]} = {line}"

    def _name(self) -> str:
        self._num_names += 1
        return f"t{self._num_names - 1}"

    def _computed(self, expr: Expr, names: Mapping[Expr, str]) -> str:
        args = [names[arg] for arg in expr.args]
        match expr.op:
            case Load():
                return self._loaded(expr, expr.op, names)
            case Position(index):
                return f"({self._index(index, names)} + tl.full([1], 0, tl.int64))"
            case Round(to):
                return f"{args[0]}.to({TYPES[to]}).to({TYPES[expr.dtype]})"
            case Reduce():
                value = self._reduced_value(expr, names)
                masked = f"tl.where({self._mask({'x', 'r'})}, {value}, {identity(expr)})"
                return self._combined_lanes(expr, [masked])
            case _:
                return spelled(expr, args)

    def _reduced_value(self, expr: Expr, names: Mapping[Expr, str]) -> str:
        """The operand of a reduction, masked, and so broadcast to a whole block."""
        (value,) = expr.args
        return f"{names[value]}.to(tl.int32)" if value.dtype is torch.bool else names[value]

    def _loaded(self, expr: Expr, load: Load, names: Mapping[Expr, str]) -> str:
        pointer = f"in_{load.buffer} + ({self._place(load.index, load.stored, names)})"
        mask = self._mask(expr.axes)
        if expr.args:
            (guard,) = expr.args
            mask = f"{mask} & {names[guard]}" if mask else names[guard]
            own = axes_of(load.index)
            if not own or not guard.axes <= own:  # a mask may not be larger than the addresses
                pointer = f"tl.broadcast_to({pointer}, {self._shape(expr.axes)})"
        zero = "0.0" if load.stored in FLOAT8 else "0"  # Triton makes no float8 of a whole number
        text = f"tl.load({pointer}, {mask}, other={zero})" if mask else f"tl.load({pointer})"
        if load.stored in NARROW or load.stored is torch.bool:
            text += f".to({TYPES[expr.dtype]})"
        return text

    def _stored(self, store: Store, names: Mapping[Expr, str]) -> str:
        axes = _axes_of_store(store)
        pointer = f"out_{store.buffer} + ({self._place(store.index, store.stored, names)})"
        if not axes <= axes_of(store.index):
            pointer = f"tl.broadcast_to({pointer}, {self._shape(axes)})"
        value = names[store.value]
        if isinstance(store.value.op, Constant):
            value = block_of(store.value.op, store.stored)
        elif store.stored in NARROW:
            value = f"{value}.to({TYPES[store.stored]})"
        mask = self._mask(axes)
        return f"tl.store({pointer}, {value}, {mask})" if mask else f"tl.store({pointer}, {value})"

    def _shape(self, axes: Set[Axis]) -> str:
        """The shape of a block of values that differ along some axes."""
        if not self.kernel.r:
            return "[XBLOCK]"
        return f"[{'XBLOCK' if 'x' in axes else '1'}, {'RBLOCK' if 'r' in axes else '1'}]"

    def _mask(self, axes: Set[Axis]) -> str:
        """Where a block has places, along some axes; empty for everywhere."""
        masks = ["xmask"] if "x" in axes and self.kernel.num_in_part != 1 else []
        masks += ["rmask"] if "r" in axes and self.kernel.r else []
        return " & ".join(masks)

    def _place(self, index: Index, dtype: torch.dtype, names: Mapping[Expr, str]) -> str:
        """The offset of an element, with contiguity hints where Triton cannot infer them."""
        text = self._index(index, names)
        length = vector_length(self.kernel, index, dtype) if is_divided(index) else 1
        if length == 1:
            return text
        along_x = [length, 1] if self.kernel.r else length
        lengths = along_x if axis_of(self.kernel, index) == "x" else [1, length]
        return f"tl.max_contiguous(tl.multiple_of({text}, {lengths}), {lengths})"

    def _index(self, index: Index, names: Mapping[Expr, str]) -> str:
        terms = [
            self._atom(atom, names) if scale == 1 else f"{self._atom(atom, names)} * {self._number(scale)}"
            for atom, scale in index.terms
        ]
        if index.constant != 0 or not terms:
            terms.append(self._number(index.constant))
        return " + ".join(terms)

    def _atom(self, atom: Atom, names: Mapping[Expr, str]) -> str:
        match atom:
            case Var():
                return self._variables[atom]
            case Quotient(of, by) if of.is_natural:
                return f"(({self._index(of, names)}) // {self._number(by)})"
            case Quotient(of, by):
                return f"quotient({self._index(of, names)}, {self._number(by)})"
            case Remainder(of, by) if of.is_natural:
                return f"(({self._index(of, names)}) % {self._number(by)})"
            case Remainder(of, by):
                return f"remainder({self._index(of, names)}, {self._number(by)})"
            case Lookup(of):
                return names[of]  # type: ignore[index]
