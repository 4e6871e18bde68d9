"""Gates at run time: autograd nodes behind the program's own, see `aotdist.partition.gates`.

Usually nobody watches what passes a waypoint. Then a gate passes on the gradients that arrive, and the
program's node runs its backward in one go. A gate costs a call 8 us.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from aotdist.convention.stack import Plans
from aotdist.facts import (
    BackwardFacts,
    Fresh,
    HeldPlace,
    IsInput,
    MetadataWrite,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
)
from aotdist.partition.gates import Gate
from aotdist.program import NodeOutIdx, OutIdx, PrimalIdx
from aotdist.runtime.hooks import shield
from aotdist.runtime.plan import Grads
from aotdist.torch_seam.autograd import (
    backward_task,
    chosen_in_backward,
    has_several_results,
    node_base,
    runs_in_backward,
    sequence_nr,
)
from aotdist.torch_seam.hooks import hooks_of, hooks_of_gradient

Step: TypeAlias = "tuple[PrimalIdx, NodeOutIdx, int] | Gate | OutIdx | MetadataWrite"
"""What happens outside of the node: an input is written, results pass a gate, an output is made or ended."""


def schedule(plans: Plans, gates: Sequence[Gate], backward: BackwardFacts) -> tuple[Step, ...]:
    """The steps outside of the node, in order: a gate comes after the waypoints that it sends pieces to.

    A program with gates writes no metadata, but for what is done to results at the end.
    """
    order = [idx for idx in plans.epilogue.order if isinstance(idx, int)]
    endings = [act for act in plans.epilogue.order if isinstance(act, MetadataWrite)]
    steps = list[Step]()
    for gate in gates:
        places = [backward.waypoints[position].place for position, _ in gate.pieces]
        until = max((order.index(place) + 1 for place in places if isinstance(place, int)), default=0)
        ready = [idx for idx in order[:until] if _level_of(idx, plans, backward) < gate.level]
        steps += [*(idx for idx in ready if idx not in steps), gate]
    return (*steps, *plans.writes.writes, *(idx for idx in order if idx not in steps), *endings)


def _level_of(idx: OutIdx, plans: Plans, backward: BackwardFacts) -> float:
    """The level of what an output is made of; of inputs that are written, none, as they are written last."""
    match plans.epilogue.outputs[idx]:
        case Fresh(value=value) | ViewOfIntermediate(base=value):
            return backward.levels[value]
        case ViewOfOutput(base=base):
            return _level_of(base, plans, backward)
        case IsInput(input=source) | ViewOfInput(base=source):
            return math.inf if any(source == written for written, _, _ in plans.writes.writes) else 0
        case _:
            return 0


Passing: TypeAlias = "tuple[int, bool, dict[NodeOutIdx, torch.Tensor | None]]"
"""One backward on its way through the gates to the program's node: autograd's number of it, whether it runs
part by part, and the gradients of results that have arrived so far."""


def is_watched(node: Any) -> bool:
    """Whether the running backward reaches `node` part by part."""
    passing = passing_of(node)
    return passing is not None and passing[1]


def passing_of(node: Any) -> Passing | None:
    """The running backward on its way to `node`, if it came through a gate."""
    passing: Passing | None = getattr(node, "passing", None)
    return passing if passing is not None and passing[0] == backward_task() else None


Watch: TypeAlias = Callable[[], bool]
"""Whether the caller watches waypoints; it does not keep them alive."""


def _watching(points: Sequence[torch.Tensor], earlier: Watch | None) -> Watch:
    distinct = {id(point): point for point in points}.values()
    hooks, held = [hooks_of(point) for point in distinct], [weakref.ref(point) for point in distinct]

    def sees() -> bool:
        if any(hooks) or (earlier is not None and earlier()):
            return True
        return any(point.retains_grad for ref in held if (point := ref()) is not None)

    return sees


Pieces: TypeAlias = Callable[[Any, Gate, Grads], Sequence[Any]]
"""Computes the pieces that a gate sends, from the node's context and the gradients that have arrived."""


