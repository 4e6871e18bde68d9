"""Everything that a page shows of one artifact, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aotdist.capture.captured import Returned
from aotdist.codegen.python_source import tensor_text
from aotdist.convention.dedupe import DedupePlan
from aotdist.facts import Fresh, NotATensor, OutputFact
from aotdist.passes.run import PassRecord
from aotdist.program import ArgIdx, DistinctIdx, OutIdx, Row, Slot
from aotdist.report import words
from aotdist.report.nodes import (
    CollectiveDetails,
    GraphDetails,
    Saved,
    collective_details,
    graph_details,
    saved_details,
)
from aotdist.report.summary import counted, named_facts, summary_of
from aotdist.runtime.artifact import Artifact
from aotdist.runtime.compilation import Compilation, Training
from aotdist.runtime.ranks import board_of_this_process, poll
from aotdist.subclasses.protocol import Recipe, Wrapper, leaves

_PATIENCE_S = 5.0
"""How long rank 0 waits for what the others tell when they call `explain` themselves."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """How an artifact differs from rank to rank.

    Args:
        others: ranks that rank 0 is compared with.
        missing: ranks that did not tell.
        differences: what is not the same on all ranks, by name: its text on each rank.
    """

    others: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    differences: Mapping[str, Mapping[int, str]] = field(default_factory=dict[str, Mapping[int, str]])


_SHOWN = ("writes", "passes")
"""What the page shows in sections of its own."""

ALONE = Ranks()
"""There are no others."""

Told = Mapping[str, str]
"""What a rank tells of an artifact, by name."""


def compared(told: Mapping[int, Told | None]) -> Ranks:
    """The differences between ranks, of which some may not have told anything."""
    known = {rank: facts for rank, facts in told.items() if facts is not None}
    names = dict.fromkeys(name for facts in known.values() for name in facts)
    rows = {name: {rank: facts.get(name, "not there") for rank, facts in known.items()} for name in names}
    return Ranks(
        others=tuple(rank for rank in known if rank != 0),
        missing=tuple(rank for rank in told if rank not in known),
        differences={name: row for name, row in rows.items() if len(set(row.values())) > 1},
    )


def meet(told: Sequence[Told]) -> tuple[Ranks, ...] | None:
    """Tell the other ranks of this process's artifacts; on rank 0, compare.

    Returns:
        for each artifact how ranks differ, on rank 0; None on the others.
    """
    board = board_of_this_process()
    if board is None:
        return tuple(ALONE for _ in told)
    topic, ranks = f"report/{len(told)}", range(board.num_ranks)
    board.say(topic, list(told))
    if board.rank != 0:
        return None
    keys = [f"{topic}/{rank}" for rank in ranks]
    poll(lambda waited: board.has(keys) or waited > _PATIENCE_S or None)
    found = board.said(topic, ranks)
    return tuple(
        compared({rank: found[rank][at] if rank in found else None for rank in ranks})
        for at in range(len(told))
    )


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """An input or an output, its type (`f32[8, 16]`) and what happens to it, in words."""

    name: str
    type: str
    facts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelDetails:
    """A kernel of our own, with its source."""

    graph: str
    name: str
    operators: tuple[str, ...]
    bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class Details:
    """One artifact.

    Args:
        name: of the function or module.
        kind: `training` or `inference`.
        backend: what emitted the graphs.
        seconds: of each stage, in the order in which they ran.
        passes: what each graph pass did.
        inputs: what the program takes; `outputs` what it gives.
        graphs: the joint graph first.
        saved: from forward to backward.
        collectives: of the graphs that run, in the order in which they start.
        kernels: of a backend that writes its own.
        wrapper: the printed call.
        facts: what else there is to say, by name: what is saved, blocks that were traced once, memory.
        ranks: how other ranks differ.
    """

    name: str
    kind: str
    backend: str
    seconds: Mapping[str, float]
    passes: tuple[PassRecord, ...]
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    graphs: tuple[GraphDetails, ...]
    saved: tuple[Saved, ...]
    collectives: tuple[CollectiveDetails, ...]
    kernels: tuple[KernelDetails, ...]
    wrapper: str
    facts: tuple[tuple[str, str], ...] = ()
    ranks: Ranks = ALONE


def details_of(artifact: Artifact) -> Details:
    """What a page shows of an artifact, seen from this rank alone."""
    compilation = artifact.compilation
    region = compilation.region
    graphs, emitted = compilation.graphs(), compilation.emitted()
    split = region.graphs.split if isinstance(region, Training) else None
    return Details(
        name=compilation.captured.name,
        kind="inference" if split is None else "training",
        backend=compilation.backend,
        seconds=compilation.seconds,
        passes=compilation.records,
        inputs=tuple(_inputs(compilation)),
        outputs=tuple(_outputs(compilation)),
        graphs=tuple(
            graph_details(name, graph, split, emitted[name].source if name in emitted else "")
            for name, graph in graphs.items()
        ),
        saved=() if split is None else saved_details(graphs["joint"], split),
        collectives=tuple(collective_details(graphs)),
        kernels=tuple(
            KernelDetails(name, kernel.name, tuple(counted(kernel.operators)), kernel.num_bytes, kernel.text)
            for name, one in emitted.items()
            if one.fusion is not None
            for kernel in one.fusion().kernels
        ),
        wrapper=artifact.source,
        facts=tuple((name, text) for name, text in named_facts(summary_of(artifact)) if name not in _SHOWN),
    )


def _inputs(compilation: Compilation) -> Iterator[TensorFacts]:
    facts, program = compilation.traced.facts, compilation.traced.program
    again = dict(_given_again(compilation.captured.program.ins, compilation.deduped))
    for idx, slot in program.ins.enumerate():
        said = list(words.of_input(facts, idx)) or ["only read"]
        if compilation.bases.is_new(idx):
            said.append("memory that several inputs lie in, one of which is written")
        if str(slot) in again:
            said.append(f"the same tensor as {again[str(slot)]}")
        yield TensorFacts(str(slot), _recipe_text(facts.recipes[idx]), tuple(said))


def _given_again(ins: Row[ArgIdx, Slot], plan: DedupePlan) -> Iterator[tuple[str, str]]:
    """The names of inputs that are given more than once, and the other names that they have."""
    names: dict[DistinctIdx, list[str]] = {}
    for arg, distinct in plan.source.enumerate():
        names.setdefault(distinct, []).append(str(ins[arg]))
    yield from ((name, ", ".join(f"`{other}`" for other in more)) for name, *more in names.values() if more)


def _outputs(compilation: Compilation) -> Iterator[TensorFacts]:
    facts, ins = compilation.traced.facts, compilation.traced.program.ins
    names = words.output_names(Returned.of(facts), len(facts.outputs))

    def name_of(out: OutIdx) -> str:
        return names[out]

    for idx, fact in facts.outputs.enumerate():
        if isinstance(fact, NotATensor) and isinstance(fact.value, Returned):
            continue  # how the results are put together, which the program says in an output of its own
        made = facts.node_outs[fact.value] if isinstance(fact, Fresh) else None
        differentiable = made is not None and made.differentiable
        said = words.of_output(fact, ins, name_of, differentiable=differentiable)
        yield TensorFacts(names[idx], _output_type(fact, compilation), tuple(said))


def _output_type(fact: OutputFact, compilation: Compilation) -> str:
    return (
        _recipe_text(compilation.traced.facts.node_outs[fact.value].recipe) if isinstance(fact, Fresh) else ""
    )


def _recipe_text(recipe: Recipe) -> str:
    """A plain tensor, or a wrapper around some: `DTensor[3, 4] around f32[2, 4]`."""
    inside = ", ".join(tensor_text(plain.dtype, plain.size) for _, plain in leaves(recipe))
    return (
        f"{recipe.cls.__name__}{list(recipe.size)} around {inside}" if isinstance(recipe, Wrapper) else inside
    )
