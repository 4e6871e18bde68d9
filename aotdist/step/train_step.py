"""`aotdist.train_step`: a whole training step, forward to optimizer, as one graph without autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from aotdist.api import Compiling, compiling, runs_eagerly
from aotdist.codegen.backend import Compiler
from aotdist.codegen.contract import Backend
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.report.explain import Explained
from aotdist.runtime.artifact import Artifact
from aotdist.settings import Settings
from aotdist.step.attributes import Attributes
from aotdist.step.gradients import GivesGradients
from aotdist.step.held import HeldState, held_by, hyperparameters
from aotdist.step.program import MakesState, Now, StepProgram
from aotdist.step.recipe import Clip, Recipe
from aotdist.subclasses.protocol import communicates_around
from aotdist.torch_seam.autograd import has_grad_hooks
from aotdist.torch_seam.optimizers import has_scaled, note_step, optimizer_hooks, scaler_rules, scaler_state

_VARYING = frozenset({"lr"})
"""Hyperparameters that differ from call to call, before one is seen to."""

_MOST_SHOWN = 60
"""Characters of an argument in an error; modules and optimizers have lines of them."""


def train_step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    *,
    clip: Clip | None = None,
    scaler: torch.amp.GradScaler | None = None,
    accumulate: int = 1,
    backend: str | Compiler | Backend = "auto",
    settings: Settings | Mapping[str, Any] | None = None,
) -> TrainStep:
    """Compile a training step, the optimizer included, into one graph.

    `step(*args, **kwargs)` calls `loss_fn(model, *args, **kwargs)` and does all that follows: backward,
    clipping, the optimizer's step, `zero_grad`. State stays where it is, in the model, the optimizer and the
    scaler. The first update runs as it is written, since it makes the optimizer's state; and so does any
    other that makes some.

    Args:
        model: what is trained (plain, FSDP2, tensor parallel); its own call stays as it is.
        loss_fn: returns the loss, a tuple that begins with it, or a dictionary that has it as `loss`. The
            step returns the same, detached.
        optimizer: of `torch.optim`, or a user's own: what it keeps from step to step is in `state` and
            `param_groups`.
        clip: the largest norm of all gradients, or what clips them, called with the optimizer's parameters.
        scaler: scales the loss, and skips steps whose gradients overflow.
        accumulate: how many calls add up their gradients to one update; the loss is divided by it.
        backend: as for `aotdist.compile`.
        settings: likewise.

    Raises:
        BadSettings: an argument is something else than what it is called; the optimizer needs a closure, or
            has parameters that are not the model's; the model is wrapped in DDP; the backend or a setting is
            unknown.
        UnsupportedProgram: at a call: the step cannot be compiled. Nothing has been changed then.
    """
    recipe = Recipe(model, loss_fn, optimizer, clip, scaler, accumulate)
    _check_kinds(recipe)
    _check(recipe)
    return TrainStep(recipe, compiling(backend, settings))


class TrainStep(Explained):
    """A compiled training step; see `train_step`.

    Args:
        recipe: what it consists of.
        make: compiles it.
    """

    def __init__(self, recipe: Recipe, make: Compiling) -> None:
        self._recipe = recipe
        self.__signature__ = _behind_the_model(recipe.loss_fn)
        self._make = make
        self._names = {id(param): name for name, param in recipe.model.named_parameters()}
        self._varying = set(_VARYING)
        self._hyperparameters = hyperparameters(recipe.optimizer)
        self._held: HeldState | None = None
        self._attributes: Attributes | None = None
        self._others: dict[str, torch.Tensor] = {}
        self._has_stepped = False
        self._accumulated = 0
        self._programs: dict[Any, list[StepProgram]] = {}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Do a step; returns what `loss_fn` returned, detached.

        Args:
            args: of `loss_fn`, behind the model.
            kwargs: likewise.
        """
        return self._counted(self._recipe.as_written if runs_eagerly() else self._step, args, kwargs)

    def as_written(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same step eagerly: to compare with, or to step through.

        Args:
            args: of `loss_fn`, behind the model.
            kwargs: likewise.
        """
        return self._counted(self._recipe.as_written, args, kwargs)

    def _counted(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        updates = self._accumulated + 1 >= self._recipe.accumulate
        with torch.enable_grad():
            result = step(args, kwargs, updates=updates)
        self._accumulated = 0 if updates else self._accumulated + 1
        self._has_stepped |= updates
        return result

    def _step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, updates: bool) -> Any:
        recipe = self._recipe
        params = self._params()
        _refuse_hooks(recipe.optimizer, params)
        self._notice_what_varies()
        if updates and not self._has_stepped:
            return recipe.as_written(args, kwargs, updates=updates)
        if recipe.scaler is not None and recipe.scaler.is_enabled() and not has_scaled(recipe.scaler):
            return recipe.as_written(args, kwargs, updates=updates)
        now = self._now(params, updates=updates)
        try:
            result = self._program(now, params, updates=updates)(now, args, kwargs)
        except MakesState:
            return recipe.as_written(args, kwargs, updates=updates)
        except GivesGradients as found:
            self._others.update(found.leaves)
            return self._step(args, kwargs, updates=updates)
        if updates:
            note_step(recipe.optimizer)
            recipe.optimizer.zero_grad()
        return result

    def _now(self, params: Mapping[str, torch.Tensor], *, updates: bool) -> Now:
        scaler = self._recipe.scaler
        held = self._held_now() if updates else HeldState()
        grads = {name: grad for name, p in params.items() if (grad := p.grad) is not None}
        if scaler is None or not scaler.is_enabled():
            return Now(held, grads, {})
        scale, growth_tracker = scaler_state(scaler)
        return Now(held, grads, {"scaler.scale": scale, "scaler.growth_tracker": growth_tracker})

    def _held_now(self) -> HeldState:
        optimizer = self._recipe.optimizer
        held = None if self._held is None else self._held.now(optimizer)
        self._held = held or held_by(optimizer, self._names, self._varying)
        return self._held

    def _attributes_now(self, held: HeldState) -> Attributes:
        if self._attributes is None or not self._attributes.hold():
            self._attributes = Attributes.of(self._recipe.optimizer, held.all_containers())
        return self._attributes

    def _params(self) -> dict[str, torch.Tensor]:
        """The model's parameters, others of the optimizer, and what else gets gradients, by name."""
        params: dict[str, torch.Tensor] = dict(self._recipe.model.named_parameters())
        known = set(map(id, params.values()))
        others = [param for param in self._recipe.params() if id(param) not in known]
        params |= {f"optimizer.{at}": param for at, param in enumerate(others)}
        known.update(map(id, others))
        return params | {name: leaf for name, leaf in self._others.items() if id(leaf) not in known}

    def _program(self, now: Now, params: Mapping[str, torch.Tensor], *, updates: bool) -> StepProgram:
        """The program that fits, a new one if there is none."""
        identities = tuple(map(id, params.values()))
        scaler = self._recipe.scaler if now.scaling else None
        rules = None if scaler is None else scaler_rules(scaler)
        attributes = self._attributes_now(now.held).layout if updates else ()
        layout = (updates, rules, identities, tuple(now.grads), tuple(now.held.layout), attributes)
        programs = self._programs.setdefault(layout, [])
        for program in programs:
            if program.fits(now):
                return program
        programs.append(StepProgram(self._recipe, params, self._make, updates=updates))
        return programs[-1]

    def _notice_what_varies(self) -> None:
        """Hyperparameters that were changed since the last call are inputs from now on."""
        now = hyperparameters(self._recipe.optimizer)
        for before, after in zip(self._hyperparameters, now, strict=False):
            varying = {key for key in before.keys() & after.keys() if before[key] != after[key]}
            if not varying <= self._varying:
                self._varying |= varying
                self._held = None
        self._hyperparameters = now

    def _made_so_far(self) -> list[Artifact]:
        programs = [program for found in self._programs.values() for program in found]
        return [artifact for program in programs for artifact in program.compiled.artifacts]

    def reset(self) -> None:
        """Forget every artifact; the next call compiles again."""
        self._programs.clear()


def _is_positive(value: Any, kind: type[int | float]) -> bool:
    return isinstance(value, int | kind) and not isinstance(value, bool) and value > 0


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda given: isinstance(given, nn.Module), "pass a module"),
    "loss_fn": (callable, "pass a function that takes the model and the arguments of a step"),
    "optimizer": (
        lambda given: isinstance(given, torch.optim.Optimizer),
        "pass one `torch.optim.Optimizer`, made of the model's parameters",
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
"""What each argument has to be, and how to say so."""


def _check_kinds(recipe: Recipe) -> None:
    """Raise `BadSettings` for an argument that is something else than what it is called."""
    for name, (fits, fix) in _KINDS.items():
        given = getattr(recipe, name)
        if not fits(given):
            shown = repr(given)
            shown = shown if len(shown) <= _MOST_SHOWN else f"a {type(given).__name__}"
            raise BadSettings(f"{name} is {shown}", fix=fix)


def _check(recipe: Recipe) -> None:
    """Raise `BadSettings` for what no step can be made of."""
    optimizer = recipe.optimizer
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise BadSettings(
            f"{type(optimizer).__name__} needs a closure: it runs the model several times in a step",
            fix="use `aotdist.compile` for the model, and the optimizer as it is",
        )
    if communicates_around(recipe.model):
        raise BadSettings(
            f"the model is wrapped in {type(recipe.model).__name__}, which reduces gradients by itself",
            fix="shard the model with `fully_shard`, or use `aotdist.compile`",
        )
    known = set(map(id, recipe.model.parameters()))
    if any(id(param) not in known for param in recipe.params()):
        raise BadSettings(
            "the optimizer has parameters that are not the model's",
            fix="pass a module that holds all of them, and an optimizer that was made after it was sharded",
        )


def _refuse_hooks(optimizer: torch.optim.Optimizer, params: Mapping[str, torch.Tensor]) -> None:
    """Raise for hooks, which would run while the step is traced, and then no more."""
    if optimizer_hooks(optimizer):
        raise UnsupportedProgram(
            f"{type(optimizer).__name__} has hooks of its step (`register_step_pre_hook`)",
            stage="capture",
            fix="call what they do before and after the step",
        )
    for name, param in params.items():
        if has_grad_hooks(param):
            raise UnsupportedProgram(
                f"`{name}` has hooks of its gradient (`register_hook`)",
                stage="capture",
                fix="pass `clip` a function that does what they do, or use `aotdist.compile`",
            )


def _behind_the_model(loss_fn: Callable[..., Any]) -> inspect.Signature:
    """What a step takes: what `loss_fn` takes besides the model."""
    try:
        first, *others = inspect.signature(loss_fn).parameters.values()
    except ValueError:  # it says nothing of it, or takes nothing
        first, others = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL), []
    takes_any = first.kind is inspect.Parameter.VAR_POSITIONAL
    return inspect.Signature([first, *others] if takes_any else others)
