"""Iteration spaces, and the nodes that are computed over one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from aotdist.kernels.index import Index, Var, flat, unflat, variable, visits_each_once
from aotdist.kernels.polynomial import Whole
from aotdist.kernels.reductions import reduced_dims
from aotdist.kernels.rule import sizes_of
from aotdist.kernels.rules import is_reducing

Place = tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """An iteration space, and the tensor that it was made for.

    Args:
        x: variables of results.
        r: variables that are reduced.
        results: indices of the results, over `x`.
        elements: indices of the reduced elements, over `x` and `r`; of the results if nothing is reduced.
        sizes: sizes of the tensor with those elements.
    """

    x: tuple[Var, ...]
    r: tuple[Var, ...]
    results: Place
    elements: Place
    sizes: tuple[Whole, ...]

    @property
    def num_results(self) -> Whole:
        """Places along `x`."""
        return math.prod(var.size for var in self.x)

    @property
    def num_elements(self) -> Whole:
        """Places altogether."""
        return math.prod(self.sizes)

    def is_like(self, other: Space) -> bool:
        """Whether both have as many results and elements."""
        return self.num_results == other.num_results and self.num_elements == other.num_elements

    @property
    def num_reduced(self) -> Whole:
        """Places along `r`."""
        return math.prod(var.size for var in self.r)

    def column(self) -> Index:
        """The number of an element among those that are reduced to one result."""
        return flat([variable(var) for var in self.r], [var.size for var in self.r])

    def row(self) -> Index:
        """The number of the result that a place belongs to."""
        return flat(self.results, [var.size for var in self.x])

    def row_major(self, sizes: Sequence[Whole], *, reduces: bool) -> Place | None:
        """The indices of a row-major tensor of `sizes` over the space; None if its size does not match.

        Args:
            sizes: of the tensor.
            reduces: whether it is a result of a reduction, which runs over `x` alone.
        """
        count = math.prod(sizes)
        if count == self.num_elements and not reduces:
            return unflat(flat(self.elements, self.sizes), sizes)
        if count == self.num_results:
            return unflat(self.row(), sizes)
        return None

    def fits(self, place: Place, sizes: Sequence[Whole]) -> bool:
        """Whether a tensor of `sizes` is visited once at `place`."""
        count = math.prod(sizes)
        over = (*self.x, *self.r) if count == self.num_elements else self.x
        return visits_each_once(place, sizes, over)


def space_of(node: Node) -> Space:
    """The iteration space for one node alone."""
    if not is_reducing(node):
        sizes = sizes_of(node)
        x = tuple(Var("x", at, size) for at, size in enumerate(sizes))
        place = tuple(map(variable, x))
        return Space(x, (), place, place, sizes)
    sizes, dims = reduced_dims(node)
    x = tuple(Var("x", at, size) for at, size in enumerate(sizes) if at not in dims)
    r = tuple(Var("r", at, sizes[at]) for at in dims)
    by_dim = {var.number: variable(var) for var in (*x, *r)}
    elements = tuple(by_dim[dim] for dim in range(len(sizes)))
    return Space(x, r, tuple(map(variable, x)), elements, sizes)


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that share a kernel.

    Args:
        space: what the kernel runs over.
        places: nodes that are computed once at each place, and at which indices.
        absorbed: nodes that are computed wherever these read them.
        folds: of the placed nodes, those that add up rows of the space, see `aotdist.kernels.columns`.
    """

    space: Space
    places: Mapping[Node, Place]
    absorbed: frozenset[Node] = frozenset()
    folds: frozenset[Node] = frozenset()

    def __contains__(self, node: object) -> bool:
        return node in self.places or node in self.absorbed

    def nodes(self) -> Iterator[Node]:
        """All of them."""
        yield from self.places
        yield from self.absorbed


def group_of(node: Node) -> Group:
    """A node alone."""
    space = space_of(node)
    place = space.row_major(sizes_of(node), reduces=is_reducing(node))
    assert place is not None, f"{node} does not fit its own space"
    return Group(space, {node: place})
