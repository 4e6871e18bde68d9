"""Observed gradients: gradients of some results that pass through other results, which the caller may hook.

In eager each such tensor has its place in autograd's graph. Here the program is one node, so the trace notes
where gradients pass: for each waypoint, the summands of its gradient and their sum. Behind it, the sum is a
new argument of the graph, so the recorded graph is cut at every waypoint; `aotdist.partition.gates.linked`
closes the cuts again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from aotdist.facts import HeldPlace, ObservedGrad
from aotdist.program import NodeOutIdx, PrimalIdx, Row, Slot
from aotdist.subclasses.protocol import leaves, plain_tensors, rebuild, recipe_of
from aotdist.torch_seam.autograd import sequence_nr
from aotdist.trace.recorder import Recorder

Node: TypeAlias = Any
"""A node of autograd's graph."""
Edge: TypeAlias = tuple[Node, int]
"""One of the results of such a node."""


@dataclass
class HeldTensor:
    """A differentiable tensor that the caller will hold, and the gradients that passed it in the trace.

    Args:
        path: its name.
        place: where the caller holds it.
        value: the node output that it is, if it is one.
        tensor: the traced tensor.
    """

    path: str
    place: HeldPlace
    value: NodeOutIdx | None
    tensor: torch.Tensor
    pieces: list[torch.Tensor] = field(default_factory=list)
    senders: list[Edge] = field(default_factory=list)
    """For each piece the node that sent it, and its position among the gradients that the node sends."""
    total: torch.Tensor | None = None

    def edge(self) -> Edge:
        """The edge at which its gradients arrive."""
        return self.tensor.grad_fn, self.tensor.output_nr


