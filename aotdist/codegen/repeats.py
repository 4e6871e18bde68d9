"""Where a row repeats itself: the layers of a deep model, found by their operators or statements.

Equal layers are a run that equals what stands one *period* further on. Where a layer begins is a choice:
where a cut loses the least.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

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


def equal_parts(
    forms: Sequence[Hashable], losses: Sequence[int], counting: Sequence[bool] | None = None
) -> list[int]:
    """Positions at which to cut a row into equal parts, and what is around them; in order.

    Args:
        forms: of the row, equal where its elements are.
        losses: of a cut in front of each element, and behind the last.
        counting: the elements that make a part long enough; all of them by default.
    """
    num_counting = [0, *accumulate(counting or [True] * len(forms))]

    def cuts(begin: int, end: int) -> Iterator[int]:
        run = longest_run(forms[begin:end])
        if run is None:
            return
        start, stop = begin + run.start, begin + run.stop
        in_a_layer = num_counting[start + run.period] - num_counting[start]
        layers_in_a_part = -(-SHORTEST // max(in_a_layer, 1))
        run = Run(start, stop, run.period * layers_in_a_part)
        if run.num_periods < 2:
            return
        first = _best_start(run, losses)
        last = first + (run.stop - first) // run.period * run.period
        yield from cuts(begin, first)
        yield from range(first, last + 1, run.period)
        yield from cuts(last, end)

    return list(dict.fromkeys(cuts(0, len(forms))))


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
    equal = bytes(map(operator.eq, forms, forms[period:]))
    longest = max(equal.split(b"\0"), key=len)
    start = equal.index(longest)
    return Run(start, start + len(longest) + period, period)
