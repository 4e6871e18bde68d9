"""The backward of a traced program: autograd runs from its results, of all of them or of some.

A backward is linear, and what it is without some tangents follows from the whole
(`aotdist.partition.reduced`); but for the user's functions with several results, which may tell None from
zeros. With one of these, the backward is traced for every choice of results.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.facts import Choice, NodeOut
from aotdist.joint.data import refusing_what_needs_data
from aotdist.joint.inputs import Lifting, StandIn
from aotdist.joint.proxies import Recorder
from aotdist.program import NodeOutIdx, PrimalIdx, Row, Slot
from aotdist.subclasses.protocol import leaves, plain_tensors, rebuild, recipe_of, tangent_recipe
from aotdist.torch_seam import (
    REENTRANT_CHECKPOINT,
    custom_functions,
    mixes_gradients,
    run_accumulating_backward,
    run_backward,
)

End = tuple[NodeOutIdx, torch.Tensor]
"""A differentiable result of the program."""

_MOST_CHOICES = 4
"""Of more results than this, not every choice is traced: there are too many."""


def choices_of(ends: Sequence[End]) -> tuple[Choice, ...]:
    """The choices of results for which the backward has to be traced by itself."""
    if not 1 < len(ends) <= _MOST_CHOICES or not mixes_gradients([tensor for _, tensor in ends]):
        return ()
    indices = [idx for idx, _ in ends]
    return tuple(
        Choice(chosen) for count in range(1, len(ends)) for chosen in itertools.combinations(indices, count)
    )


class Backward:
    """Runs autograd over a traced program; every run records what it computes.

    Args:
        recorder: records.
        node_outs: what the program returns.
        ends: those that are differentiable.
        takes_grad: the inputs that may get gradients.
        lifting: the mode that the program ran in.
    """

    def __init__(
        self,
        recorder: Recorder,
        node_outs: Row[NodeOutIdx, NodeOut],
        ends: Sequence[End],
        takes_grad: Sequence[tuple[PrimalIdx, StandIn]],
        lifting: Lifting,
    ) -> None:
        recorder.phase = "backward"
        self._ends, self._takes_grad, self._lifting = ends, takes_grad, lifting
        self._autocast = recorder.backward_autocast
        if ends and not takes_grad:
            raise requires_grad_by_itself(node_outs[ends[0][0]].slot)
        self._tangents = {idx: _tangent(recorder, node_outs[idx], tensor) for idx, tensor in ends}
        functions = custom_functions([tensor for _, tensor in ends])
        self._accumulates = REENTRANT_CHECKPOINT in functions

    def run(self, choice: Choice | None = None, *, again: bool) -> dict[PrimalIdx, torch.Tensor]:
        """The gradients that there are.

        Args:
            choice: which results to start from; all, if not given.
            again: whether there will be another run.
        """
        ends = [(idx, tensor) for idx, tensor in self._ends if choice is None or idx in choice.outs]
        if not ends:
            return {}
        wanted = [stand_in.leaf for _, stand_in in self._takes_grad]
        tangents = [self._tangents[idx] for idx, _ in ends]
        run = run_accumulating_backward if self._accumulates else run_backward
        with self._autocast(), self._lifting, refusing_what_needs_data(), _naming_failures():
            found = run([tensor for _, tensor in ends], wanted, tangents, retain_graph=again)
        pairs = zip(self._takes_grad, found, strict=True)
        return {idx: grad for (idx, _), grad in pairs if grad is not None}


@contextmanager
def _naming_failures() -> Generator[None]:
    """What autograd refuses becomes an error of ours."""
    try:
        yield
    except NotImplementedError as error:
        raise UnsupportedProgram(
            f"the program has no backward, in eager neither ({error})",
            stage="joint",
            fix="call it under `torch.no_grad()`, or on tensors that do not require grad",
        ) from error
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise _written_too_early(error) from error
        if "returned an invalid gradient" in str(error):
            raise _reshaped_unseen(error) from error
        raise


def requires_grad_by_itself(slot: Slot) -> UnsupportedProgram:
    """An error for a result that nobody could be given the gradient of."""
    return UnsupportedProgram(
        f"`{slot}` requires grad, and no input of the program that does leads to it",
        stage="joint",
        fix="call `requires_grad_()` on the result outside, or pass the tensor that is to get the gradient",
    )


def _written_too_early(error: RuntimeError) -> UnsupportedProgram:
    return UnsupportedProgram(
        "the backward of the program fails, as in eager: a tensor that it needs was written in place after "
        f"its use ({str(error).partition('Hint')[0].strip()})",
        stage="joint",
        fix="write a clone, or write before the use; call it under `torch.no_grad()` if it has no backward",
    )


def _reshaped_unseen(error: RuntimeError) -> UnsupportedProgram:
    return UnsupportedProgram(
        "a tensor with history has its sizes written in place under `no_grad`, so that the gradient does not "
        f"fit any more ({error})",
        stage="joint",
        fix="use the function that is not in place (`t` for `t_`), or write with grad mode on",
    )


def _tangent(recorder: Recorder, out: NodeOut, like: torch.Tensor) -> torch.Tensor:
    recipe = tangent_recipe(out.recipe)
    plains = [
        recorder.argument(Slot("tangent", out.slot.path, inner), recorder.fake_like(plain, device))
        for (inner, plain), device in zip(leaves(recipe), _devices(like), strict=True)
    ]
    return rebuild(recipe, plains)


def _devices(tensor: torch.Tensor) -> list[torch.device]:
    return [plain.device for plain in plain_tensors(tensor)]


Result = tuple[Slot, torch.fx.Node | None]


def grad_results(
    recorder: Recorder,
    row: Row[PrimalIdx, StandIn],
    grads: Mapping[PrimalIdx, torch.Tensor],
    choice: Choice | None = None,
) -> list[Result]:
    """The gradients, or those of a choice of results, as results of the recorded graph."""
    results: list[Result] = []
    for idx, grad in grads.items():
        for (inner, _), plain in zip(leaves(recipe_of(grad)), plain_tensors(grad), strict=True):
            slot = Slot("grad", row[idx].slot.path, inner)
            results.append((slot if choice is None else choice.slot(slot), recorder.value(plain)))
    return results
