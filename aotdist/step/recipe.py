"""What a step consists of, and the step as it is written: what a compiled one has to repeat, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.dynamo import compiled_as_written
from aotdist.torch_seam.trees import pytree

Clip: TypeAlias = float | Callable[[Sequence[torch.Tensor]], Any]
"""A largest norm of all gradients, or what is called with the optimizer's parameters."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a step consists of; see `aotdist.train_step`."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    clip: Clip | None
    scaler: torch.amp.GradScaler | None
    accumulate: int

    def params(self) -> list[torch.Tensor]:
        """The parameters that the optimizer updates."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

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

    def do_clip(self) -> None:
        """Clip the gradients."""
        if callable(self.clip):
            self.clip(self.params())
        elif self.clip is not None:
            nn.utils.clip_grad_norm_(self.params(), self.clip)

    def as_written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, updates: bool) -> Any:
        """Run the step eagerly.

        Args:
            args: of `loss_fn`, behind the model.
            kwargs: likewise.
            updates: whether the optimizer has its turn, or gradients are only accumulated.
        """
        result = self.loss_fn(self.model, *args, **kwargs)
        loss = self.loss_of(result)
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
        if updates:
            with compiled_as_written():  # as in the steps that follow, and not compiled for this one alone
                self._update()
        return detached(result)

    def _update(self) -> None:
        if self.scaler is None:
            self.do_clip()
            self.optimizer.step()
        else:
            if self.clip is not None:
                self.scaler.unscale_(self.optimizer)
            self.do_clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()


def detached(result: Any) -> Any:
    """`result` with its tensors detached: there is no graph behind them."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
