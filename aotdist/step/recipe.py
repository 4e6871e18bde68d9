"""What a step consists of, and the step as it is written: what a compiled one has to repeat, bit for bit."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.trees import pytree
from aotdist.trace.numbers.scalars import numbers_read

Clip: TypeAlias = float | Callable[[Sequence[torch.Tensor]], Any]
"""A largest norm of all gradients, or what is called with the optimizers' parameters."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a step consists of; see `aotdist.train_step`.

    Attributes:
        order: where in the model its parameters are, by identity.
    """

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizers: tuple[torch.optim.Optimizer, ...]
    clip: Clip | None
    scaler: torch.amp.GradScaler | None
    accumulate: int
    order: dict[int, int] = field(default_factory=dict[int, int])

    def params(self) -> list[torch.Tensor]:
        """The parameters that the optimizers update."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [param for group in groups for param in group["params"]]

    def loss_of(self, result: Any) -> torch.Tensor:
        """What is differentiated, in what `loss_fn` returned.

        Raises:
            UnsupportedProgram: it returned no loss.
        """
        match result:
            case Mapping():
                loss: Any = result.get("loss")
            case tuple() | list():
                loss = result[0] if result else None
            case _:
                loss = result
        if not isinstance(loss, torch.Tensor):
            raise UnsupportedProgram(
                f"`loss_fn` returned a {type(result).__name__} without a loss",
                stage="capture",
                fix="return the loss, a tuple that begins with it, or a dictionary that has it as `loss`",
            )
        return loss / self.accumulate if self.accumulate > 1 else loss

    def differentiate(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model and its backward; returns what `loss_fn` returned, detached."""
        result = self.loss_fn(self.model, *args, **kwargs)
        loss = self.loss_of(result)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return detached(result)

    def update(self) -> torch.Tensor | None:
        """Clip, let the optimizers have their turn, and let the gradients go; the norm, see `_clipped`."""
        scaler = self.scaler
        if scaler is not None and self.clip is not None:
            for optimizer in self.optimizers:
                scaler.unscale_(optimizer)
        norm = self._clipped()
        for optimizer in self.optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return norm

    def _clipped(self) -> torch.Tensor | None:
        """What clipping returned, if that is a tensor: the norm that the gradients had.

        They are clipped in the order of the model: a norm is another in the last bit in another order.
        """
        if self.clip is None:
            return None
        if callable(self.clip):
            with numbers_read():
                norm = self.clip(sorted(self.params(), key=lambda param: self.order[id(param)]))
        else:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return norm.detach() if isinstance(norm, torch.Tensor) else None

    def note_order(self) -> None:
        """Note where in the model each parameter is: while a step is traced, the model holds others."""
        if callable(self.clip):
            self.order.clear()
            self.order.update({id(param): at for at, param in enumerate(self.model.parameters())})

    def parts(self) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """The step, its gradients and its update, as functions whose cells have what they reach."""
        model, loss_fn, clip = self.model, _function(self.loss_fn), _function(self.clip)

        def train_step(*args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
            _ = model, loss_fn, clip
            return self.differentiate(args, kwargs), self.update()

        def gradients(*args: Any, **kwargs: Any) -> Any:
            _ = model, loss_fn
            return self.differentiate(args, kwargs)

        def update() -> torch.Tensor | None:
            _ = model, clip
            return self.update()

        return train_step, gradients, update


def _function(value: Any) -> Any:
    """What is called when `value` is."""
    known = (types.FunctionType, types.MethodType, functools.partial, nn.Module)
    return value.__call__ if callable(value) and not isinstance(value, known) else value


def detached(result: Any) -> Any:
    """`result` with its tensors detached: there is no graph behind them."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
