"""Views that a user's autograd function returns: views of the same base as in eager, with its backward.

Replaying the views alone would lose the backward, and returning the region's value alone would lose whose
memory it shows. So the view is made again inside of an autograd function of our own, which sends the gradient
to the region's value; autograd then treats it as a view made by an autograd function, as in eager.
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
        ctx.set_materialize_grads(False)  # the region gets no zeros for gradients that do not arrive
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
        base: the tensor whose memory it shows.
        value: the region's result, which has the view's numbers and its history.
        make: makes the view; None where `base`, out of a wrapper and written, is the view itself.
        creation: autograd's `CreationMeta` for the view.
    """
    if make is None:
        put(base, None, value, 0)
        return base
    with torch.enable_grad():  # as it was where the user's function ran
        view = _FunctionView.apply(value, base, make)
    set_creation_meta(view, creation)
    return view
