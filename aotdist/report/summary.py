"""The report that `explain()` returns: what was compiled, as data and as text."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType

import torch

from aotdist.codegen.contract import Emitted, Fusion, Recordings
from aotdist.facts import DataWritten
from aotdist.passes.collectives import Collective, collectives
from aotdist.passes.run import PassRecord
from aotdist.program import Graph
from aotdist.report.nodes import num_operations
from aotdist.runtime.artifact import Artifact
from aotdist.runtime.backwards import Training
from aotdist.subclasses.protocol import conversions
from aotdist.trace.blocks import Copies

NOTHING_YET = "nothing compiled yet: call it once"
_MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """One graph.

    Args:
        name: `joint`, `forward`, `backward` or `inference`.
        num_operations: number of nodes that are neither arguments nor the output.
        collectives: its collectives, in order.
        fusion: its kernels and library calls, if the backend writes kernels of its own.
        recordings: how often it was recorded and replayed, if it runs as a CUDA graph.
        from_cache: whether its code was found in the compile cache.
        regions: how often each of its regions is called; empty if it was compiled as a whole.
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
    """Host memory that an artifact keeps, without loaded machine code and what it shares with the module.

    Args:
        nodes: number of nodes in its graphs, of about two kilobytes each.
        code: bytes of printed code: source text and code objects.
        constants: bytes of the tensors that its graphs hold.
        trace: whether autograd's graph of the trace is kept for `create_graph=True`: two kilobytes for each
            operation of the joint graph.
    """

    nodes: int
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
        saved_bytes: bytes of the activations saved for the backward, without inputs.
        written: inputs that the program writes.
        converted: modules that were converted in place, by the kind of conversion.
        copies: which blocks were copied instead of traced.
        seconds: duration of each stage.
        passes: what each graph pass did.
        memory: the host memory that it keeps.
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
    """What `explain()` says of a compiled callable; print it.

    Args:
        artifacts: what was compiled.
        as_written: why other kinds of calls run eagerly (`Settings.unsupported`).
    """

    artifacts: tuple[ArtifactSummary, ...]
    as_written: tuple[str, ...] = ()

    def __str__(self) -> str:
        others = [f"run as they were written: {reason}" for reason in self.as_written]
        return "\n\n".join([*map(_artifact, self.artifacts), *others]) or NOTHING_YET

    def __repr__(self) -> str:
        return str(self)  # what a prompt shows


def report_of(artifacts: Sequence[Artifact]) -> Report:
    """The report of several artifacts."""
    return Report(tuple(summary_of(artifact) for artifact in artifacts))


def summary_of(artifact: Artifact) -> ArtifactSummary:
    """The summary of one artifact."""
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
        saved_bytes=region.joint.split.saved_bytes if training else 0,
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
    graphs = {graph.gm: graph for graph in artifact.compilation.every_graph()}.values()
    constants = {
        id(held): held.nbytes for graph in graphs for held in graph.held() if isinstance(held, torch.Tensor)
    }
    region, emitted = artifact.compilation.region, artifact.compilation.emitted().values()
    code = {id(one): sys.getsizeof(one) for one in (artifact.source, *(each.source for each in emitted))}
    for call in (artifact.call, *(inspect.unwrap(each.call) for each in emitted)):
        code[id(call)] = _bytes_of_code(getattr(call, "__code__", None))
    return Memory(
        nodes=sum(len(graph.gm.graph.nodes) for graph in graphs),
        code=sum(code.values()),
        constants=sum(constants.values()),
        trace=isinstance(region, Training) and region.has_trace(),
    )


def _bytes_of_code(code: CodeType | None) -> int:
    """The size of a code object, with its constants and nested functions."""
    if code is None:
        return 0
    inner = sum(_bytes_of_code(one) for one in code.co_consts if isinstance(one, CodeType))
    parts = (code.co_consts, code.co_names, code.co_varnames, code.co_linetable, code.co_exceptiontable)
    return sys.getsizeof(code) + sum(map(sys.getsizeof, parts)) + inner


def _graph_summary(name: str, graph: Graph, emitted: Emitted | None) -> GraphSummary:
    return GraphSummary(
        name,
        num_operations(graph),
        collectives(graph),
        fusion=emitted.fusion() if emitted and emitted.fusion else None,
        recordings=emitted.recordings() if emitted and emitted.recordings else None,
        from_cache=emitted is not None and emitted.from_cache,
        regions=emitted.regions if emitted else (),
    )


