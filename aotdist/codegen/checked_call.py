"""Emitted graphs that are checked when they first run: kernels rely on the strides of the trace.

The first call with each set of sizes runs the same text with launches that compare strides. If some differ,
the graph is emitted again with the real strides for the next call, which is checked in turn. A tensor that
differs at some sizes only is copied in each such call. Other calls check nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from aotdist.capture.compile_lock import alone
from aotdist.codegen.contract import BoxedCall, Emitted, Fusion

log = logging.getLogger(__name__)

Difference: TypeAlias = Any
"""A tensor whose strides are not those of the trace: an `aotdist.kernels.checking.Difference`."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One emission of a graph.

    Args:
        call: runs it.
        is_checked: whether it launches kernels.
        check: runs it and compares strides; returns the differences by the name of the node, too.
        marked: makes a version with marks for profilers.
        source: what runs, for a reader.
        fusion: which kernels there are.
        checked_sizes: sizes of the calls in which all strides were those of the trace.
    """

    call: BoxedCall
    is_checked: bool
    check: Callable[[list[Any]], tuple[Sequence[Any], Mapping[str, Difference]]]
    marked: Callable[[], BoxedCall]
    source: str
    fusion: Callable[[], Fusion]
    checked_sizes: set[tuple[Any, ...]] = field(default_factory=set[tuple[Any, ...]])


class CheckedCall:
    """A boxed call that is checked until its strides are known.

    Args:
        form: the graph as it was traced.
        emit_for: emits it with the strides that some tensors really have.
        sizes: positions of the arguments that are numbers.
        name: of the graph.
    """

    __slots__ = ("_differences", "_emit_for", "_forms", "_name", "_sizes", "_unchecked")

    def __init__(
        self, form: Form, emit_for: Callable[[Collection[Difference]], Form], sizes: Sequence[int], name: str
    ) -> None:
        self._forms = [form]  # all are kept: a CUDA graph may replay the kernels of an earlier one
        self._emit_for = emit_for
        self._sizes = sizes
        self._name = name
        self._differences: dict[str, Difference] = {}
        self._unchecked: BoxedCall | None = None  # without sizes, one checked call stands for all

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph, and compare strides if they were not for these sizes."""
        if self._unchecked is not None:
            return self._unchecked(args)
        form = self._forms[-1]
        sizes = self._sizes_of(args)
        return form.call(args) if sizes in form.checked_sizes else self._check(form, sizes, args)

    def marked(self, args: list[Any]) -> Sequence[Any]:
        """Run it with marks for profilers."""
        form = self._forms[-1]
        return form.marked()(args) if self.was_checked(args) else self(args)

    def was_checked(self, args: Sequence[Any]) -> bool:
        """Whether a call of these sizes was checked before."""
        return self._sizes_of(args) in self._forms[-1].checked_sizes

    def emitted(self) -> Emitted:
        """As something to call."""
        source = self._forms[-1].source
        return Emitted(
            self, source, fusion=self._fusion, with_modules=lambda: self.marked, is_settled=self.was_checked
        )

    def _fusion(self) -> Fusion:
        lines = dict.fromkeys(filter(None, (one.line() for one in self._differences.values())))
        return replace(self._forms[-1].fusion(), restrided=tuple(lines))

    def _sizes_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([args[position] for position in self._sizes]) if self._sizes else ()

    def _check(self, form: Form, sizes: tuple[Any, ...], args: list[Any]) -> Sequence[Any]:
        results, differences = form.check(args)
        if not differences:
            form.checked_sizes.add(sizes)
            if form is self._forms[-1] and not self._sizes:
                self._unchecked = form.call
            return results
        self._emit_again(form, differences)
        return results

    @alone
    def _emit_again(self, form: Form, differences: Mapping[str, Difference]) -> None:
        if form is self._forms[-1] and not differences.keys() <= self._differences.keys():
            both = {**self._differences, **differences}
            self._forms.append(self._emit_for(both.values()))
            self._differences = both
            for line in filter(None, (one.line() for one in differences.values())):
                log.warning("`%s` is emitted anew: %s", self._name, line)
