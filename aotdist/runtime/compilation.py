"""What compiling one call produced: data for the runtime to load, and for reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from aotdist.capture.captured import Captured
from aotdist.capture.source import Argument
from aotdist.codegen.contract import Emitted
from aotdist.convention.bases import BasePlan
from aotdist.convention.dedupe import DedupePlan
from aotdist.convention.stack import Plans
from aotdist.convention.subclass import shell_of
from aotdist.passes.collectives import Collective, collectives
from aotdist.passes.run import PassRecord
from aotdist.program import Graph, I, PrimalIdx, Program, Row, uncalled
from aotdist.runtime.backwards import Training
from aotdist.settings import Settings
from aotdist.subclasses.protocol import recipe_of
from aotdist.trace.trace import Traced


@dataclass(frozen=True, slots=True)
class Inference:
    """A compiled program without a backward."""

    graph: Graph
    emitted: Emitted


@dataclass(frozen=True, slots=True)
class Compilation:
    """Everything that compiling one call produced; the runtime turns it into an artifact.

    Args:
        captured: the call.
        deduped: which tensors of the call are the same.
        bases: which tensors of the call share memory.
        traced: program, graph and facts.
        plans: of the convention layers.
        region: the compiled graphs.
        backend: name of the backend that emitted them.
        settings: how it was compiled.
        records: what each graph pass did.
        seconds: duration of each stage.
    """

    captured: Captured
    deduped: DedupePlan
    bases: BasePlan
    traced: Traced
    plans: Plans
    region: Training | Inference
    backend: str
    settings: Settings
    records: tuple[PassRecord, ...]
    seconds: Mapping[str, float]

    def lifted_inputs(self) -> list[PrimalIdx]:
        """Closed-over tensors that became inputs during the trace, in the order in which it met them."""
        own = {id(example) for example in self.captured.program.examples}
        examples = self.traced.program.examples.enumerate()
        return [idx for idx, example in examples if id(example) not in own and not self.bases.is_new(idx)]

    def takes_no_symbols(self) -> bool:
        """Whether symbolic sizes were requested, but some operator takes none, so that sizes are numbers."""
        return bool(self.captured.dims) and self.traced.symbols.none_allowed

    def used_trace(self) -> bool:
        """Whether a backward was requested that the joint graph does not give, as with `create_graph`."""
        return isinstance(self.region, Training) and self.region.used_trace()

    def emitted(self) -> dict[str, Emitted]:
        """The emitted code, by the name of the graph."""
        match self.region:
            case Training(halves=halves):
                return {"forward": halves.forward, "backward": halves.backward}
            case Inference(emitted=emitted):
                return {"inference": emitted}

    def graphs(self) -> dict[str, Graph]:
        """The graphs by name, in the order in which they were made."""
        match self.region:
            case Training(joint=joint):
                split = joint.split
                return {"joint": joint.graph, "forward": split.forward, "backward": split.backward}
            case Inference(graph=graph):
                return {"inference": graph}

    def every_graph(self) -> Iterator[Graph]:
        """All graphs that an artifact holds, those for other backwards and for profilers included."""
        match self.region:
            case Training(joint=joint):
                yield from (joint.cut, joint.by_choice, joint.whole, *self.graphs().values())
            case Inference(graph=graph):
                yield graph
        for emitted in self.emitted().values():
            yield from emitted.graphs

    def run_graphs(self) -> dict[Literal["forward", "backward"], Graph]:
        """The graphs that run, in order; an inference graph counts as a forward."""
        match self.region:
            case Training(joint=joint):
                return {"forward": joint.split.forward, "backward": joint.split.backward}
            case Inference(graph=graph):
                return {"forward": graph}

    def state(self) -> tuple[str, ...]:
        """The paths of parameters and buffers, in the order of registration."""
        num_args = len(self.captured.arguments.tensor_paths())
        return tuple(slot.path for slot in self.captured.program.ins)[num_args:]

    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of forward and backward, in the order in which they start."""
        state = self.state()
        return tuple(
            collective for graph in self.run_graphs().values() for collective in collectives(graph, state)
        )


def without_tensors(compilation: Compilation) -> Compilation:
    """`compilation` with `shell`s for the tensors of the call, and without module state and recorded graphs.

    Otherwise the first batch, and parameters that are replaced later by a checkpoint's, would stay in memory
    for as long as the artifact does.
    """
    captured, traced = compilation.captured, compilation.traced
    environment = captured.environment
    assignable = environment.reached.assignable
    for source in (*(source for source, _ in assignable.owners), *captured.closed_over.values()):
        if isinstance(source.root, Argument):
            source.root.example = None
    reached = replace(environment.reached, tensors=[], assignable=replace(assignable, owners=[]))
    region = compilation.region
    graph = region.joint.cut if isinstance(region, Training) else region.graph
    return replace(
        compilation,
        captured=replace(
            captured,
            program=_without_tensors(captured.program),
            places=(),
            environment=replace(environment, state=(), reached=reached),
        ),
        traced=replace(
            traced, program=_without_tensors(traced.program), graph=graph, later_backwards=None, traces=None
        ),
    )


def shell(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the metadata of another, and no data."""
    made = shell_of(recipe_of(tensor))
    return made.requires_grad_(tensor.requires_grad) if tensor.requires_grad else made


def _without_tensors(program: Program[I]) -> Program[I]:
    return Program(uncalled, program.ins, Row[I, torch.Tensor](map(shell, program.examples)))
