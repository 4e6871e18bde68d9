"""How kernels access memory: the axis along which an access is contiguous, and its vector length."""

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
"""A byte that is read across counts at least as much as so many that are read side by side."""

_KEPT = 64
"""How many kernels' axes are cached: every way to cut a kernel into blocks asks for them."""


@functools.lru_cache(_KEPT)
def fast_axis(kernel: Kernel) -> Axis:
    """The axis along which most of a kernel's bytes are contiguous; `x` if it has no reduction.

    A block of a kernel that sums columns has to be wide along `x`: neighbours along `r` lie a row apart.
    """
    if not kernel.r:
        return "x"
    return "x" if _bytes_side_by_side(kernel, "x") > _bytes_side_by_side(kernel, "r") else "r"


def is_wide(kernel: Kernel) -> bool:
    """Whether blocks must be wide along `x`, since much of the memory is contiguous along `x`.

    Of every 32 bytes that a block of one result reads across, it uses an element. So a block of a kernel that
    accesses memory in both orders is wide along both axes.
    """
    if not kernel.r or kernel.p is not None:
        return fast_axis(kernel) == "x"
    return _WORTH * _bytes_side_by_side(kernel, "x") >= max(1, _bytes_side_by_side(kernel, "r"))


def axis_of(kernel: Kernel, index: Index) -> Axis:
    """The axis along which neighbouring threads access memory; in a tile it depends on the index."""
    if kernel.is_tiled:
        return "x" if kernel.x[-1] in sides_of(index) else "r"
    return fast_axis(kernel)


def sides_of(index: Index) -> list[Var]:
    """Variables along which an index has stride 1, possibly modulo a number (the size of a head)."""
    steps = (atom for atom, scale in index.terms if scale == 1)
    inner = (_run_of(atom) if isinstance(atom, Remainder) else atom for atom in steps)
    return [atom for atom in inner if isinstance(atom, Var)]


def vector_length(kernel: Kernel, index: Index, dtype: torch.dtype) -> int:
    """How many elements a thread may load or store in one vector, as far as sizes show.

    Args:
        kernel: the kernel that the thread runs.
        index: where an element lies.
        dtype: of the tensor.
    """
    return _run_length(_variables(kernel, axis_of(kernel, index)), index, VECTOR_BYTES // dtype.itemsize)


def reads(kernel: Kernel) -> Iterator[tuple[Index, torch.dtype]]:
    """The index and the dtype of each load of a kernel."""
    return ((load.index, load.stored) for load in kernel.loads())


def writes(kernel: Kernel) -> Iterator[tuple[Index, torch.dtype]]:
    """The index and the dtype of each store of a kernel."""
    return ((store.index, store.stored) for store in kernel.stores)


def axes_of(index: Index) -> set[Axis]:
    """The axes of a block along which an index changes."""
    return {var.axis for var in index.variables() if var.axis != "p"}


def _run_of(atom: Remainder) -> Atom | None:
    """The variable of a remainder whose divisor is at least the vector length."""
    is_plain = len(atom.of.terms) == 1 and atom.of.terms[0][1] == 1
    return atom.of.terms[0][0] if is_plain and hint_of(atom.by) >= VECTOR_BYTES else None


def is_divided(index: Index) -> bool:
    """Whether an index has quotients or remainders, which hide contiguity from Triton."""
    return any(isinstance(atom, Quotient | Remainder) for atom in index.atoms())


def _variables(kernel: Kernel, axis: Axis) -> tuple[Var, ...]:
    return kernel.x if axis == "x" else kernel.r


def _run_length(variables: tuple[Var, ...], index: Index, most: int) -> int:
    while most > 1 and not (variables and _is_run(index, variables[-1], most)):
        most //= 2
    return most


def _is_run(index: Index, fastest: Var, length: int) -> bool:
    """Whether every aligned run of `length` places is contiguous and aligned in memory."""
    if not divides(length, fastest.size):
        return False
    inside = Var(fastest.axis, -1, length)
    outside = Var(fastest.axis, -2, divided(fastest.size, length)[0])
    first = index.substitute({fastest: variable(outside) * length + variable(inside)}) - variable(inside)
    return inside not in first.variables() and first % length == number(0)


def _bytes_side_by_side(kernel: Kernel, axis: Axis) -> int:
    """Bytes per place that are contiguous along `axis`, of the accesses that vary along both axes."""
    variables = _variables(kernel, axis)
    return sum(
        dtype.itemsize
        for index, dtype in (*reads(kernel), *writes(kernel))
        if axes_of(index) == {"x", "r"}
        and ((variables[-1], 1) in index.terms or _run_length(variables, index, 2) > 1)
    )
