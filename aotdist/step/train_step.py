"""`aotdist.train_step`: a whole training step, forward to optimizer, as one graph without autograd."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from aotdist.codegen.backend import Compiler, is_eager
from aotdist.codegen.contract import Backend
from aotdist.compiled import runs_eagerly
from aotdist.compiling import Compiling, compiling
from aotdist.errors import BadSettings
from aotdist.origins import short_tracebacks
from aotdist.report.explain import Explained
from aotdist.runtime.artifact import Artifact
from aotdist.runtime.kinds import Kinds
from aotdist.runtime.ranks import present
from aotdist.settings import Settings
from aotdist.step.recipe import Clip, Recipe
from aotdist.step.whole import WholeStep
from aotdist.subclasses.protocol import communicates_around
from aotdist.torch_seam.dynamo import compiled_as_written

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
        self._eager = [functools.partial(_as_written, part) for part in recipe.parts()]
        self._parts = [WholeStep(part, make) for part in recipe.parts()] if make is not None else []
        self.grad_norm: torch.Tensor | None = None
        self._fillable: list[torch.Tensor] = []
        self._has_stepped = False
        self._accumulated = 0

    @short_tracebacks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Do a step; returns what `loss_fn` returned, detached.

        Args:
            args: of `loss_fn`, behind the model.
            kwargs: likewise.
        """
        if self._make is None or runs_eagerly():
            return self._counted(self._eager, args, kwargs)
        if not self._has_stepped and self._accumulated == 0:
            self._make.agree_on_state(self._recipe.model)
        return self._counted(self._parts, args, kwargs)

    def as_written(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same step eagerly: to compare with, or to step through.

        Args:
            args: of `loss_fn`, behind the model.
            kwargs: likewise.
        """
        return self._counted(self._eager, args, kwargs)

    def _counted(
        self, parts: Sequence[Callable[..., Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        whole, gradients, update = parts
        updates = self._accumulated + 1 >= self._recipe.accumulate
        if updates and not self._has_stepped:
            _warn_of_strangers(self._recipe)
        self._recipe.note_order()
        with torch.enable_grad():
            if self._recipe.accumulate == 1:
                result, self.grad_norm = whole(args, kwargs)
            else:
                with _filled(self._fillable):
                    result = gradients(args, kwargs)
                self._fillable = [p for p in self._recipe.params() if _is_alike(p)]
                if updates:
                    self.grad_norm = update((), {})
        self._accumulated = 0 if updates else self._accumulated + 1
        self._has_stepped |= updates
        return result

    def _made_so_far(self) -> list[Artifact]:
        return [artifact for part in self._parts for artifact in part.artifacts()]

    def _decided(self) -> list[Kinds]:
        return [kinds for part in self._parts for kinds in part.decided()]

    def reset(self) -> None:
        """Forget every artifact; the next call compiles again."""
        for part in self._parts:
            part.reset()


def _as_written(part: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with compiled_as_written():  # as in the steps that are captured, and not compiled for this one alone
        return part(*args, **kwargs)


@contextmanager
def _filled(params: Iterable[torch.Tensor]) -> Generator[None]:
    """A gradient that is not there yet is -0.0 inside: so all calls that add to gradients are of one kind.

    Whatever is added to -0.0 is what it was, to the bit; 0.0 would make 0.0 of a -0.0.
    """
    bare = [param for param in params if param.grad is None]
    filled = [(param, torch.full_like(param, -0.0, requires_grad=False)) for param in bare]
    for param, grad in filled:
        param.grad = grad
    try:
        yield
    finally:
        for param, grad in filled:
            if param.grad is grad and grad._version == 0:
                param.grad = None


def _is_alike(param: torch.Tensor) -> bool:
    """Whether `full_like` could have made its gradient: of the class, type and layout of the parameter."""
    grad, like = param.grad, torch.empty_like(param.detach())
    return (
        grad is not None
        and type(grad) is type(like)
        and (grad.dtype, grad.stride()) == (like.dtype, like.stride())
        and getattr(grad, "placements", None) == getattr(like, "placements", None)  # of a DTensor
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


def _behind_the_model(loss_fn: Callable[..., Any]) -> inspect.Signature:
    """What a step takes: what `loss_fn` takes besides the model."""
    try:
        first, *others = inspect.signature(loss_fn).parameters.values()
    except ValueError:  # it says nothing of it, or takes nothing
        first, others = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL), []
    takes_any = first.kind is inspect.Parameter.VAR_POSITIONAL
    return inspect.Signature([first, *others] if takes_any else others)
