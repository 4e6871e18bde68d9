"""The backward of a node for gradients of other kinds than its results: see `joint/later_backwards.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from aotdist.codegen.contract import BoxedCall
from aotdist.errors import UnsupportedProgram
from aotdist.program import NodeOutIdx, PrimalIdx, Row, Slot
from aotdist.runtime.apart import in_turn
from aotdist.runtime.gate import is_watched
from aotdist.runtime.held import held_by_name, let_go
from aotdist.runtime.joining import Joining
from aotdist.runtime.plan import NodePlan
from aotdist.runtime.tangent import Tangent
from aotdist.sizes import concrete, evaluate
from aotdist.subclasses.protocol import Recipe, plain_tensors

T = TypeVar("T")

Arrived: TypeAlias = Mapping[NodeOutIdx, torch.Tensor]
"""The gradients that there are."""

Gradients: TypeAlias = tuple[tuple[torch.Tensor | None, ...], list[torch.Tensor | None]]
"""The gradients of the inputs, and what user code in the backward keeps."""


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A compiled graph, and the names of its arguments."""

    call: BoxedCall
    ins: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class OtherBackward:
    """A backward for some kinds of gradients.

    Args:
        tangents: the recipe that is assumed for each.
        whole: computes the inputs' gradients.
        grads: recipe of each input's gradient, or None.
        kept: recipes of what user code in the backward keeps.
    """

    tangents: Mapping[NodeOutIdx, Tangent]
    whole: NamedCall
    grads: Row[PrimalIdx, Recipe | None]
    kept: tuple[Recipe, ...]

    def takes(self, arrived: Arrived) -> bool:
        """Whether these gradients are of its kinds."""
        return arrived.keys() == self.tangents.keys() and all(
            tangent.takes(arrived[idx]) for idx, tangent in self.tangents.items()
        )


@dataclass(frozen=True, slots=True)
class OtherKinds:
    """Runs backwards for gradients of other kinds.

    Args:
        plan: how tensors pass through the node.
        compiled: compiles a backward for such gradients, each once.
        after: called once the gradients are computed.
    """

    plan: NodePlan
    compiled: Callable[[Arrived], OtherBackward]
    after: Callable[[], None]

    def __call__(self, ctx: Any, arrived: Arrived) -> Gradients:
        """The inputs' gradients, and what user code keeps.

        Raises:
            UnsupportedProgram: there is no backward for such gradients.
        """
        if is_watched(ctx):
            raise refusal(arrived.values())
        other = self.compiled(arrived)
        given = held_by_name(ctx, self.plan, plain_tensors, other.whole.ins)
        tangents = of_this_call(ctx, other.tangents)
        converted = {idx: tangent.converted(arrived[idx]) for idx, tangent in tangents.items()}
        for idx, tangent in tangents.items():
            given.update(zip(tangent.slots(), tangent.laid_out(converted[idx]), strict=True))
        args = _arguments(ctx, other.whole, given)
        del given
        let_go(ctx, self.plan)
        results = iter(other.whole.call(args))
        put = Joining(converted.values())
        grads = in_turn(of_this_call(ctx, other.grads), results, put)
        self.after()
        return tuple(grads), in_turn(of_this_call(ctx, other.kept), results, put)


def refusal(arrived: Iterable[torch.Tensor]) -> UnsupportedProgram:
    """An error for gradients of other kinds in a backward that runs in parts."""
    kinds = ", ".join(type(grad).__name__ for grad in arrived)
    return UnsupportedProgram(
        f"gradients of other kinds than the results arrive ({kinds}), and hooks, `retain_grad` or "
        "`torch.autograd.grad` look at what passes between them",
        stage="runtime",
        fix="convert them before calling `backward`",
    )


def of_this_call(ctx: Any, value: T) -> T:
    """`value` with the sizes of the call whose backward runs."""
    return concrete(value, getattr(ctx, "symbols", {}))


def _arguments(ctx: Any, compiled: NamedCall, given: Mapping[Slot, Any]) -> list[Any]:
    return [evaluate(slot.path, ctx.symbols) if slot.role == "size" else given[slot] for slot in compiled.ins]
