"""Has a kernel that goes through memory in two orders go through it by tiles.

A transposed copy reads along rows and writes along columns, and a block that is a piece of a row would write
one element here and one there. A tile is a piece of several rows: all that it reads and writes lies side by
side, along one of its sides or the other, and it is turned around within the block. So a tensor that is cast
to float8 for two matrix products, in one layout for each, is read once.
"""

from __future__ import annotations

from aotdist.kernels.access import reads, sides_of, writes
from aotdist.kernels.index import Index, Var, variable
from aotdist.kernels.ir import Kernel
from aotdist.kernels.polynomial import hint_of

MIN_SIDE = 16
"""Elements of a dimension that is worth a side: 32 bytes, the least that memory is read by, of bfloat16."""


def tiled(kernel: Kernel) -> Kernel:
    """The kernel over tiles, the columns of which are `r`, if it has two orders; else the kernel as it is.

    Args:
        kernel: over as few variables as there can be; no sum of parts.
    """
    sides = _sides(kernel)
    if kernel.r or len(sides) < 2:
        return kernel
    column, row = sides[:2]
    moved = Var("r", 0, column.size)
    x = (*(var for var in kernel.x if var not in (row, column)), row)
    return kernel.substitute({column: variable(moved)}, x, (moved,))


def _sides(kernel: Kernel) -> list[Var]:
    """Variables along which elements lie side by side in a tensor with others, that of most bytes first."""
    accesses = [(_side(index), index, dtype) for index, dtype in (*reads(kernel), *writes(kernel))]
    sides = {side for side, _, _ in accesses if side is not None}
    num_bytes: dict[Var, int] = {}
    for side, index, dtype in accesses:
        if side is not None and not index.variables().isdisjoint(sides - {side}):
            num_bytes[side] = num_bytes.get(side, 0) + dtype.itemsize
    return sorted(num_bytes, key=lambda var: -num_bytes[var])


def _side(index: Index) -> Var | None:
    """The variable along which an index goes in steps of one element."""
    return next((var for var in sides_of(index) if hint_of(var.size) >= MIN_SIDE), None)
