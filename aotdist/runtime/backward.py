"""What runs in the backward of the autograd node: whole, without some tangents, in parts, or differentiably.

The printed node runs the whole itself, and leaves the rest to `Backward`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from aotdist.capture.effects import NOTHING, EffectLog
from aotdist.capture.in_backward import InBackward
from aotdist.capture.origins import short_tracebacks
from aotdist.codegen.contract import BoxedCall
from aotdist.convention.changes import resize_storage
from aotdist.convention.mutation import write_plain
from aotdist.convention.rng import SLOTS as RNG_SLOTS
from aotdist.convention.version import bump
from aotdist.errors import UnsupportedProgram
from aotdist.partition.double_backward import no_double_backward
from aotdist.partition.gates import Gate
from aotdist.program import NodeOutIdx, Slot
from aotdist.runtime.apart import apart, in_turn, together
from aotdist.runtime.double_backward import DoubleBackward
from aotdist.runtime.gate import is_watched
from aotdist.runtime.held import held_by_name, let_go, sizes_by_name
from aotdist.runtime.joining import Joining
from aotdist.runtime.other_kinds import Gradients, OtherKinds, of_this_call, refusal
from aotdist.runtime.plan import ChoicePlan, Grads, NodePlan
from aotdist.runtime.spent import Shares, keep_for_others, saved_for
from aotdist.sizes import concrete, evaluate
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.modes import class_functions_off


class Parts(Protocol):
    """Compiles what computes some results of the backward from some gradients."""

    def __call__(self, outs: tuple[Slot, ...], arrived: frozenset[Slot], *, in_parts: bool) -> Part:
        """What computes `outs` where only the gradients `arrived` are there.

        Args:
            outs: names of results.
            arrived: names of gradients.
            in_parts: whether the backward is cut at its waypoints; otherwise gradients pass through them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A backward, or a part of it.

    Args:
        call: the compiled graph.
        sources: where each argument comes from: the position of a saved value, or a gradient's name.
    """

    call: BoxedCall
    sources: tuple[int | Slot, ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of a node, step by step; the printed backward calls it where a tangent is missing.

    Args:
        plan: how tensors pass through the node.
        whole: saved values, tangents -> gradients, then backward writes.
        reduced: compiles `whole` without the tangents of some slots.
        parts: compiles what computes some results from some gradients, of a backward cut at its waypoints.
        differentiable_parts: as `parts`, for gradients that autograd records: in parts, or of symbolic sizes.
        after: called once the gradients are computed.
        results: the names of what `whole` returns.
        other_kinds: runs the backward for gradients of other kinds, if there can be any.
        double_backward: runs the backward as a program with a backward, for gradients that autograd records,
            except those that `differentiable_parts` is for.
        shares: which saved values the backward of each result reads.
        in_python: what backwards change in Python.
    """

    plan: NodePlan
    whole: BoxedCall
    reduced: Callable[[frozenset[Slot]], BoxedCall]
    parts: Callable[[tuple[Slot, ...], frozenset[Slot]], Part]
    differentiable_parts: Parts
    after: Callable[[], None]
    results: tuple[Slot, ...]
    other_kinds: OtherKinds | None
    double_backward: DoubleBackward | None
    shares: Callable[[], Shares]
    in_python: InBackward | None = None

    @short_tracebacks
    def __call__(self, ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        """The gradients, given a tangent, or None, for each differentiable output."""
        changes = self._changes(tangents)
        grads, kept = self._without_history(ctx, changes, *tangents)
        changes.replay(kept, getattr(ctx, "symbols", {}))
        return grads

    def _changes(self, tangents: Sequence[torch.Tensor | None]) -> EffectLog:
        """What this backward changes in Python.

        Raises:
            UnsupportedProgram: it keeps tensors, and which ones is not known for these results.
        """
        there = self._there(tangents)
        changes = NOTHING if self.in_python is None or not there else self.in_python.changes(there.keys())
        is_known = len(there) == len(self.plan.tangents) or tuple(there) in self.plan.choices
        if changes.kept and not is_known:
            raise UnsupportedProgram(
                "the backward (a hook, an autograd function) keeps tensors that it computes, and of the "
                f"{len(self.plan.tangents)} results only some get a gradient",
                stage="runtime",
                fix="let all results take part in one backward; or keep gradients by hooks of results or "
                "arguments, outside of the compiled function",
            )
        return changes

    def _without_history(self, ctx: Any, changes: EffectLog, *tangents: torch.Tensor | None) -> Gradients:
        """The gradients, computed by the graph for the tangents that arrived: whole, reduced, or in parts."""
        plan = self._plan(ctx)
        pairs = list(zip(plan.tangents, tangents, strict=True))
        there = self._there(tangents)
        if not there:
            return (None,) * len(self.plan.grads), []
        chosen, in_parts = None, is_watched(ctx)
        fits = plan.converts(there) if in_parts else plan.takes(there)
        if self.other_kinds is not None and not fits:
            return self.other_kinds(ctx, there)
        missing = frozenset(slot for tangent, arrived in pairs if arrived is None for slot in tangent.slots())
        if missing and plan.adds_layouts and self.other_kinds is not None and not in_parts:
            return self.other_kinds(ctx, there)
        put = Joining()
        if in_parts:
            call, args = self._part(ctx, self.results, there)
        else:
            chosen = plan.choices.get(tuple(there))
            call, args = self.reduced(missing) if missing else self.whole, self._saved(ctx, there)
            args += [evaluate(size, ctx.symbols) for size in plan.backward_sizes]
            given = [(tangent, tangent.converted(grad)) for tangent, grad in pairs if grad is not None]
            put = Joining(grad for _, grad in given)
            args += [plain for tangent, grad in given for plain in tangent.laid_out(grad)]
            args += [ctx.written[position] for position in plan.backward_writes.read.values()]
            args += ctx.rng if plan.rng.draw else ()
        let_go(ctx, plan)
        with class_functions_off():  # wrappers may come for plain tensors
            results = iter(call(args))
        grads = in_turn(plan.grads if chosen is None else chosen.grads, results, put)
        self._write(ctx, results, chosen)
        self.after()
        return tuple(grads), in_turn(of_this_call(ctx, changes.kept), results, put)

    def _saved(self, ctx: Any, there: Grads) -> list[torch.Tensor]:
        """The saved values; those that a later backward, of other results, needs are kept for it."""
        if not self.plan.saved.frees:
            return []
        writes = bool(self.plan.backward_writes.bumps) and tuple(there) not in self.plan.choices
        if len(there) == len(self.plan.tangents) or writes:
            return list(ctx.saved_tensors)
        shares = self.shares()
        saved = saved_for(ctx, there, shares)
        keep_for_others(ctx, there, saved, shares)
        return saved

    def _there(self, tangents: Sequence[torch.Tensor | None]) -> dict[NodeOutIdx, torch.Tensor]:
        pairs = zip(self.plan.differentiable(), tangents, strict=True)
        return {idx: arrived for idx, arrived in pairs if arrived is not None}

    def _plan(self, ctx: Any) -> NodePlan:
        """The plan, with the sizes of the call whose backward runs."""
        symbols = getattr(ctx, "symbols", None)  # the graphs may take none of them, each being some number
        return concrete(self.plan, symbols) if symbols else self.plan

    def _write(self, ctx: Any, results: Iterator[torch.Tensor | None], chosen: ChoicePlan | None) -> None:
        """Resize the storages that the backward resizes, then write what it writes.

        Args:
            ctx: the node's context.
            results: of the graph, from the first new value on.
            chosen: the plan of these results, if their backward was traced separately; otherwise it writes
                what the whole backward does.
        """
        late = self.plan.backward_writes
        for plain, (_, num_bytes) in zip(ctx.resized if late.storages else (), late.storages, strict=True):
            resize_storage(plain, num_bytes)
        if chosen is None:
            writes = tuple(enumerate(late.bumps))
            wrappers = tuple((k, n) for k, (_, n) in enumerate((*late.wrappers, *late.outs)))
        else:
            writes, wrappers = chosen.writes, chosen.wrappers
        values = list(itertools.islice(results, len(writes)))
        for (position, bumps), value in zip(writes, values, strict=True):
            if value is not None:
                write_plain(ctx.written[position], value, bumps)
        if any(value is not None for value in values):
            for position, bumps in wrappers:
                bump(ctx.bumped[position], bumps)

    def pieces(self, ctx: Any, gate: Gate, arrived: Grads) -> list[torch.Tensor | None]:
        """What a gate sends back, given the node's context and the gradients that have arrived so far."""
        if torch.is_grad_enabled():
            return self.pieces_differentiably(ctx, gate, arrived)
        call, args = self._part(ctx, self.plan.piece_slots(gate), arrived)
        with class_functions_off():
            results = iter(call(args))
        return in_turn(self._plan(ctx).pieces(gate), results, Joining())

    def _part(self, ctx: Any, outs: tuple[Slot, ...], arrived: Grads) -> tuple[BoxedCall, list[Any]]:
        """The call that computes `outs` from gradients that arrived, and its arguments."""
        plan = self._plan(ctx)
        given: dict[Slot, Any] = sizes_by_name(plan.backward_sizes, ctx)
        for expected, grad in plan.by_kind(arrived, in_parts=True):
            if not expected.takes(grad):
                raise refusal([grad])
            given.update(zip(expected.slots(), expected(grad), strict=True))
        part = self.parts(outs, frozenset(given))
        if any(isinstance(source, Slot) and source.role == "primal" for source in part.sources):
            given = held_by_name(ctx, plan, plain_tensors, part.sources) | given
        given.update((slot, ctx.written[position]) for slot, position in plan.backward_writes.read.items())
        given.update(zip(RNG_SLOTS, ctx.rng, strict=True) if plan.rng.draw else ())
        saved = ctx.saved_tensors if plan.saved.frees else ()
        return part.call, [saved[s] if isinstance(s, int) else given[s] for s in part.sources]

    @short_tracebacks
    def differentiably(self, ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        """The gradients with a history (`create_graph=True`).

        Raises:
            UnsupportedProgram: the program cannot be differentiated twice.
        """
        changes = self._changes(tangents)
        grads, kept = self._with_history(ctx, changes, *tangents)
        changes.replay(kept, getattr(ctx, "symbols", {}))
        return grads

    def _with_history(self, ctx: Any, changes: EffectLog, *tangents: torch.Tensor | None) -> Gradients:
        """The gradients with a history: by the backward as a program, or by its graph under autograd."""
        plan, arrived = self._plan(ctx), self._there(tangents)
        if not arrived:
            return (None,) * len(self.plan.grads), []
        is_needed = plan.obstacle is not None or not plan.converts(arrived)
        is_apart = is_watched(ctx) or bool(self.plan.sizes)
        has_trace = self.double_backward is not None and self.double_backward.compiler.is_there()
        if self.double_backward is not None and (is_needed or has_trace and not is_apart):
            return self.double_backward(ctx, arrived, lambda: self._without_history(ctx, changes, *tangents))
        outs = tuple(slot for slot in self.results if slot.role in ("grad", "kept"))
        found = iter(self._from_parts(ctx, outs, arrived, in_parts=is_watched(ctx)))
        grads = in_turn(plan.grads, found, together)
        return tuple(grads), in_turn(of_this_call(ctx, changes.kept), found, together)

    def pieces_differentiably(self, ctx: Any, gate: Gate, arrived: Grads) -> list[torch.Tensor | None]:
        """What a gate sends back, with a history."""
        results = self._from_parts(ctx, self.plan.piece_slots(gate), arrived, in_parts=True)
        return in_turn(self._plan(ctx).pieces(gate), iter(results), together)

    def _from_parts(
        self, ctx: Any, outs: tuple[Slot, ...], arrived: Grads, *, in_parts: bool
    ) -> Sequence[torch.Tensor | None]:
        if self.plan.obstacle is not None:
            raise no_double_backward(self.plan.obstacle)
        plan, tangents = self._plan(ctx), dict[Slot, torch.Tensor]()
        for expected, grad in plan.by_kind(arrived, in_parts=in_parts):
            tangents.update(zip(expected.slots(), expected.with_history(grad), strict=True))
        part = self.differentiable_parts(outs, frozenset(tangents), in_parts=in_parts)
        given = held_by_name(ctx, plan, apart, part.sources) | tangents
        with class_functions_off():
            return part.call([given[slot] for slot in part.sources if not isinstance(slot, int)])