def _is_asked_for_waypoints(node: Any) -> bool:
    """Whether the running backward computes gradients of chosen tensors, of which some may be waypoints.

    These are results of the program's node, or of nodes that the call made after it. Or they are inputs that
    are no leaves: where gradients of views pass, these are further ways to them.
    """
    if runs_in_backward(_ANCHOR):
        return False
    chosen, first = chosen_in_backward(), sequence_nr(node)
    inputs = {source for source, _ in node.next_functions}
    return chosen is None or any(sequence_nr(one) >= first or one in inputs for one in chosen)


_ANCHOR = torch.zeros((), requires_grad=True)
"""A leaf behind every gate. A backward that accumulates reaches it; one for chosen tensors does not."""


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates of one artifact.

    Args:
        steps: what happens outside of the node, in order.
        backward: tells which gradients pass which waypoints.
        pieces: computes what a gate sends back.
        shielded: results that have hooks of their own.
    """

    steps: tuple[Step, ...]
    backward: BackwardFacts
    pieces: Pieces
    shielded: tuple[NodeOutIdx, ...]

    def place(self, position: int) -> HeldPlace:
        """Where the caller has a waypoint."""
        return self.backward.waypoints[position].place

    def at_once(self) -> list[NodeOutIdx]:
        """Shielded results that pass no gate."""
        return [idx for idx in self.shielded if not self.backward.levels[idx]]

    def in_order(self) -> list[Gate]:
        """The gates, from the lowest level up."""
        return [step for step in self.steps if isinstance(step, Gate)]


def _has_no_hooks(point: torch.Tensor) -> bool:
    """Whether nobody's hooks are lost if a waypoint gets others, and eager would not call them with None."""
    return hooks_of_gradient(point) is None and not has_several_results(point)


def make_gate(gates: Gates, gate: Gate) -> Callable[..., Any]:
    """A function that leads results through a gate.

    It takes the node's values, which it replaces, the waypoint of each piece, and what the gate before
    returned, or None; it returns what the next one is to be given.
    """
    num_outs, order = len(gate.outs), gates.in_order()
    is_last = gate == order[-1]
    shielded = [idx for idx in gates.shielded if idx in gate.outs]
    below = {position for other in order[: order.index(gate)] for position, _ in other.pieces}
    first = {position: k for k, (position, _) in enumerate(gate.pieces) if position not in below}
    # A gate that has nothing for one of its waypoints still leads to it.
    to_shield = [k for position, k in first.items() if not isinstance(gates.place(position), Fresh)]

    class Passed(node_base()):
        @staticmethod
        def forward(ctx: Any, node: Any, watch: Watch, anchor: Any, before: Any, *tensors: Any) -> Any:
            ctx.node, ctx.watch = node, watch
            ctx.set_materialize_grads(False)
            outs = [tensor.detach() for tensor in tensors[:num_outs]]
            return tuple(outs) if is_last else (*outs, torch.empty(0))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            arrived = dict(zip(gate.outs, grads, strict=False))
            passing = passing_of(ctx.node)
            if passing is None:
                is_watched = ctx.watch() or _is_asked_for_waypoints(ctx.node)
                passing = ctx.node.passing = backward_task(), is_watched, {}
            _, is_watched, so_far = passing
            so_far.update(arrived)
            sent = gates.pieces(ctx.node, gate, so_far) if is_watched else [None] * len(gate.pieces)
            return (None, None, None, None, *arrived.values(), *sent)

    def lead(values: list[Any], points: Sequence[torch.Tensor], before: Any) -> Any:
        token, earlier = (None, None) if before is None else before
        shield(*filter(_has_no_hooks, (points[k] for k in to_shield)))
        watch = _watching(points, earlier)
        node = values[gate.outs[0]].grad_fn
        passed = Passed.apply(node, watch, _ANCHOR, token, *(values[idx] for idx in gate.outs), *points)
        for idx, value in zip(gate.outs, passed, strict=False):
            values[idx] = value
        shield(*(values[idx] for idx in shielded))
        return None if is_last else (passed[num_outs], watch)

    return lead