def _artifact(summary: ArtifactSummary) -> str:
    lines = [f"{summary.name} · {summary.kind} · {summary.backend}"]
    for graph in summary.graphs:
        count = f"{graph.num_operations:>7,} operations"
        lines.append(f"  {graph.name:<10}{count}  {_collectives(graph)}".rstrip())
        lines += [f"    {line}" for line in (*_recordings(graph), *_fusion(graph))]
    lines += [f"  {name}: {text}" for name, text in named_facts(summary)]
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in summary.seconds.items())
    lines.append(f"  seconds: {stages}, total {sum(summary.seconds.values()):.2f}")
    return "\n".join(lines)


def named_facts(summary: ArtifactSummary) -> Iterator[tuple[str, str]]:
    """The facts of an artifact besides its graphs and stages, by name."""
    if summary.kind == "training":
        yield "saved for backward", format_bytes(summary.saved_bytes)
    if found := [graph.name for graph in summary.graphs if graph.from_cache]:
        yield "from the compile cache", ", ".join(found)
    if cut := [graph for graph in summary.graphs if graph.regions]:
        regions = (f"{graph.name} {len(graph.regions)} for {sum(graph.regions)} calls" for graph in cut)
        yield "compiled once for equal layers", ", ".join(regions)
    if models := summary.copies.by_model():
        yield (
            "traced once for equal blocks",
            ", ".join(f"`{path}` for {n} more" for path, n in models.items()),
        )
    if traced := summary.copies.traced():
        yield "traced at each call", "; ".join(f"{n} of `{path}`: {why}" for (path, why), n in traced.items())
    if summary.written:
        yield "writes", _some(summary.written)
    for conversion, paths in summary.converted.items():
        yield conversion, ", ".join(paths)
    yield "memory", _memory_text(summary.memory)
    passes = [record for record in summary.passes if record.nodes_before != record.nodes_after]
    if passes:
        changes = (f"{r.stage} {r.name} {r.nodes_before:,} -> {r.nodes_after:,} nodes" for r in passes)
        yield "passes", ", ".join(changes)


def _memory_text(memory: Memory) -> str:
    """`1,204 nodes, 90.2 KiB of code`."""
    parts = {"code": memory.code, "constants": memory.constants}
    held = [f"{format_bytes(count)} of {name}" for name, count in parts.items() if count]
    text = ", ".join([f"{memory.nodes:,} nodes", *held])
    return f"{text}, and the trace" if memory.trace else text


def _some(names: Sequence[str]) -> str:
    """The first names of a list: a whole training step writes hundreds."""
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"


def _collectives(graph: GraphSummary) -> str:
    """Number and bytes of the collectives of each kind; empty if there are none."""
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


def _count(number: int | str) -> str:
    return f"{number:,}" if isinstance(number, int) else number


def _fusion(graph: GraphSummary) -> Iterator[str]:
    fusion = graph.fusion
    if fusion is None:
        return
    total = format_bytes(sum(kernel.num_bytes for kernel in fusion.kernels))
    yield f"{len(fusion.kernels)} kernels, which move {total}"
    width = max((len(kernel.name) for kernel in fusion.kernels), default=0)
    for kernel in fusion.kernels:
        places = _count(kernel.num_results)
        if kernel.num_reduced != 1:
            places += f" x {_count(kernel.num_reduced)}"
        registers = "not compiled" if kernel.registers is None else f"{kernel.registers} registers"
        yield (
            f"  {kernel.name:<{width}}  {format_bytes(kernel.num_bytes):>10}  {places:>16}  {registers:>13}"
        )
        yield f"      {', '.join(counted(kernel.operators))}"
        yield from (f"      {source}" for source in kernel.sources)
    if fusion.library:
        calls = (f"{count} {op} ({reason})" for (op, reason), count in fusion.library.items())
        yield f"library calls: {', '.join(calls)}"
    yield from (f"emitted anew for {line}" for line in fusion.restrided)


def counted(operators: Iterable[str]) -> Iterator[str]:
    """Operators with their counts, in order of first use: `mul.Tensor x3`."""
    for op, count in Counter(operators).items():
        name = op.removeprefix("aten.")
        yield name if count == 1 else f"{name} x{count}"


def format_bytes(count: int) -> str:
    """`1.5 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
