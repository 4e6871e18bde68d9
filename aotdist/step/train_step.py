"""`aotdist.train_step`: a whole training step, forward to optimizer, as one graph without autograd."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from aotdist.api import AsWritten, Compiling, compiling, runs_eagerly
from aotdist.capture.origins import short_tracebacks
from aotdist.codegen.backend import Compiler, is_eager
from aotdist.codegen.contract import Backend
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.report.explain import Explained
from aotdist.runtime.artifact import Artifact
from aotdist.runtime.kinds import Kinds
from aotdist.runtime.ranks import present
from aotdist.settings import Settings
from aotdist.step.attributes import Attributes
from aotdist.step.done import Done
from aotdist.step.gradients import GivesGradients
from aotdist.step.held import HeldState, held_by, hyperparameters
from aotdist.step.program import Now, Part, StepProgram
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
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
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
            `param_groups`. Several, a list of them, step one after the other.
        clip: the largest norm of all gradients, or what clips them, called with the optimizers' parameters
            in the order of the model; the step's `grad_norm` is what it returned.
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
    optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    recipe = Recipe(model, loss_fn, optimizers, clip, scaler, accumulate)  # type: ignore[arg-type]  # checked now
    _check_kinds(recipe, optimizer)
    _check(recipe)
    present()
    return TrainStep(recipe, None if is_eager(backend) else compiling(backend, settings))


class TrainStep(Explained):
    """A compiled training step; see `train_step`.

    Attributes:
        grad_norm: the norm that all gradients had in the last update, before they were clipped; what `clip`
            returned, if it is a function that returns a tensor. None without `clip`.

    Args:
        recipe: what it consists of.
        make: compiles it; None for a step that always runs as it is written.
    """

    def __init__(self, recipe: Recipe, make: Compiling | None) -> None:
        self._recipe = recipe
        self.__signature__ = _behind_the_model(recipe.loss_fn)
        self._make = make
        self._names = {id(param): name for name, param in recipe.model.named_parameters()}
        self._varying = set(_VARYING)
        self._hyperparameters = hyperparameters(recipe.optimizers)
        self._held: HeldState | None = None
        self._attributes: list[Attributes] = []
        self.grad_norm: torch.Tensor | None = None
        self._others: dict[str, torch.Tensor] = {}
        self._has_stepped = False
        self._accumulated = 0
        self._reached: set[str] = set()
        self._programs: dict[Any, list[StepProgram]] = {}

    @short_tracebacks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Do a step; returns what `loss_fn` returned, detached.

        Args:
            args: of `loss_fn`, behind the model.
            kwargs: likewise.
        """
        as_written = self._make is None or runs_eagerly()
        return self._counted(self._recipe.as_written if as_written else self._step, args, kwargs)

    def as_written(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same step eagerly: to compare with, or to step through.

        Args:
            args: of `loss_fn`, behind the model.
            kwargs: likewise.
        """
        return self._counted(self._recipe.as_written, args, kwargs)

    def _counted(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        updates = self._accumulated + 1 >= self._recipe.accumulate
        if updates and not self._has_stepped:
            _warn_of_strangers(self._recipe)
        with torch.enable_grad():
            result, norm = step(args, kwargs, updates=updates)
        if updates:
            self.grad_norm = norm
        self._accumulated = 0 if updates else self._accumulated + 1
        self._has_stepped |= updates
        return result

    def _step(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, updates: bool
    ) -> tuple[Any, torch.Tensor | None]:
        recipe = self._recipe
        params = self._params()
        _refuse_hooks(recipe.optimizers, params)
        self._notice_what_varies()
        if not self._has_stepped:
            if self._make is not None and self._accumulated == 0:
                self._make.agree_on_state(recipe.model)
            self._reached = _reproducible(params)
            return recipe.as_written(args, kwargs, updates=updates)
        if recipe.scaler is not None and recipe.scaler.is_enabled() and not has_scaled(recipe.scaler):
            return recipe.as_written(args, kwargs, updates=updates)
        try:
            if recipe.accumulate == 1:
                done = self._run("whole", params, args, kwargs)
                self._stepped()
                return done.result, done.norm
            result = self._accumulate(params, args, kwargs)
        except AsWritten:
            return recipe.as_written(args, kwargs, updates=updates)
        except GivesGradients as found:
            self._others.update(found.leaves)
            return self._step(args, kwargs, updates=updates)
        return result, self._update(params) if updates else None

    def _run(
        self,
        part: Part,
        params: Mapping[str, torch.Tensor],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Done:
        now = self._now(params, part)
        return self._program(now, params, part)(now, args, kwargs)

    def _accumulate(
        self, params: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Add to the gradients; a gradient that is not there yet is -0.0, so that all calls are of one kind.

        Whatever is added to -0.0 is what it was, to the bit; 0.0 would make 0.0 of a -0.0.
        """
        missing = {name: param for name, param in params.items() if param.grad is None}
        filled = {name: param for name, param in missing.items() if name in self._reached}
        try:
            for param in filled.values():
                param.grad = torch.full_like(param, -0.0, requires_grad=False)
            done = self._run("gradients", params, args, kwargs)
        except BaseException:
            for param in filled.values():
                param.grad = None
            raise
        for name in filled.keys() - set(done.reached):
            params[name].grad = None
        self._reached = _reproducible({name: params[name] for name in done.reached})
        return done.result

    def _update(self, params: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        try:
            norm = self._run("update", params).norm
        except AsWritten:
            return self._recipe.update()
        self._stepped()
        return norm

    def _stepped(self) -> None:
        for optimizer in self._recipe.optimizers:
            note_step(optimizer)
            optimizer.zero_grad()

    def _now(self, params: Mapping[str, torch.Tensor], part: Part) -> Now:
        scaler = self._recipe.scaler
        held = HeldState() if part == "gradients" else self._held_now()
        grads = {name: grad for name, p in params.items() if (grad := p.grad) is not None}
        if scaler is None or not scaler.is_enabled():
            return Now(held, grads, {})
        scale, growth_tracker = scaler_state(scaler)
        return Now(held, grads, {"scaler.scale": scale, "scaler.growth_tracker": growth_tracker})

    def _held_now(self) -> HeldState:
        optimizers = self._recipe.optimizers
        held = None if self._held is None else self._held.now(optimizers)
        self._held = held or held_by(optimizers, self._names, self._varying)
        return self._held

    def _attributes_now(self, held: HeldState) -> tuple[Any, ...]:
        if not self._attributes or not all(attributes.hold() for attributes in self._attributes):
            apart = held.all_containers()
            self._attributes = [Attributes.of(optimizer, apart) for optimizer in self._recipe.optimizers]
        return tuple(attributes.layout for attributes in self._attributes)

    def _params(self) -> dict[str, torch.Tensor]:
        """The model's parameters, others of the optimizer, and what else gets gradients, by name."""
        params: dict[str, torch.Tensor] = dict(self._recipe.model.named_parameters())
        known = set(map(id, params.values()))
        others = [param for param in self._recipe.params() if id(param) not in known]
        params |= {f"optimizer.{at}": param for at, param in enumerate(others)}
        known.update(map(id, others))
        return params | {name: leaf for name, leaf in self._others.items() if id(leaf) not in known}

    def _program(self, now: Now, params: Mapping[str, torch.Tensor], part: Part) -> StepProgram:
        """The program that fits, a new one if there is none."""
        identities = tuple(map(id, params.values()))
        scaler = self._recipe.scaler if now.scaling else None
        rules = None if scaler is None else scaler_rules(scaler)
        attributes = () if part == "gradients" else self._attributes_now(now.held)
        layout = (part, rules, identities, tuple(now.grads), tuple(now.held.layout), attributes)
        programs = self._programs.setdefault(layout, [])
        for program in programs:
            if program.fits(now):
                return program
        assert self._make is not None, "a step that runs as it is written has no programs"
        programs.append(StepProgram(self._recipe, params, self._make, part))
        return programs[-1]

    def _notice_what_varies(self) -> None:
        """Hyperparameters that were changed since the last call are inputs from now on."""
        now = hyperparameters(self._recipe.optimizers)
        for before, after in zip(self._hyperparameters, now, strict=False):
            varying = {key for key in before.keys() & after.keys() if before[key] != after[key]}
            if not varying <= self._varying:
                self._varying |= varying
                self._held = None
        self._hyperparameters = now

    def _made_so_far(self) -> list[Artifact]:
        programs = [program for found in self._programs.values() for program in found]
        return [artifact for program in programs for artifact in program.compiled.artifacts]

    def _decided(self) -> list[Kinds]:
        programs = [program for found in self._programs.values() for program in found]
        return [program.compiled.artifacts.kinds for program in programs]

    def reset(self) -> None:
        """Forget every artifact; the next call compiles again."""
        self._programs.clear()


def _reproducible(params: Mapping[str, torch.Tensor]) -> set[str]:
    """The parameters whose gradients `full_like` could have made: of their class, type and layout."""
    grads = {name: grad for name, param in params.items() if (grad := param.grad) is not None}
    return {name for name, grad in grads.items() if _are_alike(grad, params[name])}


def _are_alike(grad: torch.Tensor, param: torch.Tensor) -> bool:
    like = torch.empty_like(param.detach())
    placements = getattr(like, "placements", None)  # of a DTensor
    return (
        type(grad) is type(like)
        and (grad.dtype, grad.stride()) == (like.dtype, like.stride())
        and (getattr(grad, "placements", None) == placements)
    )


def _is_positive(value: Any, kind: type[int | float]) -> bool:
    return isinstance(value, int | kind) and not isinstance(value, bool) and value > 0


def _are_optimizers(given: Sequence[Any]) -> bool:
    each_once = len(set(map(id, given))) == len(given) > 0
    return each_once and all(isinstance(one, torch.optim.Optimizer) for one in given)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda given: isinstance(given, nn.Module), "pass a module"),
    "loss_fn": (callable, "pass a function that takes the model and the arguments of a step"),
    "optimizer": (
        lambda given: _are_optimizers(given if isinstance(given, list | tuple) else [given]),
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
"""What each argument has to be, and how to say so."""


def _check_kinds(recipe: Recipe, optimizer: Any) -> None:
    """Raise `BadSettings` for an argument that is something else than what it is called."""
    for name, (fits, fix) in _KINDS.items():
        given = optimizer if name == "optimizer" else getattr(recipe, name)
        if not fits(given):
            shown = repr(given)
            shown = shown if len(shown) <= _MOST_SHOWN else f"a {type(given).__name__}"
            raise BadSettings(f"{name} is {shown}", fix=fix)


def _check(recipe: Recipe) -> None:
    """Raise `BadSettings` for what no step can be made of."""
    for optimizer in recipe.optimizers:
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
    if _strangers(recipe):
        raise BadSettings(
            "the optimizer has parameters that are not the model's",
            fix="pass a module that holds all of them, and an optimizer that was made after it was sharded",
        )


def _strangers(recipe: Recipe) -> list[torch.Tensor]:
    """What the optimizer steps and the model does not have."""
    known = set(map(id, recipe.model.parameters()))
    return [param for param in recipe.params() if id(param) not in known]


def _warn_of_strangers(recipe: Recipe) -> None:
    """Warn, as eager would not, that a step trains other parameters than the model has by now."""
    number, name = len(_strangers(recipe)), type(recipe.model).__name__
    if number:
        warnings.warn(
            f"aotdist: {number} of the optimizer's {len(recipe.params())} parameters are not the {name}'s "
            "any more, and those in their place are not trained; make the optimizer, and the step, after "
            "`fully_shard`, `to_empty` and the like",
            stacklevel=5,
        )


def _refuse_hooks(optimizers: Sequence[torch.optim.Optimizer], params: Mapping[str, torch.Tensor]) -> None:
    """Raise for hooks, which would run while the step is traced, and then no more."""
    for optimizer in optimizers:
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
