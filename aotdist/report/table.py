"""Renders a report as tables for a terminal; needs `rich`, so it is imported where there is one."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from aotdist.report.summary import ArtifactSummary, Report
from aotdist.report.text import collectives_text, kernel_lines, named_facts, others

_BAR = 24
"""Characters of the longest bar."""


def show_in_terminal(report: Report, console: Console | None = None) -> None:
    """Print the report's tables on the console, standard output by default."""
    console = console or Console()
    for summary in report.artifacts:
        console.print(Group(*_artifact(summary)))
    for text in others(report):
        console.print(Text(text))


def _artifact(summary: ArtifactSummary) -> Iterator[RenderableType]:
    yield Text.assemble((summary.name, "bold"), f"  {summary.kind}, {summary.backend}")
    yield Padding(_graphs(summary), (0, 0, 0, 2))
    for graph in summary.graphs:
        if lines := list(kernel_lines(graph)):
            yield Padding(Text.assemble((f"{graph.name}\n", "bold"), "\n".join(lines)), (0, 0, 1, 2))
    yield Padding(_stages(summary), (0, 0, 0, 2))
    yield Padding(_facts(summary), (0, 0, 1, 2))


def _graphs(summary: ArtifactSummary) -> Table:
    table = Table("graph", box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("operations", justify="right")
    table.add_column("collectives")
    for graph in summary.graphs:
        table.add_row(graph.name, f"{graph.num_operations:,}", Text(collectives_text(graph) or "none"))
    return table


def _stages(summary: ArtifactSummary) -> Table:
    total = sum(summary.seconds.values())
    longest = max(summary.seconds.values(), default=0.0) or 1.0
    table = Table("stage", box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("seconds", justify="right")
    table.add_column("")
    for name, seconds in summary.seconds.items():
        table.add_row(name, f"{seconds:.2f}", Text("█" * round(_BAR * seconds / longest), style="cyan"))
    table.add_row(Text("total", style="bold"), Text(f"{total:.2f}", style="bold"), "")
    return table


def _facts(summary: ArtifactSummary) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, text in named_facts(summary):
        table.add_row(Text(name, style="dim"), Text(text))
    return table
