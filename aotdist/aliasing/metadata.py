"""In-place changes of a tensor's metadata in a traced program.

They change sizes and strides (`t_`, `resize_`), the storage (`set_`, `.data =`), or the autograd history
(`detach_`, `requires_grad_`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.aliasing.overwrite import put
from aotdist.facts import ViewStep
from aotdist.subclasses.protocol import plain_tensors, rebuild, recipe_of
from aotdist.torch_seam.autograd import (
    creation_meta,
    failing_in_backward,
    history_of,
    set_creation_meta,
)
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.tensors import swap_histories

_ATEN = torch.ops.aten

INVERSES: Mapping[OpOverload, Callable[[torch.Tensor, Change], torch.Tensor]] = {
    _ATEN.t_.default: lambda tensor, _: tensor.t(),
    _ATEN.transpose_.default: lambda tensor, change: tensor.transpose(*change.args),
    _ATEN.unsqueeze_.default: lambda tensor, change: tensor.squeeze(*change.args),
    _ATEN.squeeze_.default: lambda tensor, change: tensor.view(change.size),
    _ATEN.squeeze_.dim: lambda tensor, change: tensor.view(change.size),
    _ATEN.squeeze_.dims: lambda tensor, change: tensor.view(change.size),
}
"""Operators that reshape a tensor in place, and the view that undoes each."""


@dataclass(frozen=True, slots=True)
class Change:
    """One in-place change: `op(tensor, *args, **kwargs)`.

    Args:
        tensor: the tensor that was changed.
        serial: its position in the order of the program's views and changes.
        size: the sizes of the tensor before.
        op: the operator, or a function that does the same to a real tensor.
        args: its other positional arguments; tensors among them are sources of a storage.
        kwargs: its keyword arguments as pairs.
        grad: whether grad mode was on.
        bumps: by how much the version counter increases.
        former: a second tensor with the memory and the sizes of before, if the tensor may have other memory.
        grown: a second tensor with the memory of after, if that has grown.
        where: the user's line.
    """

    tensor: torch.Tensor
    serial: int
    size: torch.Size
    op: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    grad: bool = True
    bumps: int = 0
    former: torch.Tensor | None = None
    grown: torch.Tensor | None = None
    where: str = ""

    def moves(self) -> bool:
        """Whether the tensor may have other memory now."""
        return self.op not in INVERSES and self.op not in _OF_HISTORY

    def reshapes(self) -> bool:
        """Whether the tensor has other sizes and strides now."""
        return self.op not in _OF_HISTORY

    def before(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, as the change left it, in the form that it had before."""
        inverse = INVERSES.get(self.op)  # pyright: ignore[reportArgumentType]
        if inverse is not None:
            return inverse(tensor, self)
        return tensor if self.former is None else self.former


def assign_data(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """`tensor.data = source`."""
    tensor.data = source


def release_history(tensor: torch.Tensor, reason: str) -> None:
    """Give `tensor` a history whose backward raises an error with `reason`."""
    put(tensor, failing_in_backward(tensor, reason), 0)


def rebuild_history(view: torch.Tensor, base: torch.Tensor, steps: Sequence[ViewStep]) -> None:
    """Replace the history of a view that was reshaped in place.

    Autograd rebuilds it when it is read. In eager it does so from the memory layout of both. Tensors of a
    trace have no memory: there, autograd calls the operator that made the view again, and would forget how it
    was reshaped.

    Args:
        view: the view; only its history changes.
        base: what it is a view of.
        steps: the operations that lead from the base to the view, the last one included.
    """
    creation, rebuilt = creation_meta(view), base
    for step in steps:
        result = step.of(rebuilt)
        rebuilt = result if step.pick is None else result[step.pick]
    swap_histories(view, rebuilt)
    set_creation_meta(view, creation)


_OF_HISTORY = frozenset[Any]({torch.Tensor.detach_, torch.Tensor.requires_grad_})


# Second tensors of the same memory that are no views to autograd.


class _Named(torch.autograd.Function):
    """The identity; its result is a second tensor of the same memory, and to autograd no view."""

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


def another_name(tensor: torch.Tensor) -> torch.Tensor:
    """A second tensor of the same memory, with the same history; to autograd it is no view."""

    def second() -> torch.Tensor:
        # Not the wrapper's own `detach`, which may fail after it was resized.
        names = [torch.ops.aten.detach.default(plain) for plain in plain_tensors(tensor)]
        return rebuild(recipe_of(tensor), names)

    if history_of(tensor) is not None:
        return with_history_of(tensor, second)
    with torch.no_grad():
        return second()
