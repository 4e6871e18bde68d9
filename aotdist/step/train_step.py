"""`aotdist.train_step`: writes a training step for a model, a loss and an optimizer, and compiles it."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from aotdist.codegen.backend import Compiler, is_eager
from aotdist.codegen.contract import Backend
from aotdist.compiled import CompiledFunction
from aotdist.compiling import Compiling, compiling
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.origins import short_tracebacks
from aotdist.report.explain import Explained
from aotdist.runtime.artifact import Artifacts
from aotdist.settings import Settings
from aotdist.step.whole import WholeStep
from aotdist.subclasses.protocol import communicates_around
from aotdist.torch_seam.trees import pytree

Clip: TypeAlias = float | Callable[[Sequence[torch.Tensor]], Any]
"""A largest norm of all gradients, or what is called with the model's parameters."""

_MOST_SHOWN = 60
"""Characters of an argument in an error; modules and optimizers have lines of them."""


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
    arguments = StepArguments(model, loss_fn, optimizer, clip, scaler, accumulate)
    arguments.check()
    return TrainStep(arguments, None if is_eager(backend) else compiling(backend, settings))


class TrainStep(Explained):
    """A compiled training step; `grad_norm` is what clipping returned in the last update, or None.

    Args:
        arguments: the arguments of `train_step`.
        make: compiles it; None for a step that always runs eagerly.
    """

    def __init__(self, arguments: StepArguments, make: Compiling | None) -> None:
        self.__signature__ = arguments.signature()
        self.grad_norm: torch.Tensor | None = None
        self._arguments, self._make, self._calls = arguments, make, 0
        steps = [WholeStep(part, make) for part in arguments.parts() if make is not None]
        self._steps: Sequence[Explained] = steps
        compiled = [CompiledFunction(step.run, step.make, step=step) for step in steps]
        self._adds, self._updates = compiled or arguments.parts()

    @short_tracebacks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Do a step; returns what `loss_fn` returned, detached."""
        if self._calls == 0:
            self._arguments.warn_of_foreign_parameters()
            if self._make is not None:
                self._make.agree_on_state(self._arguments.model)
        if (self._calls + 1) % self._arguments.accumulate:
            result = self._adds(*args, **kwargs)
        else:
            result, self.grad_norm = self._updates(*args, **kwargs)
        self._calls += 1
        return result

    def _compiled_parts(self) -> list[Artifacts]:
        return [part for step in self._steps for part in step._compiled_parts()]

    def reset(self) -> None:
        """Forget every artifact; the next call compiles again."""
        for step in self._steps:
            step.reset()


@dataclass(frozen=True, slots=True)
class StepArguments:
    """The arguments of `aotdist.train_step`."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    clip: Clip | None
    scaler: torch.amp.GradScaler | None
    accumulate: int

    def parts(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Two functions: one that only accumulates gradients, and the whole step."""
        model, loss_fn, clip = self.model, _function(self.loss_fn), _function(self.clip)
        optimizers, scaler, accumulate = _several(self.optimizer), self.scaler, self.accumulate

        def gradients(*args: Any, **kwargs: Any) -> Any:
            result = loss_fn(model, *args, **kwargs)
            loss = _loss_in(result)
            loss = loss / accumulate if accumulate > 1 else loss
            (loss if scaler is None else scaler.scale(loss)).backward()
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)

        def train_step(*args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
            _ = loss_fn  # puts it into a cell of this function, where capture looks for state
            result, norm = gradients(*args, **kwargs), None
            if clip is not None and scaler is not None:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
            if callable(clip):
                norm = clip(list(model.parameters()))
            elif clip is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            for optimizer in optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            return result, norm.detach() if isinstance(norm, torch.Tensor) else None

        return gradients, train_step

    def signature(self) -> inspect.Signature:
        """What a step takes: what `loss_fn` takes besides the model."""
        try:
            first, *others = inspect.signature(self.loss_fn).parameters.values()
        except ValueError:  # it has no signature, or no parameter
            first, others = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL), []
        takes_any = first.kind is inspect.Parameter.VAR_POSITIONAL
        return inspect.Signature([first, *others] if takes_any else others)

    def check(self) -> None:
        """Raise `BadSettings` for an argument of the wrong kind, or one that cannot work."""
        for name, (fits, fix) in _KINDS.items():
            given = getattr(self, name)
            if not fits(given):
                shown = repr(given)
                shown = shown if len(shown) <= _MOST_SHOWN else f"a {type(given).__name__}"
                raise BadSettings(f"{name} is {shown}", fix=fix)
        for optimizer in _several(self.optimizer):
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise BadSettings(
                    f"{type(optimizer).__name__} needs a closure: it runs the model several times in a step",
                    fix="use `aotdist.compile` for the model, and the optimizer as it is",
                )
        if communicates_around(self.model):
            raise BadSettings(
                f"the model is wrapped in {type(self.model).__name__}, which reduces gradients by itself",
                fix="shard the model with `fully_shard`, or use `aotdist.compile`",
            )
        if self._num_foreign()[0]:
            raise BadSettings(
                "the optimizer has parameters that are not the model's",
                fix="pass a module that holds all of them, and an optimizer that was made after it was "
                "sharded",
            )

    def _num_foreign(self) -> tuple[int, int]:
        """How many of the optimizers' parameters are not the model's, and how many there are."""
        groups = [group for optimizer in _several(self.optimizer) for group in optimizer.param_groups]
        params = {id(param) for group in groups for param in group["params"]}
        return len(params.difference(map(id, self.model.parameters()))), len(params)

    def warn_of_foreign_parameters(self) -> None:
        """Warn if the optimizers train parameters that the model does not have any more."""
        number, of = self._num_foreign()
        if number:
            warnings.warn(
                f"aotdist: {number} of the optimizer's {of} parameters are not the "
                f"{type(self.model).__name__}'s any more, and those in their place are not trained; make the "
                "optimizer, and the step, after `fully_shard`, `to_empty` and the like",
                stacklevel=4,
            )


def _several(optimizer: Any) -> Sequence[Any]:
    return tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)


def _function(value: Any) -> Any:
    """The function or module that a call of `value` runs."""
    known = (types.FunctionType, types.MethodType, functools.partial, nn.Module)
    return value.__call__ if callable(value) and not isinstance(value, known) else value


def _loss_in(result: Any) -> torch.Tensor:
    """The loss in what `loss_fn` returned.

    Raises:
        UnsupportedProgram: it returned no loss.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    loss = next(iter(loss), None) if isinstance(loss, tuple | list) else loss
    if not isinstance(loss, torch.Tensor):
        raise UnsupportedProgram(
            f"`loss_fn` returned a {type(result).__name__} without a loss",
            stage="capture",
            fix="return the loss, a tuple that begins with it, or a dictionary that has it as `loss`",
        )
    return loss


def _is_positive(value: Any, kind: type[int | float]) -> bool:
    return isinstance(value, int | kind) and not isinstance(value, bool) and value > 0


def _are_optimizers(given: Sequence[Any]) -> bool:
    each_once = len(set(map(id, given))) == len(given) > 0
    return each_once and all(isinstance(one, torch.optim.Optimizer) for one in given)


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda given: isinstance(given, nn.Module), "pass a module"),
    "loss_fn": (callable, "pass a function that takes the model and the arguments of a step"),
    "optimizer": (
        lambda given: _are_optimizers(_several(given)),
        "pass a `torch.optim.Optimizer` made of the model's parameters, or a list of them, each once",
    ),
    "clip": (
        lambda given: given is None or callable(given) or _is_positive(given, float),
        "give a positive number, a function that takes the parameters, or None",
    ),
    "scaler": (
        lambda given: given is None or isinstance(given, torch.amp.GradScaler),
        "pass a `torch.amp.GradScaler`, or None",
    ),
    "accumulate": (lambda given: _is_positive(given, int), "give a positive whole number"),
}
"""For each argument a check of its value, and the fix that the error names."""
