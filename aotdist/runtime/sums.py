"""What the sum of two wrapper tensors is beneath them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aotdist.runtime.tangent import is_laid_out_as
from aotdist.sizes import is_symbolic
from aotdist.subclasses.protocol import Plain, Recipe, is_wrapper, leaves, rebuild, recipe_of
from aotdist.torch_seam.modes import TorchDispatchMode


class _Beneath(TorchDispatchMode):
    """Notes the operators that run on plain tensors, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(map(is_wrapper, args)):
            return NotImplemented  # the wrapper's turn; what it calls comes here again
        self.calls.append((func, *map(id, args)))
        return func(*args, **(kwargs or {}))


def adds_beneath(recipe: Recipe) -> bool:
    """Whether the sum of two such tensors is made of the sums of the plain tensors beneath, and no more."""
    if isinstance(recipe, Plain):
        return True
    if is_symbolic(recipe):
        return False
    first, second = _stand_ins(recipe), _stand_ins(recipe)
    a, b = rebuild(recipe, first), rebuild(recipe, second)
    with torch.no_grad(), _Beneath() as beneath:
        try:
            total = a + b
        except Exception:  # a class of the user's: it may know no sum, or not on this device
            return False
    sums = [(torch.ops.aten.add.Tensor, id(one), id(other)) for one, other in zip(first, second, strict=True)]
    return beneath.calls == sums and is_laid_out_as(recipe_of(total), recipe)


def _stand_ins(recipe: Recipe) -> list[torch.Tensor]:
    """Tensors without data for the plain tensors beneath."""
    return [
        torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype, device="meta")
        for _, leaf in leaves(recipe)
    ]
