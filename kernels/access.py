"""How kernels go through memory: along which axis neighbours lie, and how many a thread takes at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from aotdist.kernels.index import Atom, Axis, Index, Quotient, Remainder, Var, number, variable
from aotdist.kernels.ir import Kernel
from aotdist.kernels.polynomial import divided, divides, hint_of

VECTOR_BYTES = 16
"""The most that one instruction reads or writes."""
_WORTH = 4
"""How many bytes that are read side by side one is worth that is read across, at least."""

_KEPT = 64
"""How many kernels' axes are remembered: each is asked for by every way in which its kernel might be cut."""


@functools.lru_cache(_KEPT)
def fast_axis(kernel: Kernel) -> Axis:
    """Along which axis most of what a kernel reads and writes lies side by side; `x` if it reduces nothing.

    A block of a kernel that sums columns has to be wide along `x`: neighbours along `r` lie a row apart.
    """
    if not kernel.r:
        return "x"
    return "x" if _bytes_side_by_side(kernel, "x") > _bytes_side_by_side(kernel, "r") else "r"


def is_wide(kernel: Kernel) -> bool:
    """Whether blocks have to be wide along `x`, as much that a kernel moves lies side by side there.

    Of every 32 bytes that a block of one result reads across, it uses an element. So a block of a kernel that
    also goes through memory in the other order is wide along both axes.
    """
    if not kernel.r or kernel.p is not None:
        return fast_axis(kernel) == "x"
    return _WORTH * _bytes_side_by_side(kernel, "x") >= max(1, _bytes_side_by_side(kernel, "r"))


def axis_of(kernel: Kernel, index: Index) -> Axis:
    """Along which axis neighbouring threads go where they read or write: a tile's may go along either."""
    if kernel.is_tiled:
        return "x" if kernel.x[-1] in sides_of(index) else "r"
    return fast_axis(kernel)


def sides_of(index: Index) -> list[Var]:
    """Variables along which an index goes in steps of one element, if only to the end of a head."""
    steps = (atom for atom, scale in index.terms if scale == 1)
    inner = (_run_of(atom) if isinstance(atom, Remainder) else atom for atom in steps)
    return [atom for atom in inner if isinstance(atom, Var)]


def vector_length(kernel: Kernel, index: Index, dtype: torch.dtype) -> int:
    """How many elements a thread may read or write at once, as far as sizes tell.

    Args:
        kernel: the kernel that the thread runs.
        index: where an element lies.
        dtype: of the tensor.
    """
    return _run_length(_variables(kernel, axis_of(kernel, index)), index, VECTOR_BYTES // dtype.itemsize)


def reads(kernel: Kernel) -> Iterator[tuple[Index, torch.dtype]]:
    """Where a kernel reads, and elements of what."""
    return ((load.index, load.stored) for load in kernel.loads())


def writes(kernel: Kernel) -> Iterator[tuple[Index, torch.dtype]]:
    """Where a kernel writes, and elements of what."""
    return ((store.index, store.stored) for store in kernel.stores)


def axes_of(index: Index) -> set[Axis]:
    """Along which axes of a block an element lies elsewhere."""
    return {var.axis for var in index.variables() if var.axis != "p"}


def _run_of(atom: Remainder) -> Atom | None:
    """The variable that a remainder is of, if that is by no less than a thread takes at once."""
    is_plain = len(atom.of.terms) == 1 and atom.of.terms[0][1] == 1
    return atom.of.terms[0][0] if is_plain and hint_of(atom.by) >= VECTOR_BYTES else None


def is_divided(index: Index) -> bool:
    """Whether an index takes quotients or remainders, beyond which Triton sees no neighbours."""
    return any(isinstance(atom, Quotient | Remainder) for atom in index.atoms())


def _variables(kernel: Kernel, axis: Axis) -> tuple[Var, ...]:
    return kernel.x if axis == "x" else kernel.r


def _run_length(variables: tuple[Var, ...], index: Index, most: int) -> int:
    while most > 1 and not (variables and _is_run(index, variables[-1], most)):
        most //= 2
    return most


def _is_run(index: Index, fastest: Var, length: int) -> bool:
    """Whether every `length` places from an even one on lie one after the other, from an even one on."""
    if not divides(length, fastest.size):
        return False
    inside = Var(fastest.axis, -1, length)
    outside = Var(fastest.axis, -2, divided(fastest.size, length)[0])
    first = index.substitute({fastest: variable(outside) * length + variable(inside)}) - variable(inside)
    return inside not in first.variables() and first % length == number(0)


def _bytes_side_by_side(kernel: Kernel, axis: Axis) -> int:
    """Of one place, over what differs along both axes."""
    variables = _variables(kernel, axis)
    return sum(
        dtype.itemsize
        for index, dtype in (*reads(kernel), *writes(kernel))
        if axes_of(index) == {"x", "r"}
        and ((variables[-1], 1) in index.terms or _run_length(variables, index, 2) > 1)
    )
