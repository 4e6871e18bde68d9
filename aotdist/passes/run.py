"""Runs the passes of one stage: each named, timed, switchable, and verified after."""

from __future__ import annotations

import difflib
import time
from dataclasses import dataclass

from aotdist.errors import BadSettings
from aotdist.passes.context import PassContext, Stage
from aotdist.passes.order import ORDER, PASS_NAMES
from aotdist.passes.verify import verify
from aotdist.program import Graph
from aotdist.settings import Settings


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass did.

    Args:
        stage: the graph that it ran on.
        name: the pass.
        seconds: its time, without that of the check after it.
        nodes_before: nodes of the graph that it was given.
        nodes_after: nodes of the one that it returned.
    """

    stage: Stage
    name: str
    seconds: float
    nodes_before: int
    nodes_after: int


def run_passes(graph: Graph, stage: Stage, settings: Settings) -> tuple[Graph, tuple[PassRecord, ...]]:
    """The graph after every enabled pass of `stage`, and a record of each.

    Raises:
        BadSettings: `settings.disabled_passes` names no pass.
        InternalError: a pass returned a graph that breaks an invariant.
    """
    _check_names(settings)
    context = PassContext(stage, settings)
    records: list[PassRecord] = []
    for step in ORDER[stage]:
        if step.name in settings.disabled_passes:
            continue
        before, started = len(graph.gm.graph.nodes), time.perf_counter()
        graph = step.run(graph, context)
        seconds = time.perf_counter() - started
        if settings.verify:
            verify(graph, after=f"{stage} pass `{step.name}`")
        records.append(PassRecord(stage, step.name, seconds, before, len(graph.gm.graph.nodes)))
    return graph, tuple(records)


def _check_names(settings: Settings) -> None:
    for name in sorted(settings.disabled_passes - set(PASS_NAMES)):
        near = difflib.get_close_matches(name, PASS_NAMES, n=1)
        raise BadSettings(
            f"settings.disabled_passes holds `{name}`, which is not a pass",
            stage="passes",
            fix=f"did you mean `{near[0]}`?" if near else f"passes are {', '.join(PASS_NAMES)}",
        )
