"""Emitted graphs that are checked when they first run: what kernels read has to lie as the trace said.

The first call of each set of sizes runs the same text with launches that look at strides. If something lies
otherwise, the graph is emitted anew for the next call, which is checked in turn. What lies otherwise at
some sizes only is copied in each such call. Other calls look at nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from aotdist.capture.compile_lock import alone
from aotdist.codegen.contract import BoxedCall, Emitted, Fusion

log = logging.getLogger(__name__)


class Difference(Protocol):
    """Something that lay otherwise."""

    def line(self) -> str | None:
        """What to tell a reader, if it is not implied by another."""
        ...


Found = Mapping[str, Difference]
"""What lay otherwise, by the name of its node."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A graph as it was emitted.

    Args:
        call: runs it.
        is_checked: whether it launches kernels.
        check: runs it and looks.
        marked: makes what runs it with marks for profilers.
        source: what runs, for a reader.
        fusion: which kernels there are.
        fitting: sizes of calls in which everything lies as it was traced.
    """

    call: BoxedCall
    is_checked: bool
    check: Callable[[list[Any]], tuple[Sequence[Any], Found]]
    marked: Callable[[], BoxedCall]
    source: str
    fusion: Callable[[], Fusion]
    fitting: set[tuple[Any, ...]] = field(default_factory=set[tuple[Any, ...]])


class CheckedCall:
    """A boxed call that is checked until it fits.

    Args:
        form: the graph as it was traced.
        again: emits it with what was found.
        sizes: positions of the arguments that are numbers.
        name: of the graph.
    """

    __slots__ = ("_again", "_forms", "_found", "_name", "_sizes", "_steady")

    def __init__(
        self, form: Form, again: Callable[[Collection[Any]], Form], sizes: Sequence[int], name: str
    ) -> None:
        self._forms = [form]  # all are kept: a CUDA graph may replay the kernels of an earlier one
        self._again = again
        self._sizes = sizes
        self._name = name
        self._found: dict[str, Difference] = {}
        self._steady: BoxedCall | None = None  # without sizes, one call that fits is like all others

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph, and look whether everything fits if that is not known."""
        if self._steady is not None:
            return self._steady(args)
        form = self._forms[-1]
        sizes = self._sizes_of(args)
        return form.call(args) if sizes in form.fitting else self._check(form, sizes, args)

    def marked(self, args: list[Any]) -> Sequence[Any]:
        """The same for profilers."""
        form = self._forms[-1]
        return form.marked()(args) if self.fits(args) else self(args)

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether a call needs no look."""
        return self._sizes_of(args) in self._forms[-1].fitting

    def emitted(self) -> Emitted:
        """As something to call."""
        source = self._forms[-1].source
        return Emitted(
            self, source, fusion=self._fusion, with_modules=lambda: self.marked, is_settled=self.fits
        )

    def _fusion(self) -> Fusion:
        lines = dict.fromkeys(filter(None, (one.line() for one in self._found.values())))
        return replace(self._forms[-1].fusion(), restrided=tuple(lines))

    def _sizes_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([args[position] for position in self._sizes]) if self._sizes else ()

    def _check(self, form: Form, sizes: tuple[Any, ...], args: list[Any]) -> Sequence[Any]:
        results, found = form.check(args)
        if not found:
            form.fitting.add(sizes)
            if form is self._forms[-1] and not self._sizes:
                self._steady = form.call
            return results
        self._emit_again(form, found)
        return results

    @alone
    def _emit_again(self, form: Form, found: Mapping[Any, Any]) -> None:
        if form is self._forms[-1] and not found.keys() <= self._found.keys():
            both = {**self._found, **found}
            self._forms.append(self._again(both.values()))
            self._found = both
            for line in filter(None, (one.line() for one in found.values())):
                log.warning("`%s` is emitted anew: %s", self._name, line)
