"""The step as a function of the batch and of everything that it reads and writes: what is traced."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from aotdist.api import AsWritten, CompiledFunction, Compiling
from aotdist.errors import UnsupportedProgram
from aotdist.joint import known
from aotdist.joint.scalars import Scalars
from aotdist.step.attributes import methods_of, unchanged
from aotdist.step.done import DTYPES, Done
from aotdist.step.gradients import Gradients, arguments_with_gradients
from aotdist.step.held import HeldState
from aotdist.step.recipe import Recipe, detached
from aotdist.step.scaling import Scaling
from aotdist.torch_seam.proxies import node_here
from aotdist.torch_seam.trees import pytree

Part: TypeAlias = Literal["whole", "gradients", "update"]
"""What of a step a program does: with `accumulate`, gradients and updates are programs of their own."""


@dataclass(frozen=True, slots=True)
class Now:
    """What a step finds at a call.

    Args:
        held: what the optimizer holds.
        grads: gradients that there are, by the name of their parameter.
        scaling: the scale, and what else the scaler holds, by name.
    """

    held: HeldState
    grads: Mapping[str, torch.Tensor]
    scaling: Mapping[str, torch.Tensor]
    numbers: Mapping[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        names = [
            (f"{place.path}.{at}", n) for place in self.held.numbers for at, n in enumerate(place.numbers())
        ]
        tensors = {name: torch.tensor(n, dtype=DTYPES[type(n)]) for name, n in names}
        object.__setattr__(self, "numbers", tensors)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that the step reads and that is no parameter."""
        held = {place.path: place.value for place in self.held.tensors}
        return {
            **held,
            **self.numbers,
            **{f"{name}.grad": grad for name, grad in self.grads.items()},
            **self.scaling,
        }

    def known_before(self) -> dict[str, torch.Tensor]:
        """The tensors whose numbers can be read before the step: they lie on the CPU."""
        plain = [place for place in self.held.tensors if type(place.value) is torch.Tensor]
        single = {place.path: place.value for place in plain if place.value.dim() == 0 and place.value.is_cpu}
        return {**self.numbers, **single}


class _StepFunction(CompiledFunction):
    """What is compiled for a step is no way to do one with values."""

    def _as_written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        raise AsWritten


