"""The graph passes, in the order in which they run: this list is the only place that says so.

To add a pass: write `(Graph, PassContext) -> Graph` in a module of its own name, never touching the
graph that it is given, and name it here. `settings.disabled_passes` leaves a pass out by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from aotdist.passes.bucket import bucket
from aotdist.passes.chunk_losses import chunk_losses
from aotdist.passes.cleanup import cleanup
from aotdist.passes.context import PassContext, Stage
from aotdist.passes.overlap import overlap
from aotdist.program import Graph


@dataclass(frozen=True, slots=True)
class Pass:
    """A named step from graph to graph.

    Args:
        name: what settings and reports call it.
        run: the step; returns a new graph, or its argument when there is nothing to do.
    """

    name: str
    run: Callable[[Graph, PassContext], Graph]


_CLEANUP = Pass("cleanup", cleanup)
_BUCKET = Pass("bucket", bucket)
_CHUNK_LOSSES = Pass("chunk_losses", chunk_losses)
_OVERLAP = Pass("overlap", overlap)

ORDER: Mapping[Stage, tuple[Pass, ...]] = MappingProxyType(
    {
        "joint": (_CLEANUP, _CHUNK_LOSSES),
        "forward": (_BUCKET, _OVERLAP),
        "backward": (_BUCKET, _OVERLAP),
    }
)
"""Which passes run on which graph, in order."""

PASS_NAMES = tuple(dict.fromkeys(step.name for steps in ORDER.values() for step in steps))
"""Every name that `settings.disabled_passes` may hold."""
