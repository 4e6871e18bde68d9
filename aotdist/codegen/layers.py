"""Equal layers of a deep model: where a row of operators repeats itself, and how such layers are printed.

Equal layers are a run that equals what stands one *period* further on. Where a layer begins is a choice:
where a cut loses the least.

The statements of equal layers in a printed graph are one function, called for each layer: Python needs 0.2 s
to compile the 13,000 statements of a Llama of 64 layers. The operators that run, their order and where memory
is freed stay the same. A call takes about 2 us; a layer has some hundred operators.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
    """Positions at which to cut a row so that its equal parts stand alone, in order.

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


_FEWEST = 3
"""Equal layers that become a function. Two are read as easily where they stand."""


@dataclass(slots=True)
class Statement:
    """One statement, or several that stay together.

    Args:
        template: the text, with `%s` in the place of each local.
        names: the locals, in the order of the text.
        made: those that it assigns.
        dying: those that it deletes.
        place: the module path and the source line that asked for it, as a comment; empty if unknown.
        mark: the module whose mark for profilers stands around it; empty for none.
    """

    template: str
    names: list[str]
    made: list[str]
    dying: list[str]
    place: str = ""
    mark: str = ""


def lines_of(statements: Sequence[Statement], mark: str = "") -> Iterator[str]:
    """The statements as lines, with a comment wherever the place in the program is another.

    Args:
        statements: in the order in which they run.
        mark: the name of the context manager that marks a module.
    """
    place = around = ""
    for statement in statements:
        if statement.mark and statement.mark != around:
            yield f"with {mark}({statement.mark!r}):"
        around = statement.mark
        indent = "    " if around else ""
        if statement.place and statement.place != place:
            yield f"{indent}# {statement.place}"
            place = statement.place
        for line in (statement.template % tuple(statement.names)).splitlines():
            yield indent + line


def by_layers(
    statements: Sequence[Statement], args: str, reserve: Callable[[str], str]
) -> tuple[list[str], list[str]]:
    """Functions for what repeats itself, and the statements as lines, which call these.

    Args:
        statements: in the order in which they run.
        args: the name of the list that a function takes and empties.
        reserve: makes a name that nothing else has.
    """
    begins = equal_parts([one.template for one in statements], _num_crossing(statements))
    pieces = [statements[begin:end] for begin, end in pairwise([0, *begins, len(statements)])]
    kinds = list(map(_kind, pieces))
    num_calls, functions = Counter(kinds), dict[Hashable, str]()
    defined, body = list[str](), list[str]()
    for piece, kind in zip(pieces, kinds, strict=True):
        if num_calls[kind] < _FEWEST or len(piece) < SHORTEST:
            body += lines_of(piece)
            continue
        if kind not in functions:
            functions[kind] = reserve("layer")
            defined += (f"# called {num_calls[kind]} times", *_function(functions[kind], piece, args))
        body += _call(functions[kind], piece, args)
    return defined, body


def _kind(piece: Sequence[Statement]) -> Hashable:
    """Equal for statements that are the same up to the names of locals."""
    names = [name for one in piece for name in one.names]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(one.template for one in piece), tuple(map(numbers.__getitem__, names))


def _num_crossing(statements: Sequence[Statement]) -> list[int]:
    """For each statement, how many locals are made before and deleted at it or behind it."""
    made = {name: at for at, statement in enumerate(statements) for name in statement.made}
    changes = [0] * (len(statements) + 1)
    for at, statement in enumerate(statements):
        for name in statement.dying:
            if name in made:
                changes[made[name] + 1] += 1
                changes[at + 1] -= 1
    return list(accumulate(changes))


def _function(name: str, piece: Sequence[Statement], args: str) -> Iterator[str]:
    yield f"def {name}({args}):"
    yield f"    ({_tuple(_read(piece))}) = {args}"
    yield f"    {args}.clear()"
    for line in lines_of(piece):
        yield f"    {line}"
    yield f"    return ({_tuple(_left(piece))})"
    yield ""


def _call(name: str, piece: Sequence[Statement], args: str) -> Iterator[str]:
    """A call that frees its arguments: nobody else has those that die in it."""
    read = _read(piece)
    dying = {name for one in piece for name in one.dying}.intersection(read)
    freed = f"; del {', '.join(one for one in read if one in dying)}" if dying else ""
    if place := piece[0].place:
        yield f"# {place}"
    yield f"{args} = [{', '.join(read)}]{freed}"
    yield f"({_tuple(_left(piece))}) = {name}({args})"


def _read(piece: Sequence[Statement]) -> list[str]:
    """Locals that are made before."""
    made = {name for one in piece for name in one.made}
    return list(dict.fromkeys(name for one in piece for name in one.names if name not in made))


def _left(piece: Sequence[Statement]) -> list[str]:
    """Locals that are made here and used behind it."""
    dying = {name for one in piece for name in one.dying}
    return [name for one in piece for name in one.made if name not in dying]


def _tuple(names: Sequence[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")
