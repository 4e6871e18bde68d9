"""The graph passes of each stage, in their order: each named, timed, switchable, and verified after.

To add a pass: write `(Graph, Settings) -> Graph` in a module of its own name, never touching the graph
that it is given, and name it in `ORDER`, the only place that says in which order they run.
`settings.disabled_passes` leaves a pass out by name.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from aotdist.errors import BadSettings
from aotdist.passes.bucket import bucket
from aotdist.passes.chunk_losses import chunk_losses
from aotdist.passes.cleanup import cleanup
from aotdist.passes.early_updates import early_updates
from aotdist.passes.overlap import overlap
from aotdist.passes.verify import verify
from aotdist.program import Graph
from aotdist.settings import Settings

Stage = Literal["traced", "joint", "forward", "backward"]
"""Which graph a pass is given: the joint one as traced, losses whole; the prepared one; or one half of it."""

Pass: TypeAlias = Callable[[Graph, Settings], Graph]
"""Makes a new graph, or returns its argument when there is nothing to do; reports know it by its name."""

ORDER: Mapping[Stage, tuple[Pass, ...]] = MappingProxyType(
    {
        "traced": (cleanup, chunk_losses),
        "joint": (cleanup,),
        "forward": (bucket, overlap, early_updates),
        "backward": (bucket, overlap),
    }
)
"""Which passes run on which graph, in order."""

PASS_NAMES = tuple(dict.fromkeys(step.__name__ for steps in ORDER.values() for step in steps))
"""Every name that `settings.disabled_passes` may hold."""


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
    records: list[PassRecord] = []
    verified: Graph | None = None
    for step in ORDER[stage]:
        name = step.__name__
        if name in settings.disabled_passes:
            continue
        before, started = len(graph.gm.graph.nodes), time.perf_counter()
        graph = step(graph, settings)
        seconds = time.perf_counter() - started
        if settings.verify and graph is not verified:  # most passes find nothing to do
            verify(graph, after=f"{stage} pass `{name}`")
            verified = graph
        records.append(PassRecord(stage, name, seconds, before, len(graph.gm.graph.nodes)))
    return graph, tuple(records)


def _check_names(settings: Settings) -> None:
    for name in sorted(settings.disabled_passes - set(PASS_NAMES)):
        near = difflib.get_close_matches(name, PASS_NAMES, n=1)
        raise BadSettings(
            f"settings.disabled_passes holds `{name}`, which is not a pass",
            stage="passes",
            fix=f"did you mean `{near[0]}`?" if near else f"passes are {', '.join(PASS_NAMES)}",
        )
