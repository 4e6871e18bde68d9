"""The backward of a traced program: autograd runs from its results, of all of them or of some.

A backward is linear, so the backward of some results is a part of that of all
(`partition/other_backwards.py`). There are exceptions: a user's function with several results may treat None
and zeros differently; where wrappers are added to plain tensors, a sum is of another class than a summand;
and user code may keep tensors. With one of these, the backward is traced for every choice of results.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from aotdist.capture.in_backward import InBackward
from aotdist.errors import UnsupportedProgram
from aotdist.facts import NodeOut, kept_slots
from aotdist.program import NodeOutIdx, PrimalIdx, Role, Row, Slot
from aotdist.subclasses.protocol import (
    Recipe,
    Wrapper,
    leaves,
    mixes_with_plain,
    plain_tensors,
    rebuild,
    recipe_of,
    tangent_recipe,
)
from aotdist.torch_seam.autograd import (
    REENTRANT_CHECKPOINT,
    custom_functions,
    leaves_behind,
    mixes_gradients,
    run_backward,
)
from aotdist.torch_seam.control_flow import hands_out_more
from aotdist.torch_seam.tensors import seen_by_modes
from aotdist.trace.capture_mode import CaptureMode, ReplayMode
from aotdist.trace.classes import users_code
from aotdist.trace.failures import (
    naming_failures_of_backward,
    unsupported,
)
from aotdist.trace.recorder import Recorder

End = tuple[NodeOutIdx, torch.Tensor]
"""A differentiable result of the program."""

Chosen = tuple[NodeOutIdx, ...]
"""Some of the differentiable results, whose backward is traced separately."""

Wanted = tuple[PrimalIdx, torch.Tensor]
"""An input, and the leaf at which its gradients arrive."""

_MOST_CHOICES = 4
"""The backward is traced for choices of results only of programs with at most this many."""


def is_linear(ends: Sequence[End]) -> bool:
    """Whether no autograd function in the history treats None and zeros differently."""
    return not mixes_gradients([tensor for _, tensor in ends])


def _mixes_kinds(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether wrappers are combined with other kinds: which kind a gradient is may depend on the results."""
    recipes = [recipe_of(tensor) for tensor in tensors]
    return mixes_with_plain(recipes) and len(set(map(_kind, recipes))) > 1


