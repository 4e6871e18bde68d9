"""Backwards of a traced program that are traced on demand, after the program was compiled.

A program is compiled for gradients of the same kind as its results: a wrapper of the same layout for a
wrapper, a plain tensor for a plain one. The caller may pass others; then the backward calls other operators,
and the inputs' gradients are of other kinds. And gradients may have to be differentiated in turn.

For these, autograd's graph of the trace, which holds no data, is kept, and backwards run through it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from aotdist.capture.source import Source
from aotdist.errors import AotdistError, InternalError, UnsupportedProgram
from aotdist.facts import BackwardFacts, Facts, Fresh, NodeOut, OutputFact, Untouched
from aotdist.program import (
    Graph,
    NodeOutIdx,
    OutIdx,
    PrimalIdx,
    Row,
    Slot,
)
from aotdist.subclasses.protocol import (
    Constant,
    Plain,
    Recipe,
    Wrapper,
    leaves,
    mixes_with_plain,
    recipe_of,
)
from aotdist.torch_seam.autograd import is_once_differentiable
from aotdist.torch_seam.modes import class_functions_off
from aotdist.trace.backward import (
    Backward,
    Computed,
    Wanted,
    grad_results,
    kept_results,
    new_tangent,
    value_results,
)
from aotdist.trace.capture_mode import ReplayMode
from aotdist.trace.failures import unsupported
from aotdist.trace.observed_grads import ObservedGrads

T = TypeVar("T")

Named = tuple[str, Recipe]
"""The name and the recipe of an argument."""

Kinds = Mapping[NodeOutIdx, Recipe]
"""The recipes of the gradients of some results."""


@dataclass(frozen=True, slots=True)
class TracedDoubleBackward:
    """The backward of a program as a program of its own, with a backward.

    Its inputs are the inputs of the program that get gradients, then the gradients that arrive. Its graph
    also takes other inputs of the program.

    Args:
        graph: the recorded graph; the gradients are its `output`s, and gradients of these its `grad`s.
        ins: names of its inputs.
        primals: the inputs of the program that are inputs of its backward.
        tangents: the gradients that arrive.
        returned: which result is the gradient of each input of the program, or each piece; None for none.
        kept: the results that user code in the backward keeps.
        has_history: whether any of them has.
        failure: why the gradients have no history although eager's have one; empty if they have.
        facts: what the trace showed.
        later: traces backwards of this backward.
    """

    graph: Graph
    ins: Row[PrimalIdx, Slot]
    primals: tuple[PrimalIdx, ...]
    tangents: Mapping[NodeOutIdx, Named]
    returned: tuple[NodeOutIdx | None, ...]
    kept: tuple[NodeOutIdx, ...]
    has_history: bool
    failure: str
    facts: Facts
    later: LaterBackwards

    def plain_ins(self) -> list[Slot]:
        """The names of the plain tensors beneath its inputs."""
        pairs = zip(self.ins, self.facts.recipes, strict=True)
        return [Slot("primal", slot.path, inner) for slot, recipe in pairs for inner, _ in leaves(recipe)]


@dataclass(frozen=True, slots=True)
class Derived:
    """The graph of a backward, and what it computes.

    Args:
        graph: takes saved values, kept inputs, sizes, gradients, what the backward writes, and the seed.
        returned: recipes of the inputs' gradients, or of the pieces of a gate; None where there is none.
        tangents: what it takes for each gradient, if other kinds were asked for.
        kept: recipes of what user code in the backward keeps, if it was traced for this request.
    """

    graph: Graph
    returned: Row[PrimalIdx, Recipe | None] | tuple[Recipe, ...]
    tangents: Mapping[NodeOutIdx, Named]
    kept: tuple[Recipe, ...] | None = None


class LaterBackwards:
    """Traces backwards of one program.

    Args:
        backward: the trace's backward, which holds no tensor of the caller's; its recorder records more.
        replay_mode: the mode that backwards run in.
        ins: names of the inputs.
        recipes: how the inputs are put together.
        grads: the inputs that get gradients.
        waypoints: where gradients of results pass others.
        serials: numbers the backwards of one recorder; shared with the backwards of a backward.
    """

    def __init__(
        self,
        backward: Backward,
        replay_mode: ReplayMode,
        ins: Row[PrimalIdx, Slot],
        recipes: Row[PrimalIdx, Recipe],
        grads: Collection[PrimalIdx],
        waypoints: ObservedGrads | None = None,
        serials: Iterator[int] | None = None,
    ) -> None:
        self._recorder, self._backward, self._node_outs = backward.recorder, backward, backward.node_outs
        self._replay_mode = backward.mode = replay_mode
        self._ins, self._recipes = ins, recipes
        self._wanted = [(idx, leaf) for idx, leaf in backward.wanted if idx in grads]
        self._waypoints = ObservedGrads((), ()) if waypoints is None else waypoints
        self._serials, self._serial = serials or itertools.count(1), 0

    def find_at(self, sources: Mapping[PrimalIdx, Source]) -> None:
        """Where inputs are read that are no arguments."""
        self._replay_mode.find_at(sources)

    def meets_other_kinds(self) -> bool:
        """Whether gradients of other kinds need another backward.

        A backward of plain tensors alone is the same for any gradients. With wrappers that no operator
        combines with plain tensors (DTensors), plain results have plain gradients.
        """
        of_outs = [out.recipe for out in self._node_outs if out.differentiable]
        return any(isinstance(recipe, Wrapper) for recipe in of_outs) or mixes_with_plain(self._recipes)

    def meets_other_layouts(self) -> bool:
        """Whether wrappers that are laid out otherwise than the results have another backward, too.

        Not with symbolic sizes: those of what lies inside are not known then.
        """
        return self.meets_other_kinds() and self._recorder.shape_env is None

    def of_kinds(self, kinds: Kinds) -> Derived:
        """The backward for gradients of these kinds; its graph takes all that the program takes.

        Args:
            kinds: of the gradients that there are.

        Raises:
            UnsupportedProgram: there is no such backward.
        """
        tangents = self._tangents(kinds)

        def run() -> Derived:
            given = {
                idx: new_tangent(self._recorder, *tangent, self._backward.end(idx))
                for idx, tangent in tangents.items()
            }
            computed = self._backward.run(list(given), given, retain_graph=True)
            results = grad_results(self._recorder, self._ins, computed.grads)
            graph = self._recorder.graph(results + kept_results(self._recorder, computed.kept))
            grads, kept = computed.recipes()
            return Derived(graph, Row(map(grads.get, self._ins.indices())), tangents, kept)

        return self._recorded(run, lambda reason: self._no_backward(kinds, reason))

    def differentiable(
        self,
        kinds: Kinds,
        recorded: Collection[NodeOutIdx],
        *,
        watched: bool = False,
        pieces: Sequence[tuple[int, int]] = (),
    ) -> TracedDoubleBackward:
        """The backward for gradients of these kinds as a program that has a backward.

        Args:
            kinds: of the gradients that there are.
            recorded: those that require grad themselves.
            watched: whether gradients stop at waypoints, and go on from the given sums.
            pieces: what to compute instead of the inputs' gradients: pairs of a waypoint and a piece of it.

        Raises:
            UnsupportedProgram: they cannot be differentiated.
        """
        tangents = self._tangents(kinds)

        def run() -> TracedDoubleBackward:
            recorder, backward = self._recorder, self._backward
            recorder.tracer.phase = "forward"
            given = {
                idx: new_tangent(recorder, *tangent, backward.end(idx), "primal").requires_grad_(
                    idx in recorded
                )
                for idx, tangent in tangents.items()
            }
            points = self._waypoints
            with points.cut_for(given) if watched else nullcontext(), points.noting(pieces) as noted:
                wanted = points.wanted(pieces) if pieces else None
                computed = backward.run(
                    list(given), given, wanted=wanted, retain_graph=True, with_history=True
                )
            computed = Computed(noted, ()) if pieces else computed
            returned = range(len(pieces)) if pieces else self._ins.indices()
            return self._double_backward(tangents, given, computed, returned)

        return self._recorded(run, _not_differentiable)

    def _double_backward(
        self,
        tangents: Mapping[NodeOutIdx, Named],
        given: Mapping[NodeOutIdx, torch.Tensor],
        computed: Computed,
        returned: Iterable[int],
    ) -> TracedDoubleBackward:
        """What was just recorded, as a program with a backward.

        Args:
            tangents: the gradients that arrive.
            given: their stand-ins.
            computed: the gradients that were computed from them, with a history.
            returned: the inputs, or the pieces, that it is asked for.
        """
        recorder, tensors = self._recorder, computed.tensors()
        primals = tuple(idx for idx, _ in self._wanted)
        of_tangents = (Slot("primal", path) for path, _ in tangents.values())
        ins = Row[PrimalIdx, Slot]([*(self._ins[idx] for idx in primals), *of_tangents])
        recipes = [*(self._recipes[idx] for idx in primals), *(recipe for _, recipe in tangents.values())]
        node_outs = self._as_outputs(tensors)
        ends = [(NodeOutIdx(k), tensor) for k, tensor in enumerate(tensors) if tensor.requires_grad]
        backward = Backward(
            recorder=recorder,
            node_outs=node_outs,
            ends=ends,
            wanted=self._wanted_of_double_backward(given),
            mode=self._replay_mode,
            in_python=self._backward.in_python.beyond(),
        )
        found, failure = _tried(backward, [tensor for _, tensor in ends])
        facts = _facts_of(Row(recipes), node_outs, found)
        position = {idx: NodeOutIdx(k) for k, idx in enumerate(computed.grads)}
        results = value_results(recorder, node_outs, tensors)
        return TracedDoubleBackward(
            graph=recorder.graph(results + grad_results(recorder, ins, found)),
            ins=ins,
            primals=primals,
            tangents=tangents,
            returned=tuple(position.get(PrimalIdx(idx)) for idx in returned),
            kept=tuple(node_outs.indices()[len(computed.grads) :]),
            has_history=bool(ends) and not failure,
            failure=failure,
            facts=facts,
            later=LaterBackwards(
                backward=backward,
                replay_mode=self._replay_mode,
                ins=ins,
                recipes=facts.recipes,
                grads=found,
                serials=self._serials,
            ),
        )

    def _as_outputs(self, tensors: Sequence[torch.Tensor]) -> Row[NodeOutIdx, NodeOut]:
        """Gradients, and what user code keeps, as what a node returns."""
        return Row(
            NodeOut(Slot("output", f"gradient {k} ({self._serial})"), recipe_of(tensor), tensor.requires_grad)
            for k, tensor in enumerate(tensors)
        )

    def _wanted_of_double_backward(self, given: Mapping[NodeOutIdx, torch.Tensor]) -> list[Wanted]:
        ends = [*(leaf for _, leaf in self._wanted), *given.values()]
        return [(PrimalIdx(k), end) for k, end in enumerate(ends) if end.requires_grad]

    def _tangents(self, kinds: Kinds) -> dict[NodeOutIdx, Named]:
        self._serial = next(self._serials)
        return {
            idx: (f"grad of {self._node_outs[idx].slot} ({self._serial})", self._kind(idx, recipe))
            for idx, recipe in kinds.items()
        }

    def _kind(self, idx: NodeOutIdx, recipe: Recipe) -> Recipe:
        of_out = self._node_outs[idx].recipe
        if self._recorder.shape_env is None:
            return _dense(recipe)
        if not isinstance(recipe, Plain) or isinstance(of_out, Constant):
            raise self._no_backward({idx: recipe}, "its sizes are not known in terms of the symbols")
        return Plain(of_out.size, of_out.stride, recipe.dtype)

    def _recorded(self, run: Callable[[], T], refusal: Callable[[str], UnsupportedProgram]) -> T:
        """What `run` records; `refusal` is the error for one of PyTorch's, or of the user's code, in it."""
        recorder = self._recorder
        recorder.go_on()
        try:
            with recorder, class_functions_off():
                return run()
        except AotdistError:
            raise
        except Exception as error:
            raise refusal(str(error)) from error
        finally:
            recorder.tracer.phase = "backward"

    def _no_backward(self, kinds: Kinds, reason: str) -> UnsupportedProgram:
        classes = {
            idx: recipe.cls.__name__ if isinstance(recipe, Wrapper) else "Tensor"
            for idx, recipe in kinds.items()
        }
        named = (f"`{self._node_outs[idx].slot}` is a {name}" for idx, name in classes.items())
        return unsupported(
            f"the gradient of {', '.join(named)}, for which the program has no backward ({reason})",
            "convert it before calling `backward`",
        )


def _not_differentiable(reason: str) -> UnsupportedProgram:
    return unsupported(
        f"gradients are to be differentiated in turn (`create_graph=True`), which fails ({reason})",
        "leave the part that is differentiated twice out of the compiled function",
    )


def _facts_of(
    recipes: Row[PrimalIdx, Recipe],
    node_outs: Row[NodeOutIdx, NodeOut],
    grads: Mapping[PrimalIdx, torch.Tensor],
) -> Facts:
    """The facts of a backward as a program: it writes nothing, and its results are fresh.

    Args:
        recipes: of its inputs.
        node_outs: what it returns.
        grads: the gradients that its inputs get.
    """
    return Facts(
        inputs=recipes.map(lambda _: Untouched()),
        outputs=Row[OutIdx, OutputFact](Fresh(idx) for idx in node_outs.indices()),
        order=tuple(OutIdx(idx) for idx in node_outs.indices()),
        node_outs=node_outs,
        recipes=recipes,
        backward=BackwardFacts(
            grads=Row(recipe_of(grads[idx]) if idx in grads else None for idx in recipes.indices()),
            freed=frozenset({frozenset(node_outs.indices())}),
        ),
    )


def _tried(backward: Backward, ends: Sequence[torch.Tensor]) -> tuple[Mapping[PrimalIdx, torch.Tensor], str]:
    """The gradients, or why there are none; as in eager, that is an error only when they are asked for."""
    if is_once_differentiable(ends):
        return {}, "it goes through a function that is `@once_differentiable`"
    try:
        return backward.run(retain_graph=True).grads, ""
    except InternalError:
        raise
    except RuntimeError as error:  # `UnsupportedProgram` is one
        return {}, str(error).partition("\n")[0]


def _dense(recipe: Recipe) -> Recipe:
    """`recipe` with contiguous strides in the place of expanded ones (0)."""
    match recipe:
        case Plain(size=size, stride=stride) if 0 in stride:
            return replace(recipe, stride=torch.empty(size, device="meta").stride())
        case Wrapper(attributes=attributes):
            return replace(recipe, attributes=tuple((name, _dense(part)) for name, part in attributes))
        case _:
            return recipe
