"""Sorts a trace of PyTorch's profiler into lanes: phases, modules, compute, each process group, waits.

A collective is *exposed* while it runs, or is waited for, and nothing computes. On a GPU, kernels tell. On a
CPU, a group's own threads run its collectives, and the program computes while an operator or a compiled graph
runs and does not wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from aotdist.codegen.marks import GRAPH_MARK, MODULE_MARK, Communication, communications_of

Stretches: TypeAlias = list[tuple[float, float]]
"""Disjoint intervals of time as (start, end) in microseconds, in order."""


@dataclass(frozen=True, slots=True)
class Span:
    """One event of a trace.

    Args:
        name: of the event.
        start: in microseconds.
        end: likewise.
        thread: the thread that it ran in.
    """

    name: str
    start: float
    end: float
    thread: int | str = 0

    def holds(self, other: Span) -> bool:
        """Whether `other` lies within this one."""
        return self.start <= other.start and other.end <= self.end


def stretches(spans: Iterable[Span]) -> Stretches:
    """The merged intervals in which at least one of the spans ran."""
    return _joined((span.start, span.end) for span in spans)


def union(*several: Stretches) -> Stretches:
    """The union of several sets of intervals."""
    return _joined(stretch for one in several for stretch in one)


def minus(whole: Stretches, removed: Stretches) -> Stretches:
    """The difference of two sets of intervals."""
    return list(_minus(whole, removed))


def within(one: Stretches, other: Stretches) -> Stretches:
    """The intersection of two sets of intervals."""
    return minus(one, minus(one, other))


def total(intervals: Stretches) -> float:
    """The summed length of the intervals."""
    return sum(end - start for start, end in intervals)


def outermost(spans: Iterable[Span]) -> Iterator[Span]:
    """The spans that lie within no other span of their thread."""
    ends: dict[int | str, float] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.end > ends.get(span.thread, float("-inf")):
            ends[span.thread] = span.end
            yield span


def _joined(pairs: Iterable[tuple[float, float]]) -> Stretches:
    joined: Stretches = []
    for start, end in sorted(pairs):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _minus(whole: Stretches, removed: Stretches) -> Iterator[tuple[float, float]]:
    first = 0
    for start, end in whole:
        while first < len(removed) and removed[first][1] <= start:
            first += 1
        at = first
        while at < len(removed) and removed[at][0] < end:
            if start < removed[at][0]:
                yield start, removed[at][0]
            start = max(start, removed[at][1])
            at += 1
        if start < end:
            yield start, end


STEP_MARK = "aotdist step "
"""Prefix of the mark around a step; the step's number follows."""

_SHORT_US = 5.0
"""Gaps between operators that are shorter than this get no span of compiled code."""
_OURS = (GRAPH_MARK, MODULE_MARK)
"""Our own marks, which a trace lists among the operators."""
_COLLECTIVES = "_c10d_functional::"
_WAIT = "_c10d_functional::wait_tensor"
_WRAP = "_c10d_functional::_wrap_tensor_autograd"
_ENGINE = "autograd::engine::"
_GLOO = "gloo:"
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of the trace."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of a trace.

    Args:
        steps: the profiled steps.
        phases: graphs, optimizer steps, and the user's own marks.
        modules: one span for each module of a graph, nested like the modules.
        compute: a GPU's kernels, or a CPU's operators and graphs.
        groups: collectives by process group; on a CPU, one lane for all that gloo ran.
        waits: waits for collectives.
        exposed: when a collective ran, or was waited for, and nothing computed.
    """

    steps: Lane
    phases: Lane
    modules: Lane
    compute: Lane
    groups: tuple[Lane, ...]
    waits: Lane
    exposed: Lane

    def all(self) -> tuple[Lane, ...]:
        """Every lane, from top to bottom."""
        return (self.steps, self.phases, self.modules, self.compute, *self.groups, self.waits, self.exposed)


def lanes_of(events: Iterable[Mapping[str, Any]]) -> Lanes:
    """The lanes of a trace.

    Args:
        events: `traceEvents` of a trace in Chrome's format.
    """
    by_category: dict[str, list[tuple[Span, Mapping[str, Any]]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and "dur" in event:
            span = Span(event["name"], event["ts"], event["ts"] + event["dur"], event.get("tid", 0))
            by_category[event.get("cat", "")].append((span, event.get("args", {})))
    operators = [span for span, _ in by_category["cpu_op"] if not span.name.startswith(_OURS)]
    ours = [span for span, _ in by_category["cpu_op"] if span.name.startswith(_OURS)]
    marks = [*ours, *(span for span, _ in by_category["user_annotation"])]
    kernels = [found for category in _DEVICE for found in by_category[category]]
    steps = _in_order(span for span in marks if span.name.startswith(STEP_MARK))
    graphs = _in_order(span for span in marks if span.name.startswith(GRAPH_MARK))
    waits = _waits(graphs, operators)
    if kernels:
        groups = _groups_of_kernels(kernels)
        compute = _in_order(span for span, args in kernels if not _is_communication(span, args))
        busy = stretches(compute)
        communicating = stretches(span for lane in groups for span in lane.spans)
    else:
        ran = [span for span in marks if span.name.startswith(_GLOO)]
        groups = (Lane("gloo", tuple(_named(_in_order(ran), _GLOO))),) if ran else ()
        of_groups = {span.thread for span in ran}
        beside = [span for span in operators if span.thread not in of_groups]
        compute = [*outermost(span for span in beside if not _is_around(span, graphs))]
        blocked = stretches(waits)
        busy = minus(union(stretches(compute), stretches(graphs)), blocked)
        compute += _between(minus(busy, stretches(compute)))
        communicating = union(stretches(ran), blocked)
    exposed = within(minus(communicating, busy), stretches(steps))
    return Lanes(
        steps=Lane("steps", tuple(_named(steps, "aotdist "))),
        phases=Lane("phases", tuple(_phases(marks))),
        modules=Lane("modules", tuple(_modules(graphs, marks))),
        compute=Lane("compute", tuple(compute)),
        groups=groups,
        waits=Lane("waits", tuple(waits)),
        exposed=Lane("exposed communication", tuple(Span("exposed", *stretch) for stretch in exposed)),
    )


def exposed_percent(lanes: Lanes) -> float:
    """The share of the steps' time that is exposed communication."""
    whole = total(stretches(lanes.steps.spans))
    return 100 * total(stretches(lanes.exposed.spans)) / whole if whole else 0.0