class StepProgram:
    """A step, compiled for one layout of what the optimizer holds and one way to go.

    Args:
        recipe: what it consists of.
        params: the parameters, by name.
        make: compiles it.
        part: of the step.
    """

    def __init__(
        self, recipe: Recipe, params: Mapping[str, torch.Tensor], make: Compiling, part: Part
    ) -> None:
        self._recipe = recipe
        self._params = params
        self._of_model = list(recipe.model.parameters())
        self._part: Part = part
        self._now: Now | None = None
        self._asked: Callable[[Sequence[torch.Tensor]], bool] | None = None
        self._questions: list[Callable[[Sequence[torch.Tensor]], bool]] = []
        self.compiled = _StepFunction(
            _reaching(recipe, self._traced, part),
            lambda call, artifacts: make(replace(call, differentiates=True), artifacts),
        )

    def fits(self, now: Now) -> bool:
        """Whether the step would choose the same way as when it was traced."""
        numbers = list(now.known_before().values()) if self._questions else []
        return all(alike(numbers) for alike in self._questions)

    def __call__(self, now: Now, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Done:
        """Do the step, or its part.

        Args:
            now: what it finds.
            args: of `loss_fn`, behind the model.
            kwargs: likewise.

        Raises:
            AsWritten: the optimizer makes state, or the step was refused; nothing has been done.
            GivesGradients: there are others than `params` that get some; likewise.
        """
        self._now, self._asked = now, None
        try:
            done = self.compiled(*args, **kwargs, **now.tensors())
        finally:
            self._now = None
        if self._asked is not None:
            self._questions.append(self._asked)
        done.put(now.held)
        for name, grad in done.grads.items():
            self._params[name].grad = grad
        if done.given:
            arguments = _leaves(args, kwargs)
            for at, grad in done.given.items():
                known = arguments[at].grad
                arguments[at].grad = grad if known is None else known.add_(grad)
        return done

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Done:
        """The step, on stand-ins."""
        now, recipe = self._now, self._recipe
        assert now is not None, "a trace belongs to a call"
        given = {name: kwargs.pop(name) for name in now.tensors()}
        traced = dict(recipe.model.named_parameters())
        stand_ins = [traced.get(name, param) for name, param in self._params.items()]
        before = [given.get(f"{name}.grad") for name in self._params]
        scaling = Scaling(recipe.scaler) if now.scaling and recipe.scaler is not None else None
        gradients = Gradients(list(self._params.values()), stand_ins, before)
        done = Done()
        with now.held.put_back(), gradients:
            if self._part != "update":
                self._differentiate(gradients, scaling, done, args, kwargs)
            if self._part != "gradients":
                self._update(now, given, scaling, done)
                for param in recipe.params():
                    param.grad = None
        for name, grad, earlier in zip(self._params, gradients.now, before, strict=True):
            if grad is not None and grad is not earlier:
                done.grads[name] = grad
        return done

    def _differentiate(
        self,
        gradients: Gradients,
        scaling: Scaling | None,
        done: Done,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Run the model, and its backward.

        Args:
            gradients: of the parameters, which are added to.
            scaling: what the scaler does.
            done: where to note what `loss_fn` returned, and gradients of arguments.
            args: of `loss_fn`, behind the model.
            kwargs: likewise.
        """
        recipe, params = self._recipe, list(self._params.items())
        result = recipe.loss_fn(recipe.model, *args, **kwargs)
        loss = recipe.loss_of(result)
        arguments = _leaves(args, kwargs)
        positions = arguments_with_gradients(loss, [param for _, param in params], arguments)
        more = [arguments[at] for at in positions]
        found = gradients.backward(loss if scaling is None else scaling.scaled(loss), more)
        done.given = dict(zip(positions, found, strict=True))
        done.reached = tuple(params[at][0] for at in gradients.reached)
        done.result = detached(result)

    def _update(
        self, now: Now, given: Mapping[str, torch.Tensor], scaling: Scaling | None, done: Done
    ) -> None:
        """Let the optimizer have its turn.

        Args:
            now: what the step finds.
            given: stand-ins of its tensors, by name.
            scaling: what the scaler does.
            done: where to note what the optimizer assigns.
        """
        recipe, held = self._recipe, now.held
        known = now.known_before()
        scalars = Scalars([(given[name], real) for name, real in known.items()], node_here)
        with self._attributes_unchanged(held), scalars.followed():
            for place in held.numbers:
                place.put(*(given[f"{place.path}.{at}"].item() for at in range(len(place.numbers()))))
            put = [place.owner[place.key] for place in held.numbers]
            done.norm = self._step(held, scaling)
            if held.has_grown():
                raise AsWritten
            done.note(held, {id(place.value): given[place.path] for place in held.tensors}, put)
        if scaling is not None and (done.tensors or done.numbers):
            names = " or ".join(type(optimizer).__name__ for optimizer in recipe.optimizers)
            raise UnsupportedProgram(
                f"{names} counts in Python, or replaces its tensors, and its steps may be skipped (`scaler`)",
                stage="capture",
                fix="let it count in a tensor, and write its tensors in place",
            )
        self._asked = _chooses_alike(scalars)

    @contextlib.contextmanager
    def _attributes_unchanged(self, held: HeldState) -> Generator[None]:
        """Nothing but what `held` knows of is changed inside: that would only happen while it is traced.

        Raises:
            UnsupportedProgram: something is.
        """
        clip, apart = self._recipe.clip, held.all_containers()
        with contextlib.ExitStack() as stack:
            for optimizer in self._recipe.optimizers:
                refusal = functools.partial(_changes_itself, optimizer)
                stack.enter_context(unchanged(optimizer, refusal, apart, tensors=False))
            owner = clip.__self__ if isinstance(clip, types.MethodType) else clip
            if hasattr(owner, "__dict__") and not isinstance(owner, (types.FunctionType, nn.Module)):
                refusal = functools.partial(_clip_changes_itself, owner)
                stack.enter_context(unchanged(owner, refusal, apart, tensors=True))
            yield

    def _step(self, held: HeldState, scaling: Scaling | None) -> torch.Tensor | None:
        recipe = self._recipe
        if scaling is not None and recipe.clip is not None:
            for optimizer in recipe.optimizers:
                scaling.unscale(optimizer)
        norm = recipe.do_clip(self._of_model)
        written = [*recipe.params(), *(place.value for place in held.tensors)]
        for optimizer in recipe.optimizers:
            with contextlib.nullcontext() if scaling is None else scaling.stepping(optimizer, written):
                optimizer.step()
        if scaling is not None:
            scaling.update()
        return norm


def _reaching(
    recipe: Recipe, traced: Callable[[tuple[Any, ...], dict[str, Any]], Any], part: Part
) -> Callable[..., Any]:
    """A function that is looked through for what a step reaches: the model, what `loss_fn` closes over.

    What clips, and the optimizers, are no part of a step that only accumulates.
    """
    updates = part != "gradients"
    model, loss_fn = recipe.model, None if part == "update" else _function(recipe.loss_fn)
    clip = _function(recipe.clip) if updates else None
    # The optimizers' methods, as something callable.
    methods = [method for optimizer in recipe.optimizers for method in methods_of(optimizer)]
    optimizer = functools.partial(traced, *methods) if updates else None

    def train_step(*args: Any, **kwargs: Any) -> Any:
        _ = model, loss_fn, clip, optimizer
        return traced(args, kwargs)

    return train_step


def _leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """What is in arguments, in an order that holds for all calls."""
    return pytree.tree_leaves((args, sorted(kwargs.items())))


def _function(value: Any) -> Any:
    """What is called when `value` is."""
    known = (types.FunctionType, types.MethodType, functools.partial, nn.Module)
    return value.__call__ if callable(value) and not isinstance(value, known) else value


def _changes_itself(optimizer: torch.optim.Optimizer, path: str) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"the step of {type(optimizer).__name__} changes its attribute `{path}`",
        stage="capture",
        fix="let it keep what changes in `state` or in `param_groups`",
    )


def _clip_changes_itself(clip: Any, path: str) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"`clip`, a {type(clip).__name__}, changes its attribute `{path}`",
        stage="capture",
        fix="let it keep what changes in tensors, or change it between steps",
    )


def _chooses_alike(scalars: Scalars) -> Callable[[Sequence[torch.Tensor]], bool] | None:
    """Whether a call would choose its way as a trace did; None if that asked no number.

    It is told by the tensors of the call whose numbers are there before it.
    """
    if not scalars.asked:
        return None
    ask = known.as_function(tuple(node for node, _ in scalars.asked), list(scalars.values), scalars.root)
    answers = tuple(holds for _, holds in scalars.asked)
    return lambda given: tuple(map(bool, ask(*given))) == answers
