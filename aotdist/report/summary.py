"""What compiling produced, as data for people: `explain()` returns it, `str` renders it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType

from aotdist.codegen.contract import Emitted, Fusion, Recordings
from aotdist.facts import DataWritten
from aotdist.passes.collectives import Collective, collectives
from aotdist.passes.run import PassRecord
from aotdist.program import Graph
from aotdist.report.nodes import num_operations
from aotdist.report.text import render
from aotdist.runtime.artifact import Artifact
from aotdist.runtime.compilation import Training
from aotdist.subclasses.protocol import conversions
from aotdist.trace.blocks.copies import Copies


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """One graph.

    Args:
        name: `joint`, `forward`, `backward` or `inference`.
        num_operations: nodes, placeholders and the output not counted.
        collectives: its collectives, in order.
        fusion: its kernels and what was left to the library, from a backend that writes its own.
        recordings: what became of its calls, if it is recorded as a CUDA graph.
        from_cache: its code was found in the compile cache.
        regions: how often each of its regions is called; none if it was compiled as a whole.
    """

    name: str
    num_operations: int
    collectives: tuple[Collective, ...]
    fusion: Fusion | None
    recordings: Recordings | None
    from_cache: bool
    regions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """What an artifact keeps on the host, in bytes.

    Machine code that a compiler loaded, and what the artifact shares with the module, are not counted.

    Args:
        graphs: its graphs, packed.
        code: printed code: its text, and what Python made of it.
        constants: tensors that its graphs hold.
        trace: whether autograd's graph of the trace is kept, for `create_graph=True`: two kilobytes for each
            operation of the joint graph.
    """

    graphs: int
    code: int
    constants: int
    trace: bool


@dataclass(frozen=True, slots=True)
class ArtifactSummary:
    """One compiled signature.

    Args:
        name: of the function or module.
        kind: `training` or `inference`.
        backend: what emitted the graphs.
        graphs: every graph.
        saved_bytes: activations kept from forward to backward; inputs are not counted.
        written: inputs that the program writes.
        converted: modules that were converted in place, by what they compute in.
        copies: which blocks were copied rather than traced.
        seconds: of each stage.
        passes: what each graph pass did.
        memory: what it keeps.
    """

    name: str
    kind: str
    backend: str
    graphs: tuple[GraphSummary, ...]
    saved_bytes: int
    written: tuple[str, ...]
    converted: Mapping[str, tuple[str, ...]]
    copies: Copies
    seconds: Mapping[str, float]
    passes: tuple[PassRecord, ...]
    memory: Memory


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a compiled callable can tell about itself; to be printed.

    Args:
        artifacts: what was compiled.
        as_written: why other calls run as they were written (`Settings.unsupported`).
    """

    artifacts: tuple[ArtifactSummary, ...]
    as_written: tuple[str, ...] = ()

    def __str__(self) -> str:
        return render(self)

    def __repr__(self) -> str:
        return render(self)  # what a prompt shows


def report_of(artifacts: Sequence[Artifact]) -> Report:
    """The report of a list of artifacts."""
    return Report(tuple(summary_of(artifact) for artifact in artifacts))


def summary_of(artifact: Artifact) -> ArtifactSummary:
    """What an artifact can tell about itself."""
    compilation = artifact.compilation
    region, facts = compilation.region, compilation.traced.facts
    slots = compilation.traced.program.ins
    training = isinstance(region, Training)
    emitted = compilation.emitted()
    return ArtifactSummary(
        name=compilation.captured.name,
        kind="training" if training else "inference",
        backend=compilation.backend,
        graphs=tuple(
            _graph_summary(name, graph, emitted.get(name)) for name, graph in compilation.graphs().items()
        ),
        saved_bytes=region.graphs.split.saved_bytes if training else 0,
        written=tuple(
            slots[idx].path for idx, fact in facts.inputs.enumerate() if isinstance(fact, DataWritten)
        ),
        converted=conversions(compilation.captured.environment.modules),
        copies=compilation.traced.copies,
        seconds=compilation.seconds,
        passes=compilation.records,
        memory=_memory(artifact),
    )


def _memory(artifact: Artifact) -> Memory:
    held = {graph.held for graph in artifact.compilation.every_graph()}
    constants = {id(tensor): tensor.nbytes for one in held for tensor in one.constants()}
    region, emitted = artifact.compilation.region, artifact.compilation.emitted().values()
    code = {id(one): sys.getsizeof(one) for one in (artifact.source, *(each.source for each in emitted))}
    for call in (artifact.call, *(inspect.unwrap(each.call) for each in emitted)):
        code[id(call)] = _bytes_of_code(getattr(call, "__code__", None))
    return Memory(
        graphs=sum(one.num_bytes() for one in held),
        code=sum(code.values()),
        constants=sum(constants.values()),
        trace=isinstance(region, Training) and region.backwards.has_trace(),
    )


def _bytes_of_code(code: CodeType | None) -> int:
    """What a function's code takes, with its constants and the functions inside of it."""
    if code is None:
        return 0
    inner = sum(_bytes_of_code(one) for one in code.co_consts if isinstance(one, CodeType))
    parts = (code.co_consts, code.co_names, code.co_varnames, code.co_linetable, code.co_exceptiontable)
    return sys.getsizeof(code) + sum(map(sys.getsizeof, parts)) + inner


def _graph_summary(name: str, graph: Graph, emitted: Emitted | None) -> GraphSummary:
    count = num_operations(graph)
    if emitted is None:
        return GraphSummary(name, count, collectives(graph), None, None, from_cache=False)
    fusion = emitted.fusion() if emitted.fusion else None
    recordings = emitted.recordings() if emitted.recordings else None
    return GraphSummary(
        name,
        count,
        collectives(graph),
        fusion,
        recordings,
        from_cache=emitted.from_cache,
        regions=emitted.regions,
    )