def _in_order(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start, -span.end))


def _is_around(span: Span, graphs: Iterable[Span]) -> bool:
    """Whether an operator is a wait, or only contains a graph, as autograd's nodes do."""
    if span.name == _WAIT or span.name.startswith(_ENGINE):
        return True
    return any(span.holds(graph) and span.thread == graph.thread for graph in graphs)


def _between(code: Stretches) -> Iterator[Span]:
    """Spans for the time in which a graph calls no operator: on a CPU, for Inductor's kernels."""
    for start, end in code:
        if end - start >= _SHORT_US:
            yield Span("compiled code", start, end)


def _named(spans: Iterable[Span], prefix: str) -> Iterator[Span]:
    for span in spans:
        yield Span(span.name.removeprefix(prefix), span.start, span.end, span.thread)


def _phases(marks: Iterable[Span]) -> Iterator[Span]:
    """The marks of graphs and optimizers, and the user's own."""
    for span in _in_order(marks):
        if span.name.startswith(GRAPH_MARK):
            yield Span(span.name.partition(": ")[2], span.start, span.end, span.thread)
        elif not span.name.startswith((STEP_MARK, MODULE_MARK, _GLOO)):
            yield span


def _modules(graphs: Iterable[Span], marks: Iterable[Span]) -> Iterator[Span]:
    """Spans of the modules within graphs, nested like the modules."""
    inner = _in_order(span for span in marks if span.name.startswith(MODULE_MARK))
    for graph in graphs:
        yield from _nested([span for span in inner if graph.holds(span) and span.thread == graph.thread])


def _nested(marks: Sequence[Span]) -> Iterator[Span]:
    """Spans for every level of the paths of consecutive marks: a common prefix is one span."""
    open_spans: list[Span] = []  # the modules that are open now, outermost first
    for mark in marks:
        path = mark.name.removeprefix(MODULE_MARK)
        names = [*_prefixes(path)]
        common = 0
        while common < min(len(open_spans), len(names)) and open_spans[common].name == names[common]:
            common += 1
        yield from open_spans[common:]
        grown = [Span(span.name, span.start, mark.end, span.thread) for span in open_spans[:common]]
        open_spans = [*grown, *(Span(name, mark.start, mark.end, mark.thread) for name in names[common:])]
    yield from open_spans


def _prefixes(path: str) -> Iterator[str]:
    """`layers.0` and `layers.0.mlp` for `layers.0.mlp`; not `layers`, as a list of layers never runs."""
    path, _, note = path.partition(" ")
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        is_container = length < len(parts) and parts[length].isdigit()
        if not is_container:
            yield " ".join(filter(None, (".".join(parts[:length]), note)))


def _is_communication(span: Span, args: Mapping[str, Any]) -> bool:
    return "Collective name" in args or span.name.startswith(("ncclDevKernel", "ncclKernel"))


def _groups_of_kernels(kernels: Iterable[tuple[Span, Mapping[str, Any]]]) -> tuple[Lane, ...]:
    """A lane for each process group whose kernels ran on a GPU."""
    found: dict[str, list[Span]] = defaultdict(list)
    for span, args in kernels:
        if _is_communication(span, args):
            word = args.get("Process Group Description") or args.get("Process Group Name") or "a group"
            size = f" ({args['Group size']} ranks)" if "Group size" in args else ""
            found[f"{word}{size}"].append(
                Span(args.get("Collective name", span.name), span.start, span.end, span.thread)
            )
    return tuple(Lane(name, tuple(_in_order(spans))) for name, spans in sorted(found.items()))


def _waits(graphs: Iterable[Span], operators: Iterable[Span]) -> list[Span]:
    """Spans of waits, named by their collectives where the compiler kept the collectives' order."""
    functional = _in_order(
        span for span in operators if span.name.startswith(_COLLECTIVES) and span.name != _WRAP
    )
    waits = {span: span.name.removeprefix(_COLLECTIVES) for span in functional if span.name == _WAIT}
    for graph in graphs:
        seen = [span for span in functional if graph.holds(span) and span.thread == graph.thread]
        known = communications_of(graph.name)
        if [span.name for span in seen] == [what.op for what in known]:
            pairs = zip(seen, known, strict=True)
            waits |= {span: _words(what) for span, what in pairs if span.name == _WAIT}
    return [Span(name, span.start, span.end, span.thread) for span, name in waits.items()]


def _words(what: Communication) -> str:
    return " ".join(filter(None, (what.collective, what.serves and f"of {what.serves}")))


def seconds_exposed(lane: Lane, lanes: Lanes) -> float:
    """The time in which a process group ran something and nothing computed."""
    return total(within(stretches(lane.spans), stretches(lanes.exposed.spans))) / 1e6