class ObservedGrads:
    """Finds the waypoints of a program before its backward is traced, and watches them while it is.

    Args:
        held: the tensors that the caller will hold.
        ends: the differentiable node outputs, at which the backward starts.
    """

    def __init__(self, held: Sequence[HeldTensor], ends: Sequence[tuple[NodeOutIdx, torch.Tensor]]) -> None:
        watched = [one for one in held if not one.tensor._backward_hooks]
        by_edge = {one.edge(): one for one in reversed(watched)} if len(held) > 1 else {}
        bits = {edge: 1 << position for position, edge in enumerate(by_edge)}
        self._nodes, reached = _walk([tensor.grad_fn for _, tensor in ends] if by_edge else [], bits)
        passed = 0
        for _, tensor in ends:
            passed |= reached.get(tensor.grad_fn, 0)
        edges = [edge for edge, bit in bits.items() if passed & bit]
        edges.sort(key=lambda edge: sequence_nr(edge[0]))
        self._waypoints = {edge: by_edge[edge] for edge in edges}
        self._levels = {
            idx: max(
                (k + 1 for k, edge in enumerate(edges) if reached[tensor.grad_fn] & bits[edge]), default=0
            )
            for idx, tensor in ends
            if edges
        }

    @contextmanager
    def watched(self, recorder: Recorder) -> Generator[None]:
        """While autograd runs, note what passes each waypoint, and cut the graph there."""
        with ExitStack() as hooks:
            for node, hook in self._piece_hooks(recorder):
                hooks.enter_context(node.register_hook(hook))
            for waypoint in self._waypoints.values():
                hooks.enter_context(waypoint.tensor.register_hook(_cutting(waypoint, recorder)))
            yield

    def _piece_hooks(self, recorder: Recorder) -> Iterator[tuple[Node, Any]]:
        if not self._waypoints:
            return
        for node in self._nodes:
            sources = [self._waypoints.get((source, nr)) for source, nr in node.next_functions]
            if any(source is not None for source in sources):
                yield node, _noting(node, sources, recorder)

    @contextmanager
    def cut_for(self, given: Mapping[NodeOutIdx, torch.Tensor]) -> Generator[None]:
        """While autograd runs, replace what arrives at each waypoint by the `given` gradient, or by None."""

        def instead(number: int, total: torch.Tensor | None) -> Any:
            def replaced(grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
                return (*grads[:number], total, *grads[number + 1 :])

            return replaced

        with ExitStack() as hooks:
            for (node, number), waypoint in self._waypoints.items():
                total = None if waypoint.value is None else given.get(waypoint.value)
                hooks.enter_context(node.register_prehook(instead(number, total)))
            yield

    @contextmanager
    def noting(self, pieces: Sequence[tuple[int, int]]) -> Generator[dict[PrimalIdx, torch.Tensor]]:
        """A dictionary that is filled with pieces, by their number, while autograd runs."""
        waypoints, found = list(self._waypoints.values()), dict[PrimalIdx, torch.Tensor]()

        def note(at: int, number: int) -> Any:
            def noted(grad_inputs: Sequence[torch.Tensor | None], grad_outputs: Any) -> None:
                grad = grad_inputs[number]
                if grad is not None:
                    found[PrimalIdx(at)] = grad

            return noted

        senders = (waypoints[position].senders[k] for position, k in pieces)
        with ExitStack() as hooks:
            for at, (node, number) in enumerate(senders):
                hooks.enter_context(node.register_hook(note(at, number)))
            yield found

    def wanted(self, pieces: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """The waypoints that pieces are sent to."""
        waypoints = list(self._waypoints.values())
        return [waypoints[position].tensor for position in dict.fromkeys(at for at, _ in pieces)]

    def facts(self) -> tuple[ObservedGrad, ...]:
        """The facts about these waypoints."""
        return tuple(map(_fact, self._waypoints.values()))

    def levels(self, num_values: int) -> Row[NodeOutIdx, int]:
        """The levels of the facts about a backward, of a node with so many outputs."""
        if not self._waypoints:
            return Row()
        return Row(self._levels.get(NodeOutIdx(k), 0) for k in range(num_values))

    def results(self, recorder: Recorder) -> list[tuple[Slot, torch.fx.Node | None]]:
        """Results of the recorded graph: of each waypoint the sum and its summands."""
        found: list[tuple[Slot, torch.fx.Node | None]] = []
        for waypoint in self._waypoints.values():
            fact = _fact(waypoint)
            if waypoint.total is not None:
                found += zip(_total_slots(waypoint), _values(recorder, waypoint.total), strict=True)
            for position, piece in enumerate(waypoint.pieces):
                found += zip(fact.piece_slots(position), _values(recorder, piece), strict=True)
        return found


def _fact(held: HeldTensor) -> ObservedGrad:
    total = None if held.total is None else recipe_of(held.total)
    return ObservedGrad(held.path, held.place, held.value, total, tuple(map(recipe_of, held.pieces)))


def _total_slots(waypoint: HeldTensor) -> list[Slot]:
    return [Slot("total", waypoint.path, inner) for inner, _ in leaves(recipe_of(waypoint.total))]  # type: ignore[arg-type]


def _values(recorder: Recorder, tensor: torch.Tensor) -> list[torch.fx.Node]:
    return [recorder.value(plain) for plain in plain_tensors(tensor)]


def _walk(ends: Iterable[Node], bits: Mapping[Edge, int]) -> tuple[list[Node], dict[Node, int]]:
    """The nodes behind `ends`, in topological order, and for each the edges that it leads to.

    Args:
        ends: where to begin.
        bits: the edges, and a bit for each, so that the set to which a node leads is one number.
    """
    reached: dict[Node, int] = {}
    pending: list[tuple[Node, bool]] = [(node, False) for node in ends]
    while pending:
        node, is_over = pending.pop()
        if node in reached:
            continue
        following = [(source, nr) for source, nr in node.next_functions if source is not None]
        if is_over:
            found = 0
            for edge in following:
                found |= reached[edge[0]] | bits.get(edge, 0)
            reached[node] = found
        else:
            pending.append((node, True))
            pending += [(source, False) for source, _ in following if source not in reached]
    return list(reached), reached


def _noting(node: Node, sources: Sequence[HeldTensor | None], recorder: Recorder) -> Any:
    """A hook of a node that notes the gradients which it sends to waypoints."""

    def note(grad_inputs: Sequence[torch.Tensor | None], grad_outputs: Any) -> None:
        if recorder.is_aside:
            return
        for number, (source, grad) in enumerate(zip(sources, grad_inputs, strict=True)):
            if source is not None and grad is not None:
                source.pieces.append(grad)
                source.senders.append((node, number))

    return note


def _cutting(waypoint: HeldTensor, recorder: Recorder) -> Any:
    """A hook of a tensor that notes its gradient, and puts a new argument of the graph in its place."""

    def cut(total: torch.Tensor | None) -> torch.Tensor | None:
        # Of lists, some items' gradients may stay away (`torch._foreach_mul`).
        if total is None or recorder.is_aside:
            return None
        waypoint.total = total
        recipe = recipe_of(total)
        plains = [
            recorder.argument(slot, recorder.fake_like(leaf, plain.device))
            for slot, (_, leaf), plain in zip(
                _total_slots(waypoint), leaves(recipe), plain_tensors(total), strict=True
            )
        ]
        return rebuild(recipe, plains)

    return cut
