"""Wrappers taken apart and put together by differentiable functions: for the backward of a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from aotdist.subclasses.protocol import Recipe, Wrapper, is_wrapper, leaves, plain_tensors, rebuild, recipe_of


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.recipe = recipe_of(tensor)
        return tuple(plain.detach() for plain in plain_tensors(tensor))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return together(ctx.recipe, grads)


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *plains: torch.Tensor) -> torch.Tensor:
        return rebuild(recipe, [plain.detach() for plain in plains])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *apart(grads[0])


def in_turn(
    recipes: Iterable[Recipe | None],
    plains: Iterator[torch.Tensor | None],
    put: Callable[[Recipe, Sequence[torch.Tensor | None]], torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """For each recipe, what `put` (`Joining`, `together`) makes of the next `plains`; None for no recipe."""
    return [
        None if recipe is None else put(recipe, [next(plains) for _ in leaves(recipe)]) for recipe in recipes
    ]


def apart(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The plain tensors of `tensor`; their gradients become a gradient of `tensor`."""
    return _Apart.apply(tensor) if is_wrapper(tensor) else [tensor]


def together(recipe: Recipe, plains: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The inverse of `apart`; None if one of `plains` is missing."""
    there = [plain for plain in plains if plain is not None]
    if len(there) < len(plains):
        return None
    return _Together.apply(recipe, *there) if isinstance(recipe, Wrapper) else there[0]
