"""Views that a user's autograd function returns: of what eager says they are, with the function's backward.

Replaying the views alone would lose the backward, and returning the region's value alone would lose whose
memory it shows. So the view is made again inside of an autograd function of our own, which sends the gradient
to the region's value; autograd then knows it as a view that a function made, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotdist.convention.put import put
from aotdist.torch_seam.autograd import set_creation_meta


class _FunctionView(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, base: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # what is not there stays away from the region
        return make(base)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


def function_view(
    base: torch.Tensor,
    value: torch.Tensor,
    make: Callable[[torch.Tensor], torch.Tensor] | None,
    creation: Any,
) -> torch.Tensor:
    """The view that `make` makes of `base`, with the history of `value`.

    Args:
        base: what it shows.
        value: the same numbers, with a history.
        make: makes the view; None for what lies inside of a wrapper and was written: it is the view.
        creation: what autograd is to know of how it was made.
    """
    if make is None:
        put(base, None, value, 0)
        return base
    with torch.enable_grad():  # as it was where the user's function ran
        view = _FunctionView.apply(value, base, make)
    set_creation_meta(view, creation)
    return view
