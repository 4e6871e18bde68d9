"""Everything that the page shows of one artifact, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from aotdist.capture.captured import Returned
from aotdist.codegen.python_source import tensor_text
from aotdist.convention.dedupe import DedupePlan
from aotdist.facts import (
    DataWritten,
    Facts,
    Fresh,
    FunctionView,
    InputFact,
    IsInput,
    NotATensor,
    OutputFact,
    Step,
    Untouched,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
)
from aotdist.passes.run import PassRecord
from aotdist.program import ArgIdx, DistinctIdx, PrimalIdx, Row, Slot
from aotdist.report.nodes import (
    CollectiveDetails,
    GraphDetails,
    Saved,
    collective_details,
    graph_details,
    saved_details,
)
from aotdist.report.summary import counted, format_bytes, named_facts, summary_of
from aotdist.runtime.artifact import Artifact
from aotdist.runtime.backwards import Training
from aotdist.runtime.compilation import Compilation
from aotdist.runtime.ranks import board_of_this_process, poll
from aotdist.subclasses.protocol import Recipe, Wrapper, leaves

_PATIENCE_S = 5.0
"""How long rank 0 waits for the facts of the others, who call `explain` themselves."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """How an artifact differs from rank to rank.

    Args:
        others: ranks that rank 0 is compared with.
        missing: ranks that sent nothing.
        differences: facts that are not the same on all ranks, by name: the text of each rank.
    """

    others: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    differences: Mapping[str, Mapping[int, str]] = field(default_factory=dict[str, Mapping[int, str]])


_SHOWN_ELSEWHERE = ("writes", "passes")
"""Facts that have sections of their own on the page."""


def compare_ranks(by_rank: Mapping[int, Mapping[str, str] | None]) -> Ranks:
    """The differences between the `comparable_facts` of ranks; None stands for a rank that sent none."""
    known = {rank: facts for rank, facts in by_rank.items() if facts is not None}
    names = dict.fromkeys(name for facts in known.values() for name in facts)
    rows = {name: {rank: facts.get(name, "not there") for rank, facts in known.items()} for name in names}
    return Ranks(
        others=tuple(rank for rank in known if rank != 0),
        missing=tuple(rank for rank in by_rank if rank not in known),
        differences={name: row for name, row in rows.items() if len(set(row.values())) > 1},
    )


def differences_of_ranks(facts: Sequence[Mapping[str, str]]) -> tuple[Ranks, ...] | None:
    """Post the `comparable_facts` of this rank's artifacts for the others; rank 0 compares them.

    Returns:
        for each artifact how ranks differ, on rank 0; None on the others.
    """
    board = board_of_this_process()
    if board is None:
        return tuple(Ranks() for _ in facts)
    topic, ranks = f"report/{len(facts)}", range(board.num_ranks)
    board.say(topic, list(facts))
    if board.rank != 0:
        return None
    keys = [f"{topic}/{rank}" for rank in ranks]
    poll(lambda waited: board.has(keys) or waited > _PATIENCE_S or None)
    found = board.said(topic, ranks)
    return tuple(
        compare_ranks({rank: found[rank][at] if rank in found else None for rank in ranks})
        for at in range(len(facts))
    )


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """An input or an output: its name, its type (`f32[8, 16]`), and what happens to it, in words."""

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
        inputs: what the program takes; `outputs` what it returns.
        graphs: the joint graph first.
        saved: from forward to backward.
        collectives: of the graphs that run, in the order in which they start.
        kernels: of a backend that writes its own.
        wrapper: the printed call.
        facts: further facts by name: saved bytes, blocks that were traced once, memory.
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
    ranks: Ranks = Ranks()


def comparable_facts(program: Details) -> Mapping[str, str]:
    """The facts of an artifact that ranks compare, by name."""
    facts = {"backend": program.backend}
    facts |= {
        f"operations of the {graph.name} graph": f"{graph.num_operations:,}" for graph in program.graphs
    }
    facts |= {name: text for name, text in program.facts if name == "saved for backward"}
    for role, tensors in (("input", program.inputs), ("output", program.outputs)):
        facts |= {f"{role} {one.name}": f"{one.type} ({', '.join(one.facts)})" for one in tensors}
    for position, one in enumerate(program.collectives):
        text = f"{one.operator}, {format_bytes(one.bytes)}, beside {one.beside} operators"
        facts[f"collective {position} of the {one.graph} graph"] = text
    return facts | {f"seconds of {stage}": f"{seconds:.2f}" for stage, seconds in program.seconds.items()}


def details_of(artifact: Artifact) -> Details:
    """What the page shows of an artifact, without the comparison of ranks."""
    compilation = artifact.compilation
    region = compilation.region
    graphs, emitted = compilation.graphs(), compilation.emitted()
    split = region.joint.split if isinstance(region, Training) else None
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
        facts=tuple(fact for fact in named_facts(summary_of(artifact)) if fact[0] not in _SHOWN_ELSEWHERE),
    )


def _inputs(compilation: Compilation) -> Iterator[TensorFacts]:
    facts, program = compilation.traced.facts, compilation.traced.program
    duplicates = dict(_duplicate_inputs(compilation.captured.program.ins, compilation.deduped))
    for idx, slot in program.ins.enumerate():
        phrases = list(_facts_of_input(facts, idx)) or ["only read"]
        if compilation.bases.is_new(idx):
            phrases.append("memory that several inputs lie in, one of which is written")
        if str(slot) in duplicates:
            phrases.append(f"the same tensor as {duplicates[str(slot)]}")
        yield TensorFacts(str(slot), _recipe_text(facts.recipes[idx]), tuple(phrases))


def _duplicate_inputs(ins: Row[ArgIdx, Slot], plan: DedupePlan) -> Iterator[tuple[str, str]]:
    """The first name of each tensor that is several inputs, with the other names."""
    names: dict[DistinctIdx, list[str]] = {}
    for arg, distinct in plan.source.enumerate():
        names.setdefault(distinct, []).append(str(ins[arg]))
    yield from ((name, ", ".join(f"`{other}`" for other in more)) for name, *more in names.values() if more)


def _outputs(compilation: Compilation) -> Iterator[TensorFacts]:
    facts, ins = compilation.traced.facts, compilation.traced.program.ins
    names = _output_names(Returned.of(facts), len(facts.outputs))
    for idx, fact in facts.outputs.enumerate():
        if isinstance(fact, NotATensor) and isinstance(fact.value, Returned):
            continue  # the structure of the results, which is an output of its own
        made = facts.node_outs[fact.value] if isinstance(fact, Fresh) else None
        phrases = list(_facts_of_output(fact, ins, names))
        if made is not None and made.differentiable:
            phrases.append("takes a gradient")
        yield TensorFacts(names[idx], "" if made is None else _recipe_text(made.recipe), tuple(phrases))


def _recipe_text(recipe: Recipe) -> str:
    """The type of a plain tensor or of a wrapper: `DTensor[3, 4] around f32[2, 4]`."""
    inside = ", ".join(tensor_text(plain.dtype, plain.size) for _, plain in leaves(recipe))
    return (
        f"{recipe.cls.__name__}{list(recipe.size)} around {inside}" if isinstance(recipe, Wrapper) else inside
    )


def _facts_of_input(facts: Facts, idx: PrimalIdx) -> Iterator[str]:
    """What happens to an input, one phrase each; none if it is only read."""
    yield from _facts_of_writes(facts.inputs[idx])
    if idx in facts.backward.writes:
        yield "written in backward, copied back after the graph"
    repeated = [write for write in facts.metadata_writes() if write.target == IsInput(idx)]
    yield from (f"`{_operator(write.op)}` is repeated on it" for write in repeated)
    if idx in facts.switched_on:
        yield "requires grad from then on"
    if facts.backward.grads[idx] is not None:
        yield "gets a gradient"


def _facts_of_writes(fact: InputFact) -> Iterator[str]:
    match fact:
        case DataWritten(differentiable=True):
            yield "written in forward, copied back outside of the graph, where its gradient passes"
        case DataWritten(bumps=0):
            yield "written in forward, copied back after the graph, and its version counter stays"
        case DataWritten():
            yield "written in forward, copied back after the graph"
        case Untouched(bumps=0):
            pass
        case Untouched():
            yield "not written, but its version counter goes up"
        case _:
            assert_never(fact)


def _output_names(returned: Returned, count: int) -> list[str]:
    """The caller's name of each output: of what is returned, then of what is assigned."""
    names = [f"out[{position}]" for position in range(returned.spec.num_leaves)]
    for source, spec in returned.assigned():
        leaves = spec.num_leaves
        names += [source.path] if leaves == 1 else [f"{source.path}[{leaf}]" for leaf in range(leaves)]
    return [*names, *(f"out[{position}]" for position in range(len(names), count))]


