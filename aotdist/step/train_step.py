"""`aotdist.train_step`: writes a training step for a model, a loss and an optimizer, and compiles it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aotdist.codegen.backend import Compiler, is_eager
from aotdist.codegen.contract import Backend
from aotdist.compiled import CompiledFunction, StepOfFunction
from aotdist.compiling import Compiling, compiling
from aotdist.origins import short_tracebacks
from aotdist.report.explain import Explained
from aotdist.runtime.artifact import Artifact
from aotdist.runtime.kinds import Kinds
from aotdist.settings import Settings
from aotdist.step.recipe import Clip, Recipe
from aotdist.step.whole import WholeStep


def train_step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    clip: Clip | None = None,
    scaler: torch.amp.GradScaler | None = None,
    accumulate: int = 1,
    backend: str | Compiler | Backend = "auto",
    settings: Settings | Mapping[str, Any] | None = None,
) -> TrainStep:
    """Write a training step, the optimizer included, and compile it as `aotdist.compile` does.

    `step(*args)` calls `loss_fn(model, *args)`, then backward, clipping, the optimizer's step, `zero_grad`.

    Args:
        model: what is trained (plain, FSDP2, tensor parallel); its own call stays as it is.
        loss_fn: returns the loss, a tuple that begins with it, or a dictionary that has it as `loss`. The
            step returns the same, detached.
        optimizer: one, or a list of several, which step one after the other.
        clip: the largest norm of all gradients, or what clips them, called with the model's parameters.
        scaler: scales the loss, and skips steps whose gradients overflow.
        accumulate: how many calls add up their gradients to one update; the loss is divided by it.
        backend: as for `aotdist.compile`.
        settings: likewise.

    Raises:
        BadSettings: an argument is not what it is called; the optimizer needs a closure, or has parameters
            that are not the model's; the model is wrapped in DDP; the backend or a setting is unknown.
        UnsupportedProgram: at a call: the step cannot be compiled. Nothing has been changed then.
    """
    recipe = Recipe(model, loss_fn, optimizer, clip, scaler, accumulate)
    recipe.check()
    return TrainStep(recipe, None if is_eager(backend) else compiling(backend, settings))


class TrainStep(Explained):
    """A compiled training step; `grad_norm` is what clipping returned in the last update, or None.

    Args:
        recipe: what it consists of.
        make: compiles it; None for a step that always runs as it is written.
    """

    def __init__(self, recipe: Recipe, make: Compiling | None) -> None:
        self.__signature__ = recipe.signature()
        self.grad_norm: torch.Tensor | None = None
        self._recipe, self._make, self._calls = recipe, make, 0
        steps = [WholeStep(part, make) for part in recipe.parts() if make is not None]
        self._steps: Sequence[StepOfFunction] = steps
        compiled = [CompiledFunction(step.run, step.make, step=step) for step in steps]
        self._adds, self._updates = compiled or recipe.parts()

    @short_tracebacks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Do a step; returns what `loss_fn` returned, detached."""
        if self._calls == 0:
            self._recipe.warn_of_strangers()
            if self._make is not None:
                self._make.agree_on_state(self._recipe.model)
        if (self._calls + 1) % self._recipe.accumulate:
            result = self._adds(*args, **kwargs)
        else:
            result, self.grad_norm = self._updates(*args, **kwargs)
        self._calls += 1
        return result

    def _made_so_far(self) -> list[Artifact]:
        return [artifact for step in self._steps for artifact in step._made_so_far()]

    def _decided(self) -> list[Kinds]:
        return [kinds for step in self._steps for kinds in step._decided()]

    def reset(self) -> None:
        """Forget every artifact; the next call compiles again."""
        for step in self._steps:
            step.reset()
