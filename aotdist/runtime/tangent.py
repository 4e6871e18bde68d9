"""Makes a tangent that arrives into what the backward graph was compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.program import Role, Slot
from aotdist.sizes import is_symbolic
from aotdist.subclasses.protocol import (
    Plain,
    Recipe,
    Wrapper,
    leaves,
    plain_tensors,
    rebuild,
    recipe_of,
    wrapper_rule,
)


@dataclass(frozen=True, slots=True)
class Tangent:
    """What the backward graph takes for one differentiable output.

    Args:
        path: the output's name.
        recipe: the metadata that was assumed.
        strides: strides of each plain tensor, which a compiler may have chosen; None where any will do.
        role: what it is to the graph.
    """

    path: str
    recipe: Recipe
    strides: tuple[tuple[int, ...] | None, ...]
    role: Role = "tangent"

    def slots(self) -> list[Slot]:
        """The names of its plain tensors among the backward graph's arguments."""
        return [Slot(self.role, self.path, inner) for inner, _ in leaves(self.recipe)]

    def needs_sizes(self) -> bool:
        """Whether the numbers of a call have to be put in first; those of a plain tensor are not read."""
        return is_symbolic(self.strides) or (isinstance(self.recipe, Wrapper) and is_symbolic(self.recipe))

    def __call__(self, tangent: torch.Tensor) -> list[torch.Tensor]:
        """The plain tensors of `tangent`, as the graph expects them.

        Raises:
            UnsupportedProgram: the tangent is another kind of tensor and cannot be converted.
        """
        plains = plain_tensors(self.converted(tangent))
        return [_materialised(plain, stride) for plain, stride in zip(plains, self.strides, strict=True)]

    def converted(self, tangent: torch.Tensor) -> torch.Tensor:
        """`tangent` as the kind of tensor that is expected.

        Raises:
            UnsupportedProgram: it cannot be converted.
        """
        if isinstance(self.recipe, Plain) and type(tangent) is torch.Tensor:
            return tangent
        recipe = recipe_of(tangent)
        if _same_layout(recipe, self.recipe):
            return tangent
        if isinstance(self.recipe, Wrapper):
            rule = wrapper_rule(self.recipe.cls)
            converted = None if rule is None else rule.convert(tangent, self.recipe)
            if converted is not None and _same_layout(recipe_of(converted), self.recipe):
                return converted
        raise UnsupportedProgram(
            f"the gradient of `{self.path}` is a {type(tangent).__name__}, "
            f"and was expected as {_describe(self.recipe)}",
            stage="runtime",
            fix="convert it before calling `backward`",
        )


def _same_layout(a: Recipe, b: Recipe) -> bool:
    """Equal but for strides and `requires_grad`, which are not the layout's."""
    match a, b:
        case Plain(), Plain():
            return a.size == b.size and a.dtype == b.dtype
        case Wrapper(), Wrapper():
            rule = wrapper_rule(a.cls)
            same_context = a.context == b.context if rule is None else rule.same_layout(a, b)
            return (
                a.cls is b.cls
                and same_context
                and all(
                    name == other and _same_layout(x, y)
                    for (name, x), (other, y) in zip(a.attributes, b.attributes, strict=True)
                )
            )
        case _:
            return a == b


def _describe(recipe: Recipe) -> str:
    return recipe.cls.__name__ if isinstance(recipe, Wrapper) else "a plain tensor"


def _materialised(plain: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """`plain` with these strides, if any are asked for, and no conjugation or negation left to be done."""
    if stride is not None and plain.stride() != stride:
        return _restrided(plain, stride)
    return plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain


def _restrided(plain: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    out = torch.empty_strided(plain.size(), stride, dtype=plain.dtype, device=plain.device)
    return out.copy_(plain)


def rebuilt(recipe: Recipe) -> Any:
    """A quick `(*plains) -> tensor` for a wrapper's recipe."""
    if isinstance(recipe, Wrapper):
        rule = wrapper_rule(recipe.cls)
        if rule is not None:
            return rule.rebuilder(recipe)

    def general(*plains: torch.Tensor) -> torch.Tensor:
        return rebuild(recipe, plains)

    return general
