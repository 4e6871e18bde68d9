"""Hooks are called as in eager: with a gradient, or not at all; and they see gradients between results.

When autograd runs a node, it calls the hooks of all its results, with None for results without a gradient,
and those of all its inputs. In eager most tensors have a node of their own, which does not run if there is no
gradient, so their hooks are not called.

So the hooks of each result skip None. An input with hooks gets a node in between, which disables them during
a backward that brings the input no gradient. The order in which hooks of different tensors run is autograd's.

Gates are autograd nodes between the program's node and the user's, see `aotdist.partition.gates`. Usually
nobody watches the gradients between results. Then a gate is the identity, and the program's node runs its
whole backward. If somebody does, the gates ask for the backward part by part. A gate adds 8 us to a call.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
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
from aotdist.runtime.plan import Grads
from aotdist.torch_seam.autograd import (
    backward_task,
    call_after_backward,
    chosen_in_backward,
    has_several_results,
    node_base,
    runs_in_backward,
    sequence_nr,
)
from aotdist.torch_seam.tensors import (
    gradients_heard,
    hooks_after_accumulation,
    hooks_of,
    hooks_of_gradient,
    set_hooks,
    with_hooks,
)

Hook = Callable[[Any], Any]


class _Hooks(OrderedDict[int, Hook]):
    """The dictionary of a tensor's hooks, into which `register_hook` puts them."""

    def __setitem__(self, key: int, hook: Hook) -> None:
        super().__setitem__(key, _WithGradient(hook))


@dataclass(frozen=True, slots=True)
class _WithGradient:
    """A hook that is called only with a gradient, not with None."""

    hook: Hook

    def __call__(self, grad: Any) -> Any:
        if grad is not None:
            return self.hook(grad)
        self._count_missing_gradient()
        return None

    def _count_missing_gradient(self) -> None:
        """Let a hook of `register_multi_grad_hook` go on without this gradient, if it gets any of the others.

        It waits for all tensors whose nodes will run, and the program's one node leads to all its inputs.
        """
        match gradients_heard(self.hook):
            case None:
                pass
            case 0:
                call_after_backward(lambda: self.hook(None) if gradients_heard(self.hook) else None)
            case _:
                self.hook(None)


class _IfAccumulated:
    """A hook that is called after accumulation, if a gradient was accumulated since this object was made."""

    def __init__(self, hook: Hook, leaf: torch.Tensor) -> None:
        self._hook, self._grad = hook, leaf.grad
        self._version = None if leaf.grad is None else leaf.grad._version

    def __call__(self, leaf: torch.Tensor) -> Any:
        unchanged = leaf.grad is self._grad and (self._grad is None or self._grad._version == self._version)
        return None if unchanged else self._hook(leaf)


def shield(*results: torch.Tensor) -> None:
    """Let hooks that the caller registers on `results` later skip None. 1.5 us each."""
    for result in results:
        set_hooks(result, _Hooks())


class _Silencing(node_base()):
    """The identity; where its backward gets no gradient, it disables the input's hooks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.tensor = tensor
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:
            _silence(ctx.tensor)
        return grad


def _silence(tensor: torch.Tensor) -> None:
    """Disable a tensor's hooks until the backward ends, unless a gradient comes from elsewhere."""
    _wrap(hooks_of_gradient(tensor), _WithGradient)
    _wrap(hooks_after_accumulation(tensor), lambda hook: _IfAccumulated(hook, tensor))


def _wrap(hooks: MutableMapping[int, Hook] | None, wrapped: Callable[[Hook], Hook]) -> None:
    """Replace hooks by wrapped ones until the backward ends."""
    before = {k: h for k, h in (hooks or {}).items() if not isinstance(h, (_WithGradient, _IfAccumulated))}
    if hooks is not None and before:
        hooks.update({key: wrapped(hook) for key, hook in before.items()})
        call_after_backward(lambda: hooks.update({k: hook for k, hook in before.items() if k in hooks}))


def with_silenced_hooks(positions: Sequence[int], *inputs: Any) -> Sequence[Any]:
    """`inputs`, with a node in between for those at `positions` that have hooks."""
    hooked = with_hooks(positions, inputs)
    if not hooked:
        return inputs
    return [_Silencing.apply(each) if k in hooked else each for k, each in enumerate(inputs)]


Step: TypeAlias = "tuple[PrimalIdx, NodeOutIdx, int] | Gate | OutIdx | MetadataWrite"
"""A step outside of the node: an input is written, results pass a gate, an output or its metadata is made."""


def schedule(plans: Plans, gates: Sequence[Gate], backward: BackwardFacts) -> tuple[Step, ...]:
    """The steps outside of the node, in order: a gate comes after the waypoints that it sends pieces to.

    A program with gates writes the metadata of results only, at the end.
    """
    order = [idx for idx in plans.epilogue.order if isinstance(idx, int)]
    metadata_writes = [act for act in plans.epilogue.order if isinstance(act, MetadataWrite)]
    steps = list[Step]()
    for gate in gates:
        places = [backward.waypoints[position].place for position, _ in gate.pieces]
        until = max((order.index(place) + 1 for place in places if isinstance(place, int)), default=0)
        ready = [idx for idx in order[:until] if _level_of(idx, plans, backward) < gate.level]
        steps += [*(idx for idx in ready if idx not in steps), gate]
    return (*steps, *plans.writes.writes, *(idx for idx in order if idx not in steps), *metadata_writes)


def _level_of(idx: OutIdx, plans: Plans, backward: BackwardFacts) -> float:
    """The level of the tensor that an output is made of; infinite for inputs that are written at the end."""
    match plans.epilogue.outputs[idx]:
        case Fresh(value=value) | ViewOfIntermediate(base=value):
            return backward.levels[value]
        case ViewOfOutput(base=base):
            return _level_of(base, plans, backward)
        case IsInput(input=source) | ViewOfInput(base=source):
            return math.inf if any(source == written for written, _, _ in plans.writes.writes) else 0
        case _:
            return 0


