"""What a compilation is at, for the person who waits for it, and what it has made, for PyTorch's own logs.

The first is one line of a terminal, rewritten. Nothing is shown of what takes less than `_PATIENCE_S`, and on
any rank but the first. The line is standard error's, and is gone when the compilation is done. Where standard
error is a log, the line is written once. The logs are those of `TORCH_LOGS`, and `TORCH_TRACE` for `tlparse`.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

import torch.distributed as dist

from aotdist.report.details import Details, details_of
from aotdist.report.summary import report_of
from aotdist.runtime.artifact import Artifact
from aotdist.torch_seam.dynamo import is_tracing, trace_artifacts

log = logging.getLogger(__name__)

_PATIENCE_S = 2.0
_PAUSE_S = 0.1
"""Seconds between two updates: a line takes 20 us, and the thread that compiles waits for no other."""
_ERASE = "\r\x1b[2K"

_shown: list[Progress] = []
"""The compilation that has the line: of several within each other, the outermost."""


@dataclass(slots=True)
class Progress:
    """What a compilation is at.

    Args:
        name: of what is compiled.
        started: when it began, by the clock of `time.perf_counter`.
        stage: the stage that runs.
        num_nodes: counts the nodes of the graph that there is, if there is one yet.
    """

    name: str
    started: float = field(default_factory=time.perf_counter)
    stage: str = ""
    num_nodes: Callable[[], int] | None = None

    def line(self) -> str:
        """`aotdist: compiling `Llama`: trace, 12,345 nodes, 7 s`."""
        facts = [self.stage] if self.stage else []
        if self.num_nodes is not None:
            facts.append(f"{self.num_nodes():,} nodes")
        facts.append(f"{time.perf_counter() - self.started:.0f} s")
        return f"aotdist: compiling `{self.name}`: {', '.join(facts)}"


@contextmanager
def showing(name: str, stream: TextIO | None = None, patience_s: float = _PATIENCE_S) -> Generator[Progress]:
    """Show what a compilation is at, as long as the block runs.

    Args:
        name: of what is compiled.
        stream: where to show it; None for standard error.
        patience_s: seconds after which it is shown.
    """
    progress = Progress(name)
    stream = _standard_error() if stream is None else stream
    if stream is None or _shown:
        yield progress
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(progress, stream, patience_s, done), daemon=True)

    _shown.append(progress)
    thread.start()
    try:
        yield progress
    finally:
        done.set()
        thread.join()
        _shown.clear()


def _show(progress: Progress, stream: TextIO, patience_s: float, done: threading.Event) -> None:
    if done.wait(patience_s):
        return
    if not stream.isatty():
        stream.write(f"{progress.line()}\n")
        stream.flush()
        return
    while True:
        columns = shutil.get_terminal_size().columns - 1
        stream.write(f"{_ERASE}{progress.line()[:columns]}")
        stream.flush()
        if done.wait(_PAUSE_S):
            break
    stream.write(_ERASE)
    stream.flush()


def _standard_error() -> TextIO | None:
    """Where a person may be looking; not beneath a bar that has replaced a terminal."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return None
    is_replaced = sys.stderr is not sys.__stderr__
    return None if is_replaced and sys.__stderr__ is not None and sys.__stderr__.isatty() else sys.stderr


@dataclass(slots=True)
class StageTimes:
    """Seconds of each stage, in the order in which they ran.

    Args:
        seconds: how long each stage took, by its name.
        progress: told which stage runs, for somebody who waits for it.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    progress: Progress | None = None

    def counting(self, num_nodes: Callable[[], int]) -> None:
        """Let the progress line count nodes by `num_nodes`."""
        if self.progress is not None:
            self.progress.num_nodes = num_nodes

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Add the time spent inside to stage `name`."""
        if self.progress is not None:
            self.progress.stage = name
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            if self.progress is not None:
                log_stage(self.progress.name, name, seconds, self.progress.num_nodes)


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
        stages = json.dumps(dict(details.seconds), indent=1)
        trace_artifacts({**texts, "report": str(report_of([artifact])), "stages": stages})


def _texts(artifact: Artifact, details: Details) -> Iterator[tuple[str, str]]:
    """What there is to read, by name."""
    for name, graph in artifact.compilation.graphs().items():
        text = graph.gm.print_readable(print_output=False, include_stride=True, include_device=True)
        yield f"{name}_graph", text
    yield from ((f"{graph.name}_code", graph.source) for graph in details.graphs if graph.source)
    for kernel in details.kernels:
        yield f"{kernel.graph}_kernel_{kernel.name}", kernel.text
    yield "call", details.wrapper
