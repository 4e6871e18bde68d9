"""Gradients put together from the plain tensors that a graph returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from aotdist.runtime.tangent import is_laid_out_as
from aotdist.subclasses.protocol import (
    Constant,
    Plain,
    Recipe,
    Wrapper,
    is_wrapper,
    leaves,
    plain_tensors,
    rebuild,
    recipe_of,
)


class GradRebuilder:
    """Puts the gradients of one backward together, without a history.

    Gradients that are one tensor in eager are one here, and so is one that is passed on: autograd keeps a
    gradient that nobody else holds as `.grad`, and adds the next one to it in place. And a wrapper is laid
    out as what lies inside of it: the strides that a trace records are those for gradients that it assumed.

    Args:
        arrived: the gradients that the backward starts from.
    """

    def __init__(self, arrived: Iterable[torch.Tensor] = ()) -> None:
        wrappers = [(tensor, plain_tensors(tensor)) for tensor in arrived if is_wrapper(tensor)]
        self._known = {_key(plains): (tensor, plains) for tensor, plains in wrappers}

    def __call__(self, recipe: Recipe, plains: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The tensor of `recipe` made of `plains`; None if one of them is missing."""
        there = [plain for plain in plains if plain is not None]
        if len(there) < len(plains):
            return None
        if not isinstance(recipe, Wrapper):
            return there[0]
        known = self._known.get(_key(there))
        if known is None or not is_laid_out_as(recipe_of(known[0]), recipe):
            known = self._known[_key(there)] = rebuild(_as_they_lie(recipe, iter(there)), there), there
        return known[0]


def rebuild_in_order(
    recipes: Iterable[Recipe | None], plains: Iterator[torch.Tensor | None], put: GradRebuilder
) -> list[torch.Tensor | None]:
    """For each recipe, what `put` makes of the next `plains`; None for no recipe."""
    return [
        None if recipe is None else put(recipe, [next(plains) for _ in leaves(recipe)]) for recipe in recipes
    ]


def _key(plains: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(map(id, plains))


def _as_they_lie(recipe: Recipe, plains: Iterator[torch.Tensor]) -> Recipe:
    """`recipe` with the strides that `plains` have, and strides in the same order of the wrappers around."""
    match recipe:
        case Plain():
            return replace(recipe, stride=next(plains).stride())
        case Constant():
            return recipe
        case Wrapper():
            attributes = tuple((name, _as_they_lie(part, plains)) for name, part in recipe.attributes)
            before = [part.stride for _, part in recipe.attributes if not isinstance(part, Constant)]
            after = [part.stride for _, part in attributes if not isinstance(part, Constant)]
            changed = [new for old, new in zip(before, after, strict=True) if old != new]
            stride = recipe.stride
            if changed and len(changed[0]) == len(recipe.size):
                stride = _in_order_of(changed[0], recipe.size)
            return replace(recipe, attributes=attributes, stride=stride)


def _in_order_of(stride: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor that lies densely, but in this order, and is expanded where that has a 0."""
    found, step = [0] * len(size), 1
    for dim in sorted(range(len(size)), key=lambda dim: (stride[dim], -dim)):
        if stride[dim] or size[dim] == 1:
            found[dim] = step
            step *= max(size[dim], 1)
    return tuple(found)