GatedBackward: TypeAlias = "tuple[int, bool, dict[NodeOutIdx, torch.Tensor | None]]"
"""A running backward that has reached a gate: its number in autograd, whether it runs part by part, and the
gradients of results that have arrived so far."""


def is_watched(node: Any) -> bool:
    """Whether the running backward passes the gates of `node` part by part."""
    backward = gated_backward(node)
    return backward is not None and backward[1]


def gated_backward(node: Any) -> GatedBackward | None:
    """The running backward, if it has passed a gate of `node`."""
    backward: GatedBackward | None = getattr(node, "gated_backward", None)
    return backward if backward is not None and backward[0] == backward_task() else None


Watch: TypeAlias = Callable[[], bool]
"""Whether the caller watches waypoints (hooks, `retain_grad`); it does not keep them alive."""


def _watch_of(points: Sequence[torch.Tensor], earlier: Watch | None) -> Watch:
    distinct = {id(point): point for point in points}.values()
    hooks, references = [hooks_of(point) for point in distinct], [weakref.ref(point) for point in distinct]

    def watches() -> bool:
        if any(hooks) or (earlier is not None and earlier()):
            return True
        return any(point.retains_grad for ref in references if (point := ref()) is not None)

    return watches


Pieces: TypeAlias = Callable[[Any, Gate, Grads], Sequence[Any]]
"""Computes the pieces that a gate sends, from the node's context and the gradients that have arrived."""


def _is_asked_for_waypoints(node: Any) -> bool:
    """Whether the running backward is an `autograd.grad` with respect to tensors that may be waypoints.

    These come from the program's node, or from later nodes of the call. Inputs that are no leaves count, too:
    gradients of views are a further way to them.
    """
    if runs_in_backward(_ANCHOR):
        return False
    chosen, first = chosen_in_backward(), sequence_nr(node)
    inputs = {source for source, _ in node.next_functions}
    return chosen is None or any(sequence_nr(one) >= first or one in inputs for one in chosen)


_ANCHOR = torch.zeros((), requires_grad=True)
"""An input of every gate, which `backward()` reaches and `autograd.grad` does not."""


@dataclass(frozen=True, slots=True)
class HookPlan:
    """What a call does so that hooks are called as in eager.

    Args:
        backward: what the trace showed of the backward.
        siblings: results of the node whose hooks must skip None.
        detached: inputs that never get a gradient, so that their hooks must not be called.
        silenced: inputs that get no gradient in some backwards; their hooks must not be called then.
        gated: what happens outside of the node, in order, if results pass gates; else empty.
        pieces: computes the pieces of a gate.
    """

    backward: BackwardFacts
    siblings: tuple[NodeOutIdx, ...] = ()
    detached: tuple[PrimalIdx, ...] = ()
    silenced: tuple[PrimalIdx, ...] = ()
    gated: tuple[Step, ...] = ()
    pieces: Pieces | None = None

    def at_once(self) -> list[NodeOutIdx]:
        """The siblings that pass no gate."""
        return [idx for idx in self.siblings if not (self.gated and self.backward.levels[idx])]

    def places(self, gate: Gate) -> list[HeldPlace]:
        """Where the caller has the waypoint of each piece of a gate."""
        return [self.backward.waypoints[position].place for position, _ in gate.pieces]


def _has_no_hooks(point: torch.Tensor) -> bool:
    """Whether a waypoint has no hooks that `shield` would drop, nor any that eager calls with None."""
    return hooks_of_gradient(point) is None and not has_several_results(point)


def make_gate(hooks: HookPlan, gate: Gate) -> Callable[..., Any]:
    """A function that leads results through a gate.

    It takes the node's values (and replaces some in the list), the waypoint of each piece, and what the
    previous gate returned, or None. It returns what the next gate takes.
    """
    num_outs, order, pieces = len(gate.outs), [s for s in hooks.gated if isinstance(s, Gate)], hooks.pieces
    assert pieces is not None, "gates send pieces"
    is_last = gate == order[-1]
    shielded = [idx for idx in hooks.siblings if idx in gate.outs]
    below = {position for other in order[: order.index(gate)] for position, _ in other.pieces}
    first = {position: k for k, (position, _) in enumerate(gate.pieces) if position not in below}
    # Autograd calls the hooks of a gate's waypoints even where it sends them nothing.
    places = hooks.places(gate)
    to_shield = [k for k in first.values() if not isinstance(places[k], Fresh)]

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
            backward = gated_backward(ctx.node)
            if backward is None:
                is_watched = ctx.watch() or _is_asked_for_waypoints(ctx.node)
                backward = ctx.node.gated_backward = backward_task(), is_watched, {}
            _, is_watched, so_far = backward
            so_far.update(arrived)
            sent = pieces(ctx.node, gate, so_far) if is_watched else [None] * len(gate.pieces)
            return (None, None, None, None, *arrived.values(), *sent)

    def lead(values: list[Any], points: Sequence[torch.Tensor], before: Any) -> Any:
        token, earlier = (None, None) if before is None else before
        shield(*filter(_has_no_hooks, (points[k] for k in to_shield)))
        watch = _watch_of(points, earlier)
        node = values[gate.outs[0]].grad_fn
        passed = Passed.apply(node, watch, _ANCHOR, token, *(values[idx] for idx in gate.outs), *points)
        for idx, value in zip(gate.outs, passed, strict=False):
            values[idx] = value
        shield(*(values[idx] for idx in shielded))
        return None if is_last else (passed[num_outs], watch)

    return lead
