"""What a loaded artifact keeps of the call that it was compiled for: everything but the tensors.

The first batch, or the parameters of before a checkpoint was loaded, would otherwise stay in memory for
as long as the artifact does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch

from aotdist.capture.source import Argument
from aotdist.errors import InternalError
from aotdist.program import I, Program, Row
from aotdist.runtime.compilation import Compilation
from aotdist.runtime.fit import Fit
from aotdist.subclasses.protocol import Recipe, leaves, rebuild, recipe_of


def without_tensors(compilation: Compilation) -> Compilation:
    """`compilation` with shells for the tensors of the call, and without the values of module state."""
    captured, traced = compilation.captured, compilation.traced
    environment = captured.environment
    for source in (*(source for source, _ in environment.reached.owners), *captured.closed_over.values()):
        if isinstance(source.root, Argument):
            source.root.example = None
    reached = replace(environment.reached, tensors=(), owners=())
    return replace(
        compilation,
        captured=replace(
            captured,
            program=_without_tensors(captured.program),
            places=(),
            environment=replace(environment, state=(), reached=reached),
        ),
        traced=replace(traced, program=_without_tensors(traced.program), later_backwards=None),
    )


def fit_without_tensors(fit: Fit) -> Fit:
    """`fit` with shells for the tensors of the call."""
    return replace(fit, examples=fit.examples.map(shell))


def shell(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the metadata of another and no data."""
    made = shell_of(recipe_of(tensor))
    return made.requires_grad_(tensor.requires_grad) if tensor.requires_grad else made


def shell_of(recipe: Recipe) -> torch.Tensor:
    """A tensor that `recipe` puts together, with no data."""
    plains = [
        torch.empty_strided(plain.size, plain.stride, dtype=plain.dtype, device="meta")
        for _, plain in leaves(recipe)
    ]
    return rebuild(recipe, plains)


def _without_tensors(program: Program[I]) -> Program[I]:
    return Program(_run_again, program.ins, Row[I, torch.Tensor](map(shell, program.examples)))


def _run_again(*args: Any) -> NoReturn:
    raise InternalError("a program is traced again after it was compiled", stage="runtime")
