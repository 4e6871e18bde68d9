"""The backward of a node as a program with a backward of its own: see `joint/later_backwards.py`.

Its inputs are those of the node that get gradients, the gradients that arrive, and what the node saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from aotdist.convention.layer import Call
from aotdist.errors import UnsupportedProgram
from aotdist.program import NodeOutIdx, PrimalIdx, Slot
from aotdist.runtime.gate import is_watched
from aotdist.runtime.held import held_by_name
from aotdist.runtime.other_kinds import Arrived, Gradients
from aotdist.runtime.plan import NodePlan
from aotdist.runtime.tangent import Tangent, restrided
from aotdist.subclasses.protocol import Constant, plain_tensors
from aotdist.torch_seam.autograd import failing_in_backward


@dataclass(frozen=True, slots=True)
class CompiledDoubleBackward:
    """A differentiable backward for gradients of certain sizes, layouts and classes.

    Args:
        tangents: how each gradient that arrives is converted, and whether it requires grad.
        primals: the inputs of the node that it takes.
        values: the names of the other values that it takes.
        needed: the names of all values whose data it reads.
        call: inputs, gradients, values -> gradients.
        grads: which result is the gradient of which input; none if none has a history.
        kept: the results that user code in the backward keeps.
        failure: why the gradients have no history although eager's have, if so.
    """

    tangents: Mapping[NodeOutIdx, tuple[Tangent, bool]]
    primals: tuple[PrimalIdx, ...] = ()
    values: tuple[Slot, ...] = ()
    needed: frozenset[int | Slot] = frozenset()
    call: Call = list
    grads: Mapping[PrimalIdx, NodeOutIdx] = field(default_factory=dict[PrimalIdx, NodeOutIdx])
    kept: tuple[NodeOutIdx, ...] = ()
    failure: str = ""

    def takes(self, arrived: Arrived) -> bool:
        """Whether it was compiled for such gradients."""
        return arrived.keys() == self.tangents.keys() and all(
            arrived[idx].requires_grad is requires_grad and tangent.takes(arrived[idx])
            for idx, (tangent, requires_grad) in self.tangents.items()
        )


class DoubleBackwards(Protocol):
    """Compiles differentiable backwards of one program."""

    def __call__(self, arrived: Arrived) -> CompiledDoubleBackward:
        """The one for such gradients; compiles each once."""
        ...

    def is_there(self) -> bool:
        """Whether there is one, or a reason why there is none; if not, the joint graph serves as well."""
        ...

    def has_trace(self) -> bool:
        """Whether backwards can be traced."""
        ...

    def forget_trace(self) -> None:
        """Let go of what traces backwards, unless it was used, or nothing else could stand in for it."""
        ...


@dataclass(frozen=True, slots=True)
class DoubleBackward:
    """The backward under `create_graph=True`: runs a `CompiledDoubleBackward`.

    Args:
        plan: how tensors pass through the node.
        compiler: gives the one for these gradients.
    """

    plan: NodePlan
    compiler: DoubleBackwards

    def __call__(self, ctx: Any, arrived: Arrived, plainly: Callable[[], Gradients]) -> Gradients:
        """The inputs' gradients, with a history if they have one, and what user code keeps.

        Args:
            ctx: the context of the node.
            arrived: the gradients that there are.
            plainly: computes the same without a history.

        Raises:
            UnsupportedProgram: they cannot be differentiated.
        """
        if is_watched(ctx):
            raise UnsupportedProgram(
                "gradients are differentiated in turn (`create_graph=True`) by way of autograd's own graph, "
                "and hooks, `retain_grad` or `torch.autograd.grad` look at what passes between results",
                stage="runtime",
                fix="use no hooks, `retain_grad` or `torch.autograd.grad` of results in that backward",
            )
        compiled = self.compiler(arrived)
        if not compiled.grads:
            with torch.no_grad():
                grads, tensors = plainly()
                return tuple(_failing_later(grad, compiled.failure) for grad in grads), tensors
        kept = dict(zip(self.plan.kept.primals, ctx.kept_primals, strict=True))
        held = held_by_name(ctx, self.plan, plain_tensors, compiled.needed)
        results = compiled.call(
            [
                *(kept[idx] for idx in compiled.primals),
                *(_laid_out(tangent, arrived[idx]) for idx, (tangent, _) in compiled.tangents.items()),
                *(held[slot] for slot in compiled.values),
            ]
        )
        grads = tuple(
            results[compiled.grads[idx]] if idx in compiled.grads else None
            for idx in self.plan.grads.indices()
        )
        return grads, [results[idx] for idx in compiled.kept]


def _failing_later(grad: torch.Tensor | None, failure: str) -> torch.Tensor | None:
    """`grad` with a history whose backward raises, and says why there is none."""
    if grad is None or not failure:
        return grad
    return failing_in_backward(grad, f"the backward of a compiled program has no gradient ({failure})")


def _laid_out(tangent: Tangent, grad: torch.Tensor) -> torch.Tensor:
    converted, recipe = tangent.converted(grad), tangent.recipe
    if isinstance(recipe, Constant) or converted.stride() == recipe.stride:
        return converted
    return restrided(converted, recipe.stride)
