"""The backward of a recorded call, which is run by itself so that instances of the block can copy it."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from aotdist.subclasses.protocol import plain_tensors, rebuild, recipe_of
from aotdist.torch_seam.autograd import retains_grad
from aotdist.torch_seam.block_gradients import hooks_off, run_backward_up_to
from aotdist.torch_seam.functional import FunctionalTensor, functional_value
from aotdist.torch_seam.proxies import track
from aotdist.trace.blocks.kinds import Unfit, described_tensor, metadata_of
from aotdist.trace.blocks.recording import (
    Recorded,
    Step,
    Value,
    check_copyable,
    metadata_of_values,
    value_of,
)
from aotdist.trace.blocks.writes import check_unwritten, counts_of
from aotdist.trace.capture_mode import CaptureMode
from aotdist.trace.failures import SPENT
from aotdist.trace.recorder import Recorder
from aotdist.trace.tracer import NotInstantiable


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """The gradients that a block sends to one tensor.

    Args:
        pieces: each of them, in order; None for an edge that gets none.
        total: their sum.
        sums: the nodes that compute the sum.
    """

    pieces: tuple[Value | None, ...]
    total: Value | None
    sums: frozenset[Node]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedBackward:
    """A backward of a recorded call.

    Args:
        tangents: the placeholders for the plain tensors of the gradients of the block's results.
        steps: the nodes that were recorded.
        sent: what the block sends to each tensor that it was given.
    """

    tangents: tuple[Node, ...]
    steps: tuple[Step, ...]
    sent: tuple[Sent, ...]


class Backwards:
    """The backwards of the recorded calls of one trace.

    Args:
        recorder: records the program.
        capture_mode: the mode that the program ran in: it counts hooks of gradients, which would be called.
    """

    def __init__(self, recorder: Recorder, capture_mode: CaptureMode) -> None:
        self._recorder, self._capture_mode = recorder, capture_mode
        self._known: dict[tuple[int, Hashable], RecordedBackward] = {}
        self._running: list[Recorded] = []
        """The calls whose backwards run now, the innermost last: a block may contain others."""

    def of(
        self, model: Recorded, grads: Sequence[torch.Tensor | None], needed: tuple[bool, ...]
    ) -> RecordedBackward:
        """The backward of a recorded call for such gradients.

        Args:
            model: the call.
            grads: gradients of its results.
            needed: which of the gradients that it sends are needed.
        """
        memories: dict[int, int] = {}
        key = id(model), (tuple(None if g is None else described_tensor(g, memories) for g in grads), needed)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._run(model, grads, needed)
        return known

    def is_given_from_outside(self, tensor: torch.Tensor) -> bool:
        """Whether a block whose backward runs now was given a tensor: others may send gradients to it."""
        return any(tensor is each for model in self._running for each in model.kind.tensors)

    def _run(
        self, model: Recorded, grads: Sequence[torch.Tensor | None], needed: tuple[bool, ...]
    ) -> RecordedBackward:
        if all(grad is None for grad in grads):
            nothing = tuple(Sent((None,) * count, None, frozenset()) for count in model.edges)
            return RecordedBackward((), (), nothing)
        if any(map(retains_grad, model.tensors())):
            raise NotInstantiable("the gradient of a block's result is retained")
        if self._capture_mode.num_hooks:
            raise NotInstantiable("the program hooks gradients")
        self._running.append(model)
        try:
            with (
                hooks_off([*model.tensors(), *model.kind.tensors]),
                model.having_its_parameters(),
                self._recorder.aside() as aside,
            ):
                return self._run_aside(model, grads, needed, aside)
        except Unfit as unfit:
            raise NotInstantiable(str(unfit)) from None
        except RuntimeError as error:  # a step with several backwards frees what it recorded first
            if SPENT not in str(error):
                raise
            raise NotInstantiable("the program has run the backward of the recorded call") from error
        finally:
            self._running.pop()

    def _run_aside(
        self,
        model: Recorded,
        grads: Sequence[torch.Tensor | None],
        needed: tuple[bool, ...],
        aside: Graph,
    ) -> RecordedBackward:
        """Run the backward of a call, and read off what it recorded into the graph `aside`."""
        recorder, tangents = self._recorder, list[Node]()
        plains = model.kind.plains()
        check_unwritten([(plains[write.position], write.node) for write in model.writes], recorder)
        counts = counts_of(plains)
        firsts = [None if grad is None else _stand_in_for(grad, recorder, tangents) for grad in grads]
        ends = [pair for pair in zip(model.tensors(), firsts, strict=True) if pair[1] is not None]
        tensors, is_wanted = model.kind.tensors, _first_of_each(model.edges, needed)
        wanted = [position for position, is_one in enumerate(is_wanted) if is_one]
        with self._noting_pieces(model) as pieces:
            outs, first = zip(*ends, strict=True)
            totals = run_backward_up_to(outs, [tensors[position] for position in wanted], first)
        if counts_of(plains) != counts:
            raise NotInstantiable("the backward of a block writes to what the block is given")
        total_of = dict(zip(wanted, totals, strict=True))
        sent = tuple(
            _sent(some, model.edges[position], total_of.get(position), recorder)
            for position, some in enumerate(pieces)
        )
        steps = tuple(Step.of(node) for node in aside.nodes if model.made(node))
        check_copyable([step.node for step in steps], recorder)
        model.metadata.update(metadata_of_values(steps))
        return RecordedBackward(tuple(tangents), steps, sent)

    @contextmanager
    def _noting_pieces(self, model: Recorded) -> Generator[list[list[torch.Tensor]]]:
        """For each tensor that a call was given, the gradients that the block sends to it inside."""
        pieces: list[list[torch.Tensor]] = [[] for _ in model.edges]
        nodes = dict.fromkeys(node for node, _, _ in model.consumers)
        with ExitStack() as hooks:
            for node in nodes:
                hooks.enter_context(node.register_hook(_noting(pieces, self._running, model, node)))
            yield pieces


def _stand_in_for(grad: torch.Tensor, recorder: Recorder, nodes: list[Node]) -> torch.Tensor:
    """A new tensor with the metadata of a gradient; the placeholders of its plain tensors go to `nodes`."""
    plains: list[FunctionalTensor] = []
    for plain in plain_tensors(grad):
        metadata = metadata_of(functional_value(plain))  # type: ignore[arg-type]
        fake = metadata.made(recorder.fake_mode, None)
        node = recorder.tracer.graph.create_node("placeholder", f"tangent_{len(nodes)}")
        node.meta["val"] = fake
        track(fake, node, recorder.tracer)
        nodes.append(node)
        plains.append(recorder.traced_value(node))
    return rebuild(recipe_of(grad), plains)


def _first_of_each(edges: Sequence[int], needed: Sequence[bool]) -> list[bool]:
    """For each tensor, whether its gradient is needed."""
    remaining = iter(needed)
    return [any([next(remaining) for _ in range(count)]) for count in edges]


def _noting(pieces: list[list[torch.Tensor]], running: list[Recorded], model: Recorded, node: Any) -> Any:
    """A hook that notes the gradients which an autograd node sends to tensors that the block was given."""
    places = [(sent, position) for each, sent, position in model.consumers if each is node]

    def note(grad_inputs: Sequence[torch.Tensor | None], grad_outputs: Any) -> None:
        if running[-1] is not model:
            return
        for sent, position in sorted(places):
            grad = grad_inputs[sent]
            if grad is not None:
                pieces[position].append(grad)

    return note


def _sent(pieces: Sequence[torch.Tensor], count: int, total: torch.Tensor | None, recorder: Recorder) -> Sent:
    """What a block sends to one tensor, over `count` edges."""
    values = [value_of(piece, recorder) for piece in pieces]
    value = None if total is None else value_of(total, recorder)
    ends = {node for nodes, _ in values for node in nodes}
    pending, sums = [] if value is None else list(value[0]), set[Node]()
    while pending:
        node = pending.pop()
        if node not in ends and node not in sums:
            sums.add(node)
            pending += node.all_input_nodes
    return Sent((*values, *[None] * (count - len(values))), value, frozenset(sums))
