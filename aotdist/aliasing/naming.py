"""Other names for a tensor: tensors in the same memory, which autograd does not take for views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotdist.subclasses.protocol import plain_tensors, rebuild, recipe_of
from aotdist.torch_seam.autograd import history_of


class _Named(torch.autograd.Function):
    """The identity, whose result is a second tensor of the same values, and to autograd no view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, second: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # no gradient stays none
        return second()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


NAMED = f"{_Named.__name__}Backward"
"""The name of its autograd node."""


def with_history_of(tensor: torch.Tensor, second: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`second()`, a tensor of the same values as `tensor`, with the history of `tensor`."""
    with torch.enable_grad():
        return _Named.apply(tensor, second)


def named_history(name: torch.Tensor) -> Any | None:
    """The history of the tensor that `name` is another name of."""
    node = history_of(name)
    return None if node is None else node.next_functions[0][0]


def another_name(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory, with the same history."""

    def second() -> torch.Tensor:
        # A wrapper's own `detach` may fail once it is resized.
        names = [torch.ops.aten.detach.default(plain) for plain in plain_tensors(tensor)]
        return rebuild(recipe_of(tensor), names)

    if history_of(tensor) is not None:
        return with_history_of(tensor, second)
    with torch.no_grad():
        return second()
