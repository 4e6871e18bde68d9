"""The backward of the autograd node: chooses the backward graph for the gradients that arrive, and runs it.

The printed node runs the backward of all results itself, and leaves every other request to `Backward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch

from aotdist.aliasing.overwrite import bump
from aotdist.capture.effects import NOTHING, EffectLog
from aotdist.capture.in_backward import InBackward
from aotdist.convention.mutation import write_plain
from aotdist.errors import UnsupportedProgram
from aotdist.origins import short_tracebacks
from aotdist.partition.gates import Gate
from aotdist.runtime.backwards import Arrived, CompiledBackward, Training
from aotdist.runtime.derive import BackwardRequest
from aotdist.runtime.double_backward import failing_later, laid_out_with_history
from aotdist.runtime.held import keep_for_others, let_go, saved_for
from aotdist.runtime.hooks import is_watched
from aotdist.runtime.plan import Grads, NodePlan
from aotdist.runtime.tangent import is_laid_out_as
from aotdist.sizes import concrete
from aotdist.subclasses.protocol import (
    Constant,
    Plain,
    Recipe,
    Wrapper,
    is_wrapper,
    leaves,
    plain_tensors,
    rebuild,
    recipe_of,
)
from aotdist.torch_seam.modes import class_functions_off


class GradRebuilder:
    """Rebuilds the gradients of one backward from plain tensors, without a history.

    Gradients that are one tensor in eager are one tensor here, tangents that are passed on included: autograd
    keeps a gradient that nobody else holds as `.grad`, and accumulates the next one into it in place. The
    strides of a wrapper follow from those of the tensors inside it: the trace recorded the strides for the
    tangents that it assumed.

    Args:
        arrived: the tangents.
    """

    def __init__(self, arrived: Iterable[torch.Tensor] = ()) -> None:
        wrappers = [(tensor, plain_tensors(tensor)) for tensor in arrived if is_wrapper(tensor)]
        self._wrappers = {_key(plains): (tensor, plains) for tensor, plains in wrappers}

    def __call__(self, recipe: Recipe, plains: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The tensor of `recipe` made of `plains`; None if one of them is missing."""
        there = [plain for plain in plains if plain is not None]
        if len(there) < len(plains):
            return None
        if not isinstance(recipe, Wrapper):
            return there[0]
        wrapper = self._wrappers.get(_key(there))
        if wrapper is None or not is_laid_out_as(recipe_of(wrapper[0]), recipe):
            made = rebuild(_with_strides_of(iter(there), recipe), there)
            wrapper = self._wrappers[_key(there)] = made, there  # keeps `there` alive, and its ids unique
        return wrapper[0]

    def in_order(
        self, recipes: Iterable[Recipe | None], plains: Iterator[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The tensor of each recipe, made of the next `plains`; None for no recipe."""
        return [
            None if recipe is None else self(recipe, [next(plains) for _ in leaves(recipe)])
            for recipe in recipes
        ]


def _key(plains: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(map(id, plains))


def _with_strides_of(plains: Iterator[torch.Tensor], recipe: Recipe) -> Recipe:
    """`recipe` with the strides of `plains`, and wrappers around them laid out in the same order."""
    match recipe:
        case Plain():
            return replace(recipe, stride=next(plains).stride())
        case Constant():
            return recipe
        case Wrapper():
            attributes = tuple((name, _with_strides_of(plains, part)) for name, part in recipe.attributes)
            before = [part.stride for _, part in recipe.attributes if not isinstance(part, Constant)]
            after = [part.stride for _, part in attributes if not isinstance(part, Constant)]
            changed = [new for old, new in zip(before, after, strict=True) if old != new]
            stride = recipe.stride
            if changed and len(changed[0]) == len(recipe.size):
                stride = _dense_strides(changed[0], recipe.size)
            return replace(recipe, attributes=attributes, stride=stride)


def _dense_strides(stride: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """Dense strides for `size`, with dimensions in the order of `stride`, and expanded where that is 0."""
    found, step = [0] * len(size), 1
    for dim in sorted(range(len(size)), key=lambda dim: (stride[dim], -dim)):
        if stride[dim] or size[dim] == 1:
            found[dim] = step
            step *= max(size[dim], 1)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of a node, for every request.

    Args:
        program: compiles a backward graph for each request.
        after: called once the gradients are computed, if given.
        in_python: what backwards change in Python.
    """

    program: Training
    after: Callable[[], None] | None = None
    in_python: InBackward | None = None

    @property
    def plan(self) -> NodePlan:
        """How tensors pass through the node."""
        return self.program.node

    @short_tracebacks
    def __call__(self, ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        """The gradients of all inputs, given a tangent or None for each differentiable output.

        They have a history if grad mode is on (`create_graph=True`).

        Raises:
            UnsupportedProgram: there is no backward for such gradients, or none that can be differentiated.
        """
        pairs = zip(self.plan.differentiable(), tangents, strict=True)
        arrived = {idx: tangent for idx, tangent in pairs if tangent is not None}
        self._refuse_other_writes(arrived)
        changes = self._changes(arrived)
        grads: Sequence[torch.Tensor | None] = ()
        kept: Sequence[torch.Tensor | None] = ()
        if arrived:
            plainly = functools.partial(self._without_history, ctx, changes, arrived)
            has_history = torch.is_grad_enabled()
            grads, kept = self._with_history(ctx, arrived, None, plainly) if has_history else plainly()
        changes.replay(list(kept), getattr(ctx, "symbols", {}))
        # Where the backward is a program itself, saved values are its last inputs, and get no gradient.
        return (*grads, *[None] * (len(self.plan.backward.grads) - len(grads)))

    def _refuse_other_writes(self, arrived: Arrived) -> None:
        """Refuse a backward of some results that does not write all that the backward of all writes."""
        writers = self.plan.backward.writers
        if len(arrived) < len(self.plan.tangents) and any(map(arrived.keys().isdisjoint, writers)):
            raise UnsupportedProgram(
                "the backward (a hook, an autograd function, a checkpoint) writes tensors, and others where "
                f"only {len(arrived)} of the {len(self.plan.tangents)} results get a gradient",
                stage="runtime",
                fix="let all results take part in one backward; or return only those that are differentiated",
            )

    def _changes(self, arrived: Arrived) -> EffectLog:
        """What this backward changes in Python.

        Raises:
            UnsupportedProgram: user code keeps tensors of it, and the trace did not show which for these
                results.
        """
        changes = NOTHING if self.in_python is None or not arrived else self.in_python.changes(arrived.keys())
        choices = [choice.outs for choice in self.plan.backward.choices]
        if changes.kept and len(arrived) < len(self.plan.tangents) and tuple(arrived) not in choices:
            raise UnsupportedProgram(
                "the backward (a hook, an autograd function) keeps tensors that it computes, and of the "
                f"{len(self.plan.tangents)} results only some get a gradient",
                stage="runtime",
                fix="let all results take part in one backward; or keep gradients by hooks of results or "
                "arguments, outside of the compiled function",
            )
        return changes

    def _without_history(self, ctx: Any, changes: EffectLog, arrived: Arrived) -> Gradients:
        """The gradients without a history, and what user code keeps."""
        plan = specialize_sizes(ctx, self.plan)
        request = self._request(ctx, plan, arrived)
        compiled, args, rebuilder = self._prepared(ctx, plan, request, arrived)
        if plan.saved.frees:
            let_go(ctx)
        with class_functions_off():  # wrappers may come for plain tensors
            results = iter(compiled.call(args))
        grads = rebuilder.in_order(specialize_sizes(ctx, compiled.derived.returned), results)
        self._write(ctx, results)
        if self.after is not None:
            self.after()
        kept = changes.kept if compiled.derived.kept is None else compiled.derived.kept
        return tuple(grads), rebuilder.in_order(specialize_sizes(ctx, kept), results)

    def _request(self, ctx: Any, plan: NodePlan, arrived: Arrived) -> BackwardRequest:
        """The backward that these tangents need."""
        results, is_part = tuple(arrived), len(arrived) < len(plan.tangents)
        if is_watched(ctx):
            return BackwardRequest(results, watched=True)
        if plan.other_kinds and (not plan.takes(arrived) or (is_part and plan.backward.adds_layouts)):
            return BackwardRequest(results, kinds=tuple(map(recipe_of, arrived.values())))
        return BackwardRequest(results)

    def _prepared(
        self, ctx: Any, plan: NodePlan, request: BackwardRequest, arrived: Arrived
    ) -> tuple[CompiledBackward, list[Any], GradRebuilder]:
        """The backward for a request, its arguments, and what rebuilds its gradients.

        Raises:
            UnsupportedProgram: there is no backward for such tangents.
        """
        if request.watched and not plan.converts(arrived):
            kinds = ", ".join(type(grad).__name__ for grad in arrived.values())
            raise UnsupportedProgram(
                f"gradients of other kinds than the results arrive ({kinds}), and hooks, `retain_grad` or "
                "`torch.autograd.grad` look at what passes between them",
                stage="runtime",
                fix="convert them before calling `backward`",
            )
        compiled = self.program.of(request, arrived)
        tangents = specialize_sizes(ctx, compiled.tangents)
        converted = {idx: tangent.converted(arrived[idx]) for idx, tangent in tangents.items()}
        given = [plain for idx, tangent in tangents.items() for plain in tangent.laid_out(converted[idx])]
        ordinary = not (request.watched or request.kinds)
        saved = self._saved(ctx, arrived, compiled if ordinary else None)
        return compiled, compiled.arguments.read(ctx, plan, saved, given), GradRebuilder(converted.values())

    def _saved(self, ctx: Any, arrived: Grads, compiled: CompiledBackward | None) -> Sequence[torch.Tensor]:
        """The saved values; an ordinary backward, `compiled`, keeps those that other results need later."""
        if not self.plan.saved.frees:
            return ()
        if compiled is None or len(arrived) == len(self.plan.tangents) or self.plan.backward_writes.plains:
            ctx.rest = None
            return list(ctx.saved_tensors)
        saved = saved_for(ctx, self.plan, arrived, compiled.reads)
        keep_for_others(ctx, self.plan, arrived, saved)
        return saved

    def _write(self, ctx: Any, results: Iterator[torch.Tensor | None]) -> None:
        """Copy the new values of inputs that the backward writes: the graph's next `results`."""
        writes = self.plan.backward_writes
        values = [next(results) for _ in writes.plains]
        for position, (value, bumps) in enumerate(zip(values, writes.bumps, strict=True)):
            if value is not None:
                write_plain(ctx.written[position], value, bumps)
        if any(value is not None for value in values):
            for position, (_, count) in enumerate(writes.wrappers):
                bump(ctx.bumped[position], count)

    def pieces(self, ctx: Any, gate: Gate, arrived: Grads) -> list[torch.Tensor | None]:
        """The pieces of a gate, given the node's context and the gradients that have arrived so far."""
        tangents = {idx: grad for idx in sorted(arrived) if (grad := arrived[idx]) is not None}
        if not tangents:
            return [None] * len(gate.pieces)
        plainly = functools.partial(self._pieces, ctx, gate, tangents)
        return list(
            self._with_history(ctx, tangents, gate, plainly)[0] if torch.is_grad_enabled() else plainly()[0]
        )

    def _pieces(self, ctx: Any, gate: Gate, arrived: Arrived) -> Gradients:
        request = BackwardRequest(tuple(arrived), watched=True, gate=gate)
        compiled, args, rebuilder = self._prepared(ctx, specialize_sizes(ctx, self.plan), request, arrived)
        with class_functions_off():
            results = iter(compiled.call(args))
        return rebuilder.in_order(specialize_sizes(ctx, compiled.derived.returned), results), []

    def _with_history(
        self, ctx: Any, arrived: Arrived, gate: Gate | None, plainly: Callable[[], Gradients]
    ) -> Gradients:
        """The gradients, or the pieces of a gate, with a history, and what user code keeps.

        Args:
            ctx: the context of the node.
            arrived: the gradients that arrived.
            gate: the gate whose pieces to compute; None for the gradients of inputs.
            plainly: computes the same without a history.
        """
        request = BackwardRequest(
            tuple(arrived),
            kinds=tuple(map(recipe_of, arrived.values())),
            create_graph=True,
            recorded=tuple(idx for idx, grad in arrived.items() if grad.requires_grad),
            watched=gate is not None or is_watched(ctx),
            gate=gate,
        )
        double = self.program.double(request, arrived)
        if double.node is None:
            with torch.no_grad():
                grads, kept = plainly()
                return [failing_later(grad, double.failure) for grad in grads], kept
        tangents = specialize_sizes(ctx, double.tangents)
        given = [laid_out_with_history(tangent, arrived[idx]) for idx, tangent in tangents.items()]
        return double.run(ctx, self.plan, ctx.saved_tensors if self.plan.saved.frees else (), given)


Gradients: TypeAlias = "tuple[Sequence[torch.Tensor | None], list[torch.Tensor | None]]"
"""The gradients of the inputs, or the pieces of a gate, and what user code in the backward keeps."""

T = TypeVar("T")


def specialize_sizes(ctx: Any, value: T) -> T:
    """`value` with the numbers of the forward call in place of symbols."""
    symbols = getattr(ctx, "symbols", None)  # missing where the graphs take no symbols
    return concrete(value, symbols) if symbols else value
