"""Builds the forward and the backward graph once it is decided which values are saved.

The backward starts from the saved values and the tangents. Forward nodes that it still needs are
made again, each right before its first use, so that what it holds at a time stays small.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

import torch
from torch.fx import Node

from aotdist.errors import InternalError
from aotdist.partition.builder import GraphBuilder
from aotdist.partition.halves import Halves, results_of
from aotdist.partition.traits import is_effectful, is_size, storage_bytes
from aotdist.program import FORWARD_ROLES, LATE_ROLES, Graph, Slot, Split
from aotdist.torch_seam.nodes import inputs_of

_Saved: TypeAlias = tuple[tuple[Node, ...], tuple[Node, ...], tuple[Node, ...]]
"""The saved values in the order of the backward's arguments: primals that it takes as they are, primals that
are overwritten after the forward, of which that returns a copy, and values that the forward computes."""


def split(halves: Halves, saved: Collection[Node]) -> Split:
    """The joint graph cut at `saved`; forward nodes behind it that the backward needs run twice.

    Args:
        saved: forward nodes and primals that the backward starts from.

    Raises:
        InternalError: the backward would need a primal that is not saved, or draw a random value again.
    """
    kept, recomputed = _kept(halves, saved)
    slots, (primals, copied, computed) = _saved_slots(halves, kept), kept
    return Split(
        forward=_build_forward(halves, kept, slots),
        backward=_build_backward(halves, kept, recomputed, slots),
        saved=slots,
        saved_primals=dict(zip(slots, _primal_slots(halves, primals), strict=False)),
        saved_bytes=saved_bytes(halves, [*primals, *copied, *computed]),
    )


def backward_from(halves: Halves, saved: Collection[Node]) -> Graph:
    """The backward graph alone, for a forward that saves at least `saved`.

    Raises:
        InternalError: as `split`.
    """
    kept, recomputed = _kept(halves, saved)
    return _build_backward(halves, kept, recomputed, _saved_slots(halves, kept))


def _kept(halves: Halves, saved: Collection[Node]) -> tuple[_Saved, set[Node]]:
    """The values to hand over, of those that may be, and the forward nodes that the backward runs again."""
    saveable = set(saved) - halves.rng
    needed = halves.joint.ancestors([*halves.backward, *halves.backward_roots], stop=saveable)
    saved = [n for n in halves.order if n in needed and n in saveable]
    primals = tuple(n for n in saved if n.op == "placeholder" and n not in halves.written)
    copied = tuple(n for n in saved if n.op == "placeholder" and n in halves.written)
    computed = tuple(n for n in saved if n.op != "placeholder")
    return (primals, copied, computed), _recomputed(halves, needed, saved)


def saved_bytes(halves: Halves, saved: Collection[Node]) -> int:
    """What saving `saved` keeps alive: memory of unwritten primals and of outputs is alive anyway."""
    primals = [n for n in halves.order if n.op == "placeholder" and n not in halves.written]
    return storage_bytes(saved, free=[*results_of(halves.joint, {"output"}), *primals])


def _recomputed(halves: Halves, needed: set[Node], saved: Sequence[Node]) -> set[Node]:
    """Forward nodes that the backward runs a second time."""
    recomputed = {n for n in needed - halves.late - halves.rng - set(saved) if not is_size(n)}
    for node in recomputed:
        if node.op == "placeholder":
            raise _split_error(node, "is needed by the backward but not saved")
        if is_effectful(node):
            raise _split_error(node, "has an effect and would run in the forward and in the backward")
    return recomputed


def _split_error(node: Node, fault: str) -> InternalError:
    return InternalError(f"`{node.name}` {fault}", where=node.meta.get("source"), stage="partition")


def _saved_slots(halves: Halves, kept: _Saved) -> tuple[Slot, ...]:
    primals, copied, computed = kept
    as_they_are = [Slot("saved", s.path, s.inner) for s in _primal_slots(halves, primals)]
    # `%` begins no path of the user's, so a computed value is never taken for a primal.
    return (*as_they_are, *(Slot("saved", f"%{node.name}") for node in (*copied, *computed)))


def _primal_slots(halves: Halves, nodes: Sequence[Node]) -> list[Slot]:
    by_node = dict(zip(halves.joint.placeholders(), halves.joint.ins, strict=True))
    return [by_node[node] for node in nodes]


def _build_forward(halves: Halves, kept: _Saved, slots: Sequence[Slot]) -> Graph:
    joint, (primals, copied, computed) = halves.joint, kept
    builder = GraphBuilder(joint.gm)
    arguments = {s: n for s, n in joint.named_placeholders().items() if s.role in ("primal", "size", "rng")}
    for node in arguments.values():
        builder.placeholder(node)
    copies = [_copy_before_write(builder, node) for node in copied]
    run = joint.ancestors([*halves.forward_roots, *computed])
    builder.copy_all(n for n in halves.order if n in run and n.op != "placeholder")
    outs, results = _results(halves, builder, forward=True)
    saved = [*copies, *(builder.env[n] for n in computed)]
    return builder.finish([*results, *saved], tuple(arguments), (*outs, *slots[len(primals) :]))


def _results(halves: Halves, builder: GraphBuilder, forward: bool) -> tuple[list[Slot], list[Node | None]]:
    """The joint graph's result slots of one half, and the new nodes that stand for them."""
    joint = halves.joint
    named = [
        (slot, node)
        for slot, node in zip(joint.outs, joint.results(), strict=True)
        if (slot.role in FORWARD_ROLES) == forward
    ]
    return [slot for slot, _ in named], [None if n is None else builder.env[n] for _, n in named]


def _copy_before_write(builder: GraphBuilder, primal: Node) -> Node:
    """The primal as the forward saw it: the caller replaces its data before the backward runs."""
    name = f"{primal.name}_before_the_write"
    clone = torch.ops.aten.clone.default
    return builder.call(clone, (builder.env[primal],), like=primal, name=name, phase="forward")


def _build_backward(halves: Halves, kept: _Saved, recomputed: set[Node], slots: Sequence[Slot]) -> Graph:
    joint = halves.joint
    builder = GraphBuilder(joint.gm)
    for node in itertools.chain(*kept):
        builder.placeholder(node)
    read = {i for n in (*halves.backward, *recomputed) for i in inputs_of(n)}
    late = {*LATE_ROLES, "rng"}
    arguments = {
        s: n
        for s, n in joint.named_placeholders().items()
        if s.role in late or (s.role == "size" and (n in read or s.path.isidentifier()))
    }
    for node in arguments.values():
        builder.placeholder(node)
    for node in _on_demand(halves, recomputed):
        builder.copy(node).meta["phase"] = "backward"
    outs, results = _results(halves, builder, forward=False)
    return builder.finish(results, (*slots, *arguments), outs)


def _on_demand(halves: Halves, recomputed: set[Node]) -> Iterator[Node]:
    """The backward's nodes in order, each recomputed one right before the first that reads it."""
    done: set[Node] = set()
    extra_roots = [n for n in halves.backward_roots if n in recomputed]
    for node in (*halves.backward, *extra_roots):
        stack = [node]
        while stack:
            top = stack[-1]
            pending = [i for i in inputs_of(top) if i in recomputed and i not in done]
            if pending:
                stack.extend(reversed(pending))
                continue
            stack.pop()
            if top not in done:
                done.add(top)
                yield top
