"""Converts a tangent to the arguments that a backward graph was compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from aotdist.aliasing.memory import restrided
from aotdist.errors import UnsupportedProgram
from aotdist.program import Role, Slot
from aotdist.sizes import is_symbolic
from aotdist.subclasses.protocol import (
    Plain,
    Recipe,
    Wrapper,
    is_wrapper,
    leaves,
    plain_tensors,
    recipe_of,
    wrapper_rule,
)
from aotdist.torch_seam.modes import class_functions_off


class TangentMismatch(UnsupportedProgram):
    """A tangent is another kind of tensor than the backward was compiled for."""


@dataclass(frozen=True, slots=True)
class Tangent:
    """The tangent that a backward graph takes for one differentiable output.

    Args:
        path: the output's name.
        recipe: the metadata that was assumed.
        strides: strides of each plain tensor, which a compiler may have chosen; None where any will do.
        any_kind: whether a wrapper may arrive for a plain tensor: the graph's operators then run on it.
        role: of its plain tensors among the graph's arguments.
        as_it_is: whether a wrapper of another layout (a DTensor of other placements) is a mismatch instead of
            being converted, as there is a backward for it.
    """

    path: str
    recipe: Recipe
    strides: tuple[tuple[int, ...] | None, ...]
    any_kind: bool = False
    role: Role = "tangent"
    as_it_is: bool = False

    def converting(self) -> Tangent:
        """The same, but with wrappers of other layouts converted."""
        return replace(self, as_it_is=False)

    def is_any_plain(self) -> bool:
        """Whether the graph takes any plain tensor as it is, whatever its strides."""
        return isinstance(self.recipe, Plain) and self.strides == (None,)

    def slots(self) -> list[Slot]:
        """The names of its plain tensors among the backward graph's arguments."""
        return [Slot(self.role, self.path, inner) for inner, _ in leaves(self.recipe)]

    def needs_sizes(self) -> bool:
        """Whether symbols in it are read, and have to be replaced by the numbers of the call first."""
        return is_symbolic(self.strides) or (isinstance(self.recipe, Wrapper) and is_symbolic(self.recipe))

    def __call__(self, tangent: torch.Tensor) -> list[torch.Tensor]:
        """The arguments for `tangent`: its plain tensors, with the expected strides.

        Raises:
            TangentMismatch: the tangent is another kind of tensor and cannot be converted.
        """
        return self.laid_out(self.converted(tangent))

    def laid_out(self, converted: torch.Tensor) -> list[torch.Tensor]:
        """The arguments for a tangent that `converted` returned."""
        args = [converted] if isinstance(self.recipe, Plain) else plain_tensors(converted)
        return [_materialised(arg, stride) for arg, stride in zip(args, self.strides, strict=True)]

    def takes(self, tangent: torch.Tensor) -> bool:
        """Whether `tangent` is of the expected kind, or can be converted to it."""
        try:
            self.converted(tangent)
        except TangentMismatch:
            return False
        return True

    def converted(self, tangent: torch.Tensor) -> torch.Tensor:
        """`tangent`, converted to the expected kind of tensor.

        Raises:
            TangentMismatch: it cannot be converted.
        """
        if type(tangent) is not torch.Tensor and not is_wrapper(tangent):
            with class_functions_off():  # which autograd does not call either
                tangent = tangent.as_subclass(torch.Tensor)
        if isinstance(self.recipe, Plain) and (type(tangent) is torch.Tensor or self.any_kind):
            return tangent
        recipe = recipe_of(tangent)
        if is_laid_out_as(recipe, self.recipe):
            return tangent
        if isinstance(self.recipe, Wrapper):
            rule = wrapper_rule(self.recipe.cls)
            converted = rule.convert(tangent, self.recipe)
            if converted is not None and is_laid_out_as(recipe_of(converted), self.recipe):
                assert isinstance(recipe, Wrapper), "a rule converts wrappers of its own class"
                if not self.as_it_is or rule.same_layout(recipe, self.recipe):
                    return converted
        raise TangentMismatch(
            f"the gradient of `{self.path}` is a {type(tangent).__name__}, "
            f"and was expected as {_describe(self.recipe)}",
            stage="runtime",
            fix="convert it before calling `backward`",
        )


def tangent_like(path: str, recipe: Recipe, *, loose: bool) -> Tangent:
    """The tangent of a backward that was traced for `recipe`; with any strides, if `loose`."""
    strides = tuple(None if loose else plain.stride for _, plain in leaves(recipe))
    return Tangent(path, recipe, strides, as_it_is=True)


def is_laid_out_as(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes are equal up to strides and `requires_grad`."""
    match a, b:
        case Plain(), Plain():
            return a.size == b.size and a.dtype == b.dtype
        case Wrapper(), Wrapper():
            return (
                a.cls is b.cls
                and wrapper_rule(a.cls).same_layout(a, b)
                and all(
                    name == other and is_laid_out_as(x, y)
                    for (name, x), (other, y) in zip(a.attributes, b.attributes, strict=True)
                )
            )
        case _:
            return a == b


def _describe(recipe: Recipe) -> str:
    return recipe.cls.__name__ if isinstance(recipe, Wrapper) else "a plain tensor"


def _materialised(plain: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """`plain` with these strides, if any are required, and without lazy conjugation, negation or zeros."""
    if stride is not None and plain.stride() != stride:
        if not is_wrapper(plain):
            out = torch.empty_strided(plain.size(), stride, dtype=plain.dtype, device=plain.device)
            return out.copy_(plain)
        return restrided(plain, stride)
    if plain._is_zerotensor():
        return plain.clone()
    return plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain


def rebuilt(recipe: Recipe) -> Any:
    """A fast function `(*plains) -> tensor` for a wrapper's recipe."""
    assert isinstance(recipe, Wrapper), "a plain tensor is not put together"
    return wrapper_rule(recipe.cls).rebuilder(recipe)
