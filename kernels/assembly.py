"""From a group of nodes to a kernel: expressions for what is stored, over as few variables as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch.fx import Node

from aotdist.kernels.access import reads, sides_of, writes
from aotdist.kernels.columns import rows_folded
from aotdist.kernels.fusion import Plan
from aotdist.kernels.index import Axis, Index, Quotient, Remainder, Var, offset, unflat, variable
from aotdist.kernels.ir import Kernel, Store
from aotdist.kernels.polynomial import Whole, divided, hint_of
from aotdist.kernels.reading import KernelReader
from aotdist.kernels.rule import Point, strides_of, val_of
from aotdist.kernels.space import Group

_MAX_WORDS = 4
_COPIES = frozenset({"convert_element_type", "_to_copy", "clone", "copy"})
"""Words that say nothing of a kernel that does something else besides."""


def assemble(plan: Plan, group: Group, number: int, *, keeps_casts: bool) -> Kernel:
    """The kernel of a group.

    Args:
        plan: which nodes are views, and which are stored.
        group: what to compute.
        number: tells kernels of one graph apart.
        keeps_casts: see `KernelReader`.
    """
    computed = {*group.nodes(), *plan.inlined}
    reader = KernelReader(plan.views, computed, group.space, folds=group.folds, keeps_casts=keeps_casts)
    stores = [
        Store(
            node.name,
            offset(place, strides_of(node)),
            reader.read(node, Point(place)),
            val_of(node).dtype,
        )
        for node, place in group.places.items()
        if node in plan.stored
    ]
    name = f"{'_'.join(_words(sorted(group.nodes())))}_{number}"
    kernel = Kernel(name, group.space.x, group.space.r, tuple(stores))
    if group.folds:
        return _in_parts(collapsed(kernel), rows_folded(next(iter(group.folds))))
    return tiled(collapsed(_by_stride(kernel)))


def _words(nodes: Iterable[Node]) -> list[str]:
    """What a kernel does, in a few words: its last and most telling operators."""
    words = [str(node.target).split(".")[1] for node in nodes if "." in str(node.target)]
    distinct = dict.fromkeys(words)
    telling = [word for word in distinct if word not in _COPIES] or list(distinct) or ["pick"]
    return telling[-_MAX_WORDS:]


def _by_stride(kernel: Kernel) -> Kernel:
    """The kernel with stride-1 variables last: those of the largest store, and of what is reduced."""
    largest = max(kernel.stores, key=lambda store: len(store.index.variables()))
    accesses = [*(load.index for load in kernel.loads()), *(store.index for store in kernel.stores)]
    reduced = max(accesses, key=lambda index: len(index.variables().intersection(kernel.r)))
    x = _in_order_of_strides(kernel.x, largest.index)
    return kernel.substitute({}, x, _in_order_of_strides(kernel.r, reduced))


def _in_order_of_strides(variables: Sequence[Var], index: Index) -> tuple[Var, ...]:
    stride = {atom: scale for atom, scale in index.terms if isinstance(atom, Var)}
    return tuple(sorted(variables, key=lambda var: -hint_of(stride.get(var, 0))))


def _in_parts(kernel: Kernel, rows: Whole) -> Kernel:
    """With its rows cut in parts of so many."""
    p, x = Var("p", 0, divided(kernel.num_results, rows)[0]), Var("x", 0, rows)
    row = unflat(variable(p) * rows + variable(x), [var.size for var in kernel.x])
    return replace(kernel.substitute(dict(zip(kernel.x, row, strict=True)), (x,), kernel.r), p=p)


def collapsed(kernel: Kernel) -> Kernel:
    """The kernel over as few variables as possible: adjacent ones that are always contiguous become one."""
    for axis in ("x", "r"):
        kernel = _collapsed_along(kernel, axis)
    return kernel


def _collapsed_along(kernel: Kernel, axis: Axis) -> Kernel:
    variables = [var for var in getattr(kernel, axis) if var.size != 1]
    kernel = _with_variables(kernel, axis, variables)
    at = len(variables) - 2
    while at >= 0:
        outer, inner = variables[at : at + 2]
        joined = Var(axis, outer.number, outer.size * inner.size)
        both = variable(joined)
        places = {outer: both // inner.size, inner: both % inner.size}
        if all(_stays_simple(index, places, joined) for index in kernel.indices()):
            variables[at : at + 2] = [joined]
            kernel = _with_variables(kernel, axis, variables, places)
        at -= 1
    return kernel


def _with_variables(
    kernel: Kernel, axis: Axis, variables: Sequence[Var], places: dict[Var, Index] | None = None
) -> Kernel:
    x, r = (tuple(variables) if axis == side else own for side, own in (("x", kernel.x), ("r", kernel.r)))
    return kernel.substitute(places or {}, x, r)


def _stays_simple(index: Index, places: dict[Var, Index], joined: Var) -> bool:
    """Whether merging two variables into one adds no division to any index."""
    changed = index.substitute(places)
    return _divisions_of(changed, {joined}) <= _divisions_of(index, set(places))


def _divisions_of(index: Index, variables: set[Var]) -> int:
    return sum(
        isinstance(atom, (Quotient, Remainder)) and bool(atom.of.variables() & variables)
        for atom in index.atoms()
    )


# Tiles: for a kernel that goes through memory in two orders.
#
# A transposed copy reads along rows and writes along columns, and a block that is a piece of a row would
# write one element here and one there. A tile is a piece of several rows: all that it reads and writes lies
# side by side, along one of its sides or the other, and it is turned around within the block. So a tensor
# that is cast to float8 for two matrix products, in one layout for each, is read once.


MIN_SIDE = 16
"""Elements of a dimension that is worth a side: 32 bytes, the least that memory is read by, of bfloat16."""


def tiled(kernel: Kernel) -> Kernel:
    """The kernel over tiles with columns along `r`, if tensors are contiguous along two axes; else itself.

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
    """The stride-1 variables of accesses that vary along several of these, that of most bytes first."""
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
