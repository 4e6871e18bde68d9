"""Renders a report as plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aotdist.report.summary import ArtifactSummary, GraphSummary, Memory, Report


NOTHING_YET = "nothing compiled yet: call it once"
_MOST_NAMES = 8


def render(report: Report) -> str:
    """The whole report, one paragraph an artifact."""
    return "\n\n".join([*map(_artifact, report.artifacts), *_others(report)])


def _others(report: Report) -> list[str]:
    """What there is to say beside artifacts: why calls run as they were written, or that there are none."""
    if report.as_written:
        return [f"run as they were written: {reason}" for reason in report.as_written]
    return [] if report.artifacts else [NOTHING_YET]


def _artifact(summary: ArtifactSummary) -> str:
    lines = [f"{summary.name} · {summary.kind} · {summary.backend}"]
    for graph in summary.graphs:
        count = f"{graph.num_operations:>7,} operations"
        lines.append(f"  {graph.name:<10}{count}  {_collectives(graph)}".rstrip())
        lines += [f"    {line}" for line in _kernels(graph)]
    lines += [f"  {name}: {text}" for name, text in named_facts(summary)]
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in summary.seconds.items())
    lines.append(f"  seconds: {stages}, total {sum(summary.seconds.values()):.2f}")
    return "\n".join(lines)


def named_facts(summary: ArtifactSummary) -> Iterator[tuple[str, str]]:
    """What there is to say of an artifact beside its graphs and stages, by name."""
    if summary.kind == "training":
        yield "saved for backward", format_bytes(summary.saved_bytes)
    if found := [graph.name for graph in summary.graphs if graph.from_cache]:
        yield "from the compile cache", ", ".join(found)
    if cut := [graph for graph in summary.graphs if graph.regions]:
        regions = (f"{graph.name} {len(graph.regions)} for {sum(graph.regions)} calls" for graph in cut)
        yield "compiled once for equal layers", ", ".join(regions)
    if models := summary.copies.by_model():
        yield (
            "traced once for equal blocks",
            ", ".join(f"`{path}` for {n} more" for path, n in models.items()),
        )
    if traced := summary.copies.traced():
        yield "traced at each call", "; ".join(f"{n} of `{path}`: {why}" for (path, why), n in traced.items())
    if summary.written:
        yield "writes", _some(summary.written)
    for conversion, paths in summary.converted.items():
        yield conversion, ", ".join(paths)
    yield "memory", _memory(summary.memory)
    passes = [record for record in summary.passes if record.nodes_before != record.nodes_after]
    if passes:
        changes = (f"{r.stage} {r.name} {r.nodes_before:,} -> {r.nodes_after:,} nodes" for r in passes)
        yield "passes", ", ".join(changes)


def _memory(memory: Memory) -> str:
    """What an artifact keeps on the host: `48.1 KiB of graphs, 90.2 KiB of code`."""
    parts = {"graphs": memory.graphs, "code": memory.code, "constants": memory.constants}
    text = ", ".join(f"{format_bytes(count)} of {name}" for name, count in parts.items() if count)
    return f"{text}, and the trace" if memory.trace else text


def _some(names: Sequence[str]) -> str:
    """The first names of a list: a whole training step writes hundreds."""
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"


def _collectives(graph: GraphSummary) -> str:
    """How many collectives there are of each kind, and their bytes; empty if there are none."""
    if not graph.collectives:
        return ""
    counts = Counter(collective.op for collective in graph.collectives)
    sizes = Counter[str]()
    for collective in graph.collectives:
        sizes[collective.op] += collective.num_bytes
    return ", ".join(f"{count} {op} ({format_bytes(sizes[op])})" for op, count in counts.items())


def _kernels(graph: GraphSummary) -> Iterator[str]:
    """What became of a graph that is recorded, or that kernels of our own compute."""
    yield from _recordings(graph)
    yield from _fusion(graph)


def _recordings(graph: GraphSummary) -> Iterator[str]:
    found = graph.recordings
    if found is None:
        return
    without = ", ".join(f"{count} {why}" for why, count in found.without.items())
    yield f"CUDA graph: {found.made} recorded, {found.replays} replays; run without: {without or 'never'}"


def _count(number: int | str) -> str:
    return f"{number:,}" if isinstance(number, int) else number


def _fusion(graph: GraphSummary) -> Iterator[str]:
    fusion = graph.fusion
    if fusion is None:
        return
    total = format_bytes(sum(kernel.num_bytes for kernel in fusion.kernels))
    yield f"{len(fusion.kernels)} kernels, which move {total}"
    width = max((len(kernel.name) for kernel in fusion.kernels), default=0)
    for kernel in fusion.kernels:
        places = _count(kernel.num_results)
        if kernel.num_reduced != 1:
            places += f" x {_count(kernel.num_reduced)}"
        registers = "not compiled" if kernel.registers is None else f"{kernel.registers} registers"
        yield (
            f"  {kernel.name:<{width}}  {format_bytes(kernel.num_bytes):>10}  {places:>16}  {registers:>13}"
        )
        yield f"      {', '.join(counted(kernel.operators))}"
        yield from (f"      {source}" for source in kernel.sources)
    if fusion.library:
        calls = (f"{count} {op} ({reason})" for (op, reason), count in fusion.library.items())
        yield f"library calls: {', '.join(calls)}"
    yield from (f"emitted anew for {line}" for line in fusion.restrided)


def counted(operators: Iterable[str]) -> Iterator[str]:
    """Operators in the order in which they are first met: `mul.Tensor x3`."""
    for op, count in Counter(operators).items():
        name = op.removeprefix("aten.")
        yield name if count == 1 else f"{name} x{count}"


def format_bytes(count: int) -> str:
    """`1.5 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
