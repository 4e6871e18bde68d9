"""Tells PyTorch's own logs what was compiled: `TORCH_LOGS`, and `TORCH_TRACE` for `tlparse`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator

from aotdist.report.details import Details, details_of
from aotdist.report.summary import report_of
from aotdist.runtime.artifact import Artifact
from aotdist.torch_seam.dynamo import is_tracing, trace_artifacts

log = logging.getLogger(__name__)


def log_stage(name: str, stage: str, seconds: float, num_nodes: Callable[[], int] | None) -> None:
    """Log that a stage of a compilation is done (level DEBUG).

    Args:
        name: of what is compiled.
        stage: the stage that ran.
        seconds: how long it took.
        num_nodes: counts those of the graph, if there is one yet.
    """
    if log.isEnabledFor(logging.DEBUG):
        nodes = "" if num_nodes is None else f", {num_nodes():,} nodes"
        log.debug("`%s`: %s took %.2f s%s", name, stage, seconds, nodes)


def log_compiled(artifact: Artifact) -> None:
    """Log the report of what was compiled (INFO), its graphs, code and call (DEBUG); and trace all that."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", report_of([artifact]))
    if not log.isEnabledFor(logging.DEBUG) and not is_tracing():
        return
    details = details_of(artifact)
    texts = dict(_texts(artifact, details))
    for name, text in texts.items():
        log.debug("`%s`: %s\n%s", details.name, name, text)
    if is_tracing():
        stages = json.dumps({stage.name: stage.seconds for stage in details.stages}, indent=1)
        trace_artifacts({**texts, "report": str(report_of([artifact])), "stages": stages})


def _texts(artifact: Artifact, details: Details) -> Iterator[tuple[str, str]]:
    """What there is to read, by name."""
    for name, graph in artifact.compilation.graphs().items():
        text = graph.gm.print_readable(print_output=False, include_stride=True, include_device=True)
        yield f"{name}_graph", text
    for source in details.sources:
        yield f"{source.graph}_code", source.text
    for kernel in details.kernels:
        yield f"{kernel.graph}_kernel_{kernel.name}", kernel.text
    yield "call", details.wrapper
