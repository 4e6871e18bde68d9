"""When the gradient of a base arrives, if the caller holds only a view of the base.

The caller makes the view again, so autograd hands the program the gradient of the base. In eager that comes
from the view's node, and is added to the gradients of the base's other uses when that node runs, not before
all others: sums of three floating-point numbers depend on the order. So the trace brings it in at that node.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.facts import OutputFact, ViewOfIntermediate
from aotdist.program import NodeOutIdx
from aotdist.torch_seam.autograd import nodes_behind, result_size, takes_gradients_of


@dataclass(frozen=True, slots=True)
class Arrival:
    """The view through whose node the gradient of a base comes.

    Args:
        view: the traced view; autograd starts there, without a gradient of its own.
        position: which of the gradients that the view's node returns is the base's.
    """

    view: torch.Tensor
    position: int

    @contextmanager
    def bringing(self, tangent: torch.Tensor) -> Generator[None]:
        """While autograd runs in this context, the view's node sends `tangent` to the base."""

        def bring(grads: Sequence[torch.Tensor | None], _: Any) -> tuple[torch.Tensor | None, ...]:
            return tuple(tangent if k == self.position else grad for k, grad in enumerate(grads))

        assert self.view.grad_fn is not None, "it has the base's history"
        handle = self.view.grad_fn.register_hook(bring)
        try:
            yield
        finally:
            handle.remove()


def find_arrivals(
    outs: Sequence[Any], facts: Iterable[OutputFact], ends: Sequence[tuple[NodeOutIdx, torch.Tensor]]
) -> Mapping[NodeOutIdx, Arrival]:
    """The bases whose gradient comes through one node, of views that the program itself does not use.

    Args:
        outs: what the program returns.
        facts: the fact of each of `outs`.
        ends: the differentiable node outputs.
    """
    views: dict[NodeOutIdx, list[torch.Tensor]] = {}
    for out, fact in zip(outs, facts, strict=True):
        if isinstance(fact, ViewOfIntermediate) and out.grad_fn is not None:
            views.setdefault(fact.base, []).append(out)
    if not views:
        return {}
    used = set(nodes_behind(tensor for _, tensor in ends))
    found = ((idx, _arrival(base, views[idx], used)) for idx, base in ends if idx in views)
    return {idx: arrival for idx, arrival in found if arrival is not None}


def _arrival(base: torch.Tensor, views: Sequence[torch.Tensor], used: Collection[Any]) -> Arrival | None:
    node = views[0].grad_fn
    assert node is not None, "views without history are left out"
    if (
        not takes_gradients_of(views[0])
        or node in used
        or any(view.grad_fn is not node or view._backward_hooks for view in views)
    ):
        return None
    edges = list(node.next_functions)
    if base.grad_fn is None or result_size(base) != base.size():  # it was given other sizes under `no_grad`
        return None
    edge = (base.grad_fn, base.output_nr)
    return Arrival(views[0], edges.index(edge)) if edges.count(edge) == 1 else None
