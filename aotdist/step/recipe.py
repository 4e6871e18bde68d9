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
"""A largest norm of all gradients, or what is called with the optimizers' parameters."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a step consists of; see `aotdist.train_step`."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizers: tuple[torch.optim.Optimizer, ...]
    clip: Clip | None
    scaler: torch.amp.GradScaler | None
    accumulate: int

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

    def do_clip(self, params: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Clip the gradients in the order of the model: a norm is another in the last bit in another order.

        Args:
            params: the model's, in its order; in a trace, the model itself holds others in their places.

        Returns:
            what clipping returned, if that is a tensor: the norm that the gradients had.
        """
        if self.clip is None:
            return None
        if callable(self.clip):
            at = {id(param): at for at, param in enumerate(params)}
            norm = self.clip(sorted(self.params(), key=lambda param: at[id(param)]))
        else:
            norm = nn.utils.clip_grad_norm_(params, self.clip)
        return norm.detach() if isinstance(norm, torch.Tensor) else None

    def as_written(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, updates: bool
    ) -> tuple[Any, torch.Tensor | None]:
        """Run the step eagerly.

        Args:
            args: of `loss_fn`, behind the model.
            kwargs: likewise.
            updates: whether the optimizers have their turn, or gradients are only accumulated.

        Returns:
            what `loss_fn` returned, detached, and the norm of the gradients; see `do_clip`.
        """
        result = self.loss_fn(self.model, *args, **kwargs)
        loss = self.loss_of(result)
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
        norm = self.update() if updates else None
        return detached(result), norm

    def update(self) -> torch.Tensor | None:
        """Clip, let the optimizers have their turn, and let the gradients go; the norm, see `do_clip`."""
        with compiled_as_written():  # as in the steps that are captured, and not compiled for this one alone
            return self._update()

    def _update(self) -> torch.Tensor | None:
        if self.scaler is not None and self.clip is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        norm = self.do_clip(list(self.model.parameters()))
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return norm


def detached(result: Any) -> Any:
    """`result` with its tensors detached: there is no graph behind them."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
