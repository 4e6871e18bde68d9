"""The progress line of a compilation, and what PyTorch's logs get when it is done.

The line is rewritten in place on standard error and erased at the end; where standard error is a log, it is
written once. It appears after `_PATIENCE_S`, on the first rank only. The logs are those of `TORCH_LOGS`, and
of `TORCH_TRACE` for `tlparse`.
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

_shown: list[StageTimes] = []
"""The compilation whose line is shown: the outermost, where compilations nest."""


@dataclass(slots=True)
class StageTimes:
    """The stages of a compilation: how long each took, and which one is running.

    Args:
        name: what is compiled; empty for a graph that is compiled on the side, whose stages are not logged.
        started: when it began, by `time.perf_counter`.
        running: the stage that runs now.
        num_nodes: counts the nodes of the graph, once there is one.
        seconds: what each stage took, by name, in the order in which they ran.
    """

    name: str = ""
    started: float = field(default_factory=time.perf_counter)
    running: str = ""
    num_nodes: Callable[[], int] | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Add the time spent inside to stage `name`, and log it (level DEBUG)."""
        self.running = name
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            if self.name and log.isEnabledFor(logging.DEBUG):
                nodes = "" if self.num_nodes is None else f", {self.num_nodes():,} nodes"
                log.debug("`%s`: %s took %.2f s%s", self.name, name, seconds, nodes)

    def line(self) -> str:
        """`aotdist: compiling `Llama`: trace, 12,345 nodes, 7 s`."""
        facts = [self.running] if self.running else []
        if self.num_nodes is not None:
            facts.append(f"{self.num_nodes():,} nodes")
        facts.append(f"{time.perf_counter() - self.started:.0f} s")
        return f"aotdist: compiling `{self.name}`: {', '.join(facts)}"


@contextmanager
def showing(
    name: str, stream: TextIO | None = None, patience_s: float = _PATIENCE_S
) -> Generator[StageTimes]:
    """Show the progress line of a compilation while the block runs.

    Args:
        name: what is compiled.
        stream: where to show the line; None for standard error.
        patience_s: seconds after which it appears.
    """
    times = StageTimes(name)
    stream = _standard_error() if stream is None else stream
    if stream is None or _shown:
        yield times
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(times, stream, patience_s, done), daemon=True)
    _shown.append(times)
    thread.start()
    try:
        yield times
    finally:
        done.set()
        thread.join()
        _shown.clear()


def _show(times: StageTimes, stream: TextIO, patience_s: float, done: threading.Event) -> None:
    if done.wait(patience_s):
        return
    if not stream.isatty():
        stream.write(f"{times.line()}\n")
        stream.flush()
        return
    while True:
        columns = shutil.get_terminal_size().columns - 1
        stream.write(f"{_ERASE}{times.line()[:columns]}")
        stream.flush()
        if done.wait(_PAUSE_S):
            break
    stream.write(_ERASE)
    stream.flush()


def _standard_error() -> TextIO | None:
    """Standard error of the first rank; None where a progress bar has taken it over from a terminal."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return None
    is_replaced = sys.stderr is not sys.__stderr__
    return None if is_replaced and sys.__stderr__ is not None and sys.__stderr__.isatty() else sys.stderr


def log_compiled(artifact: Artifact) -> None:
    """Log an artifact's report (INFO), graphs, code and call (DEBUG); write all of it to `TORCH_TRACE`."""
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
    """The graphs as Python, generated code, kernels and the printed call, by name."""
    for name, graph in artifact.compilation.graphs().items():
        text = graph.gm.print_readable(print_output=False, include_stride=True, include_device=True)
        yield f"{name}_graph", text
    yield from ((f"{graph.name}_code", graph.source) for graph in details.graphs if graph.source)
    for kernel in details.kernels:
        yield f"{kernel.graph}_kernel_{kernel.name}", kernel.text
    yield "call", details.wrapper