_PLAIN_VALUES = (bool, int, float, str, type(None))
"""Types of values whose text is worth showing."""


def _facts_of_output(fact: OutputFact, ins: Row[PrimalIdx, Slot], outs: Sequence[str]) -> Iterator[str]:
    """What an output is, one phrase each; `ins` and `outs` are the names of inputs and outputs."""
    match fact:
        case NotATensor(value=value):
            shown = repr(value) if isinstance(value, _PLAIN_VALUES) else f"a {type(value).__name__}"
            yield f"the same at every call: {shown}"
        case Fresh():
            yield "a tensor of its own"
        case IsInput(input=idx):
            yield f"is `{ins[idx]}`, the same object"
        case ViewOfInput(base=idx, steps=steps):
            yield f"a view of `{ins[idx]}`, made again outside: {_views(steps)}"
        case ViewOfIntermediate(steps=steps):
            yield f"a view of a tensor that is not returned, made again outside: {_views(steps)}"
        case ViewOfOutput(base=out, steps=()):
            yield f"is `{outs[out]}`, the same object"
        case ViewOfOutput(base=out, steps=steps):
            yield f"a view of `{outs[out]}`, made again outside: {_views(steps)}"
        case _:
            assert_never(fact)


def _views(steps: Sequence[Step]) -> str:
    return ", ".join(map(_view, steps))


def _view(step: Step) -> str:
    if isinstance(step, FunctionView):
        return "an autograd function"
    return _operator(step.op) if step.pick is None else f"{_operator(step.op)}[{step.pick}]"


def _operator(op: Any) -> str:
    """The name of an operator or function: `t_` for `aten.t_.default`."""
    text = str(op)
    if text.startswith("aten."):
        return text.split(".")[1]
    return getattr(op, "__name__", text)
