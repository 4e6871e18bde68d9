"""Emits kernels for a GPU from all programs that the tests interpret, compiles them, and says what is wrong.

`python -m tests.kernels.emission_sweep TARGET EVERY WAYS SOURCE...` in a process that does not interpret: of
the programs of each source, or one in so many, a line for each fault, and last how many there were of what.
Each kernel is compiled in the first WAYS of being cut, once for all that differ in names alone. Where kernels
are interpreted, their blocks, the ways to cut them and what these should cost are other ones.
"""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import aotdist
from aotdist.codegen.triton import with_kernels
from aotdist.kernels.compilation import compiled_for, usage_of
from aotdist.kernels.costs import estimate
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.gpus import Target
from aotdist.program import Graph
from benchmarks.kernels.graphs import graphs_of
from tests.kernels.sources import SOURCES, Program

_NAMES = re.compile(r"\b(in|out)_\w+|(?<=def )\w+")
_TABLES = re.compile(r"\btl\.(sin|cos)\(")
"""Functions whose library keeps digits of pi in a thread's own memory, which looks like what is spilled."""


@dataclass
class Sweep:
    """What was met so far.

    Args:
        target: what is compiled for.
        ways: in how many ways, of each kernel.
        seen: sources and blocks that were compiled.
        num_graphs: that were emitted.
        num_kernels: in them.
    """

    target: Target
    ways: int
    seen: set[tuple[str, object]] = field(default_factory=set)
    num_graphs: int = 0
    num_kernels: int = 0

    def of_program(self, program: Program) -> Iterator[str]:
        """What is wrong with the kernels of a program."""
        try:
            graphs = graphs_of(program.function, *program.args, settings=program.settings, **program.kwargs)
        except aotdist.UnsupportedProgram:
            return  # of the trace, the same for every backend
        except Exception:
            yield f"{program.label}: {traceback.format_exc()}"
            return
        for kind, graph in graphs:
            self.num_graphs += 1
            try:
                yield from (f"{program.label} {kind}: {fault}" for fault in self._of_graph(graph))
            except Exception:
                yield f"{program.label} {kind}: {traceback.format_exc()}"

    def _of_graph(self, graph: Graph) -> Iterator[str]:
        for emitted in with_kernels(graph, keeps_casts=False, label="swept").kernels:
            self.num_kernels += 1
            for way in emitted.ways[: self.ways]:
                one = replace(emitted, ways=(way,))
                key = (_NAMES.sub(r"\1", one.printed.source), way)
                if key not in self.seen:
                    self.seen.add(key)
                    yield from (f"{fault}\n{way}\n{one.printed.source}" for fault in self._of_kernel(one))

    def _of_kernel(self, one: EmittedKernel) -> Iterator[str]:
        seconds, moving = estimate(one, one.config).seconds, one.num_bytes / one.gpu.bandwidth
        if not (0 < seconds and (one.kernel.r or seconds < 3e-6 + 2 * moving)):
            yield f"should take {seconds} s to move what takes {moving} s"
        usage = usage_of(compiled_for(one, self.target), self.target)
        if usage.spilled and not _TABLES.search(one.printed.source):
            yield f"spills {usage.spilled} bytes of {usage.registers} registers"


def main(target: Target, every: int, ways: int, *sources: str) -> None:
    """Print faults, and how much there was."""
    warnings.simplefilter("ignore")  # the database calls what is deprecated
    sweep = Sweep(target, ways)
    for source in sources:
        for program in SOURCES[source](every):
            for fault in sweep.of_program(program):
                print(fault, flush=True)
    print(f"{sweep.num_graphs} graphs, {sweep.num_kernels} kernels, {len(sweep.seen)} compiled")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:])  # type: ignore[arg-type]
