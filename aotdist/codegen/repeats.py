"""Where a graph repeats itself: the layers of a deep model, found by their operators.

A graph is a row of operators, and equal layers are a run that equals what stands one *period* further on.
Where a layer begins is a choice: where the least is lost that a compiler would fuse. A sum onto the residual
stream, say, stays with the norm that reads it.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from torch.fx import Node
from torch.fx.node import map_arg

from aotdist.codegen.region_graph import metadata, tensors_of
from aotdist.partition.recomputable import is_border
from aotdist.partition.traits import is_view, storage_root, value_bytes

SHORTEST = 24
"""Operators of a part at least, views apart. A compiled part costs about 20 us a call beside its kernels, and
a small linear layer takes less than that: several of these are one part."""

_MOST_PERIODS = 8
"""How many of the distances between equal operators are tried, the commonest first."""


@dataclass(frozen=True, slots=True)
class Run:
    """Operators that equal those of one period further on.

    Args:
        start: the first of them.
        stop: behind the last operator of the last period.
        period: operators of a layer.
    """

    start: int
    stop: int
    period: int

    @property
    def num_periods(self) -> int:
        """Whole layers in it."""
        return (self.stop - self.start) // self.period

    @property
    def num_saved(self) -> int:
        """Operators that need not be compiled again."""
        return (self.num_periods - 1) * self.period


def where_layers_begin(nodes: Sequence[Node]) -> list[int]:
    """Positions at which to cut a row of operators into equal parts, and what is around them; in order.

    Args:
        nodes: `call_function` nodes, in the order in which they run.
    """
    forms, losses = _forms(nodes), _losses(nodes)

    def cuts(begin: int, end: int) -> Iterator[int]:
        run = longest_run(forms[begin:end])
        if run is None:
            return
        start, stop = begin + run.start, begin + run.stop
        layers_in_a_part = -(-SHORTEST // max(_num_computing(nodes[start : start + run.period]), 1))
        run = Run(start, stop, run.period * layers_in_a_part)
        if run.num_periods < 2:
            return
        first = _best_start(run, losses)
        last = first + (run.stop - first) // run.period * run.period
        yield from cuts(begin, first)
        yield from range(first, last + 1, run.period)
        yield from cuts(last, end)

    return list(dict.fromkeys(cuts(0, len(nodes))))


def _num_computing(nodes: Sequence[Node]) -> int:
    return sum(not is_view(node) and node.target is not operator.getitem for node in nodes)


def _best_start(run: Run, losses: Sequence[int]) -> int:
    """Where the first layer of a run begins: up to a layer further on, if several are left then."""
    spare = run.period - 1 if run.num_periods > 3 else (run.stop - run.start) % run.period
    return min(range(run.start, run.start + spare + 1), key=lambda at: (losses[at + run.period], at))


def longest_run(forms: Sequence[Hashable]) -> Run | None:
    """The run that saves the most; None if nothing repeats.

    Args:
        forms: of operators, in order; equal for operators that are the same up to names.
    """
    runs = (_longest_of(forms, period) for period in _periods(forms))
    return max((run for run in runs if run.num_saved > 0), key=lambda run: run.num_saved, default=None)


def _periods(forms: Sequence[Hashable]) -> list[int]:
    """Distances at which the same operator comes again, those that explain the most of the row first."""
    before, distances = dict[Hashable, int](), Counter[int]()
    for at, form in enumerate(forms):
        if form in before:
            distances[at - before[form]] += 1
        before[form] = at
    return sorted(distances, key=lambda distance: -distances[distance])[:_MOST_PERIODS]


def _longest_of(forms: Sequence[Hashable], period: int) -> Run:
    longest = Run(0, 0, period)
    for equal, stretch in groupby(range(len(forms) - period), lambda at: forms[at] == forms[at + period]):
        places = list(stretch)
        if equal and len(places) > longest.stop - longest.start - period:
            longest = Run(places[0], places[-1] + 1 + period, period)
    return longest


def _forms(nodes: Sequence[Node]) -> list[Hashable]:
    """Operators up to names: what each computes, its numbers, metadata of what it reads and makes."""
    numbers = dict[str, int]()

    @functools.cache
    def number(node: Node) -> int:
        """Of what a node is known to make, among all of this graph."""
        value = tuple(map(metadata, tensors_of(node))) or node.meta.get("val")
        return numbers.setdefault(repr(value), len(numbers))

    arguments = (map_arg((node.args, node.kwargs), number) for node in nodes)  # type: ignore[arg-type]
    return [(node.target, repr(given), number(node)) for node, given in zip(nodes, arguments, strict=True)]


def _losses(nodes: Sequence[Node]) -> list[int]:
    """Bytes that a cut in front of each node, or of none, makes go through memory and would be fused without.

    What a library call makes or reads is in memory anyway, and so is what is read on its far side.
    """
    at = {node: position for position, node in enumerate(nodes)}
    borders = [0, *accumulate(map(is_border, nodes))]
    changes = [0] * (len(nodes) + 1)
    for reader, position in at.items():
        read = set() if is_view(reader) else set(map(storage_root, reader.all_input_nodes))
        for node in read & at.keys():
            made, size = at[node], value_bytes(node)
            if borders[made] == borders[position + 1]:
                changes[made + 1] += size
                changes[position + 1] -= size
    return list(accumulate(changes))