def _kind(recipe: Recipe) -> Hashable:
    if isinstance(recipe, Wrapper):
        return recipe.cls, tuple(_kind(part) for _, part in recipe.attributes)
    return type(recipe)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a run of a backward has computed.

    Args:
        grads: the gradients of inputs.
        kept: tensors that user code (hooks, autograd functions) stored somewhere.
    """

    grads: Mapping[PrimalIdx, torch.Tensor]
    kept: tuple[torch.Tensor, ...]

    def recipes(self) -> tuple[dict[PrimalIdx, Recipe], tuple[Recipe, ...]]:
        """The recipes of the gradients, and of the tensors that are kept."""
        return {idx: recipe_of(grad) for idx, grad in self.grads.items()}, tuple(map(recipe_of, self.kept))

    def tensors(self) -> list[torch.Tensor]:
        """The gradients, then the tensors that are kept."""
        return [*self.grads.values(), *self.kept]


class Backward:
    """Runs autograd over a traced program; every run records what it computes.

    Args:
        recorder: records what autograd runs.
        node_outs: what the program returns.
        ends: the differentiable ones among `node_outs`, with their tensors.
        wanted: the inputs that may get gradients, each with its leaf.
        mode: the mode that the program ran in, which finds stand-ins of closed-over tensors.
        in_python: watches what each run changes in Python.
    """

    def __init__(
        self,
        recorder: Recorder,
        node_outs: Row[NodeOutIdx, NodeOut],
        ends: Sequence[End],
        wanted: Sequence[Wanted],
        mode: CaptureMode | ReplayMode,
        in_python: InBackward,
    ) -> None:
        recorder.tracer.phase = "backward"
        self.recorder, self.node_outs = recorder, node_outs
        self._ends, self.wanted = ends, wanted
        self.mode, self.in_python = mode, in_python
        self._autocast = recorder.options.backward_autocast
        if ends and not wanted:
            raise requires_grad_by_itself(node_outs[ends[0][0]].slot)
        self._tangents = {
            idx: new_tangent(
                recorder, node_outs[idx].slot.path, tangent_recipe(node_outs[idx].recipe), tensor
            )
            for idx, tensor in ends
        }
        tensors = [tensor for _, tensor in ends]
        functions = custom_functions(tensors)
        if functions and any(map(recorder.is_given, leaves_behind(tensors))):
            raise unsupported(  # from torch 2.14 on, where a bound `apply` takes tensors in C++, unheard
                f"a name bound to the `apply` of an autograd function (of {', '.join(functions)}) is called "
                "with a tensor that the program closes over, which would get no gradient",
                "call `TheFunction.apply(...)` itself, or pass the tensor to the compiled function",
            )
        if REENTRANT_CHECKPOINT in functions or hands_out_more(tensors):
            raise unsupported(
                "a result follows from more than the tensors that a reentrant checkpoint returns (from a "
                "loss in a list), of which eager has no gradient; or `CheckpointFunction` is called itself",
                "use `checkpoint(..., use_reentrant=False)`, or detach what the program only looks at",
            )

    def choices(self) -> list[Chosen]:
        """The choices of results for which the backward has to be traced separately."""
        tensors = [tensor for _, tensor in self._ends]
        tensors += [leaf for _, leaf in self.wanted]
        return [] if is_linear(self._ends) and not _mixes_kinds(tensors) else self.some()

    def some(self) -> list[Chosen]:
        """Every choice of some of the results, unless there are too many."""
        indices = [idx for idx, _ in self._ends]
        if not 1 < len(indices) <= _MOST_CHOICES:
            return []
        return [some for k in range(1, len(indices)) for some in itertools.combinations(indices, k)]

    def end(self, idx: NodeOutIdx) -> torch.Tensor:
        """The traced tensor of a result."""
        return next(tensor for each, tensor in self._ends if each == idx)

    def run(
        self,
        choice: Sequence[NodeOutIdx] | None = None,
        tangents: Mapping[NodeOutIdx, torch.Tensor] | None = None,
        *,
        wanted: Sequence[torch.Tensor] | None = None,
        retain_graph: bool,
        with_history: bool = False,
    ) -> Computed:
        """Run autograd; returns the gradients that there are, and what user code keeps.

        Args:
            choice: the results to start from; all, if not given.
            tangents: the gradients to start with, if not those of the metadata that the trace assumes.
            wanted: the tensors to compute gradients of, if not the inputs; these are not returned.
            retain_graph: whether the backward will run again.
            with_history: whether the gradients are to be differentiated in turn.
        """
        ends = [(idx, tensor) for idx, tensor in self._ends if choice is None or idx in choice]
        given = self._tangents if tangents is None else tangents
        if not ends:
            return Computed({}, ())
        arriving = self.wanted if wanted is None else ()
        arrive_at = [leaf for _, leaf in arriving] if wanted is None else wanted
        with (
            self._autocast(),
            self.mode,
            naming_failures_of_backward(of_assumed=tangents is None, line=lambda: self.recorder.asked_at),
            users_code(self.mode.swap),
            self.in_python.running(choice, self.recorder.shape_env, self.recorder.sources_of_numbers),
        ):
            tensors, first = zip(*((tensor, given[idx]) for idx, tensor in ends), strict=True)
            found = seen_by_modes(
                run_backward(tensors, arrive_at, first, retain_graph=retain_graph, create_graph=with_history)
            )
        grads: dict[PrimalIdx, torch.Tensor] = {}
        for (idx, _), grad in zip(arriving, found, strict=False):
            if grad is not None:
                grads[idx] = self.mode.swap(grad)  # a function of the user's may return what it closes over
        return Computed(grads, self.in_python.kept)


def requires_grad_by_itself(slot: Slot) -> UnsupportedProgram:
    """An error for a result that requires grad although it follows from no input that does."""
    return unsupported(
        f"`{slot}` requires grad, and no input of the program that does leads to it",
        "let it require grad (`requires_grad_()`, `nn.Parameter`) outside, of the result or of an argument; "
        "or compile the whole step, with its `backward()`, and neither return nor keep such a tensor",
    )


def new_tangent(
    recorder: Recorder, path: str, recipe: Recipe, like: torch.Tensor, role: Role = "tangent"
) -> torch.Tensor:
    """New arguments of the graph, put together as `recipe` says; on the devices of `like`.

    `like` may be another kind of tensor: then all are on its one device.
    """
    same_kind = _kind(recipe) == _kind(recipe_of(like))
    likes = plain_tensors(like) if same_kind else itertools.repeat(like)
    plains = [
        recorder.argument(Slot(role, path, inner), recorder.fake_like(leaf, one.device, stands_for=one))
        for (inner, leaf), one in zip(leaves(recipe), likes, strict=same_kind)
    ]
    return rebuild(recipe, plains)


Result = tuple[Slot, torch.fx.Node | None]


def value_results(
    recorder: Recorder, node_outs: Row[NodeOutIdx, NodeOut], tensors: Sequence[torch.Tensor]
) -> list[Result]:
    """What a program returns as results of the recorded graph."""
    results: list[Result] = []
    for node_out, tensor in zip(node_outs, tensors, strict=True):
        slot = node_out.slot
        for (inner, _), plain in zip(leaves(node_out.recipe), plain_tensors(tensor), strict=True):
            results.append((Slot(slot.role, slot.path, inner), recorder.value(plain)))
    return results


def grad_results(
    recorder: Recorder, ins: Row[PrimalIdx, Slot], grads: Mapping[PrimalIdx, torch.Tensor]
) -> list[Result]:
    """The gradients as results of the recorded graph; `ins` names the inputs."""
    results: list[Result] = []
    for idx, grad in grads.items():
        for (inner, _), plain in zip(leaves(recipe_of(grad)), plain_tensors(grad), strict=True):
            results.append((Slot("grad", ins[idx].path, inner), recorder.value(plain)))
    return results


def kept_results(recorder: Recorder, kept: Sequence[torch.Tensor]) -> list[Result]:
    """What user code in the backward keeps as results of the recorded graph.

    Raises:
        UnsupportedProgram: a tensor is none of the backward's.
    """
    values = [recorder.value(plain) for tensor in kept for plain in plain_tensors(tensor)]
    for value in values:
        if value.meta.get("phase") != "backward":
            raise unsupported(
                "a hook, or an autograd function, keeps a tensor in the backward that the backward does not "
                f"compute: `{value.name}`",
                "keep it in the forward, or return it",
            )
    return list(zip(kept_slots([recipe_of(tensor) for tensor in kept]), values, strict=True))


def choice_results(recorder: Recorder, slots: Sequence[Slot], computed: Computed) -> list[Result]:
    """What the backward of a choice of results computes, by the names that `Choice.slots` has for it."""
    plains = (plain for tensor in computed.tensors() for plain in plain_tensors(tensor))
    return list(zip(slots, map(recorder.value, plains), strict=True))
