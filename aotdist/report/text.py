"""Renders a report as plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aotdist.report.summary import ArtifactSummary, GraphSummary, Report


def render(report: Report) -> str:
    """The whole report, one paragraph an artifact."""
    if not report.artifacts:
        return "nothing compiled yet: call it once"
    return "\n\n".join(_artifact(summary) for summary in report.artifacts)


def _artifact(summary: ArtifactSummary) -> str:
    lines = [f"{summary.name} · {summary.kind} · {summary.backend}"]
    for graph in summary.graphs:
        lines.append(f"  {graph.name:<10}{graph.num_nodes:>7,} nodes  {_collectives(graph)}".rstrip())
        lines += [f"    {line}" for line in (*_recordings(graph), *_fusion(graph))]
    if summary.kind == "training":
        lines.append(f"  saved for backward: {format_bytes(summary.saved_bytes)}")
    if summary.written:
        lines.append(f"  writes: {', '.join(summary.written)}")
    for conversion, paths in summary.converted.items():
        lines.append(f"  {conversion}: {', '.join(paths)}")
    passes = [record for record in summary.passes if record.nodes_before != record.nodes_after]
    if passes:
        changes = (f"{r.stage} {r.name} {r.nodes_before:,} -> {r.nodes_after:,}" for r in passes)
        lines.append(f"  passes: {', '.join(changes)}")
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in summary.seconds.items())
    lines.append(f"  seconds: {stages}, total {sum(summary.seconds.values()):.2f}")
    return "\n".join(lines)


def _collectives(graph: GraphSummary) -> str:
    if not graph.collectives:
        return ""
    counts = Counter(collective.op for collective in graph.collectives)
    sizes = Counter[str]()
    for collective in graph.collectives:
        sizes[collective.op] += collective.num_bytes
    return ", ".join(f"{count} {op} ({format_bytes(sizes[op])})" for op, count in counts.items())


def _recordings(graph: GraphSummary) -> Iterator[str]:
    found = graph.recordings
    if found is None:
        return
    without = ", ".join(f"{count} {why}" for why, count in found.without.items())
    yield f"CUDA graph: {found.made} recorded, {found.replays} replays; run without: {without or 'never'}"


def _fusion(graph: GraphSummary) -> Iterator[str]:
    fusion = graph.fusion
    if fusion is None:
        return
    total = format_bytes(sum(kernel.num_bytes for kernel in fusion.kernels))
    yield f"{len(fusion.kernels)} kernels, which move {total}"
    width = max((len(kernel.name) for kernel in fusion.kernels), default=0)
    for kernel in fusion.kernels:
        places = f"{kernel.num_results:,}" + (f" x {kernel.num_reduced:,}" if kernel.num_reduced > 1 else "")
        yield (
            f"  {kernel.name:<{width}}  {format_bytes(kernel.num_bytes):>10}  {places:>16}"
            f"  {len(kernel.operators)} operators"
        )
    if fusion.library:
        calls = (f"{count} {op} ({reason})" for (op, reason), count in fusion.library.items())
        yield f"library calls: {', '.join(calls)}"


def format_bytes(count: int) -> str:
    """`1.5 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
