"""What a `GradScaler` does in a step, as tensors: whether the optimizer has its turn is decided by selecting.

In eager it reads whether a gradient overflowed, and leaves the optimizer's step out. Here the step is always
computed, and what it wrote is taken back where a gradient had.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Sequence

import torch

from aotdist.torch_seam.optimizers import scaler_rules, scaler_state, takes_scale


class Scaling:
    """One traced step of a scaler that is enabled and has a scale.

    Args:
        scaler: the scaler.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._scale, self._growth_tracker = scaler_state(scaler)
        self._found_inf: dict[torch.optim.Optimizer, torch.Tensor] = {}

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, scaled."""
        return loss * self._scale

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimizer in place, and note whether one overflowed."""
        self._check(optimizer, self._scale.double().reciprocal().float())

    def _check(self, optimizer: torch.optim.Optimizer, factor: torch.Tensor) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [grad for param in params if (grad := param.grad) is not None]
        found_inf = torch.full((), 0.0, dtype=torch.float32, device=self._scale.device)
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            alike = [grad for grad in grads if grad.dtype == dtype]
            torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(alike, found_inf, factor)
        self._found_inf[optimizer] = found_inf

    @contextlib.contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer, written: Sequence[torch.Tensor]) -> Generator[None]:
        """The optimizer's step runs inside; it has not happened if a gradient of its overflowed.

        Args:
            optimizer: the optimizer.
            written: what its step may write.
        """
        if takes_scale(optimizer):
            unscaled = optimizer in self._found_inf
            if not unscaled:
                self._check(optimizer, torch.full((), 1.0, dtype=torch.float32, device=self._scale.device))
            scale = None if unscaled else self._scale
            optimizer.grad_scale, optimizer.found_inf = scale, self._found_inf[optimizer]  # type: ignore[attr-defined]
            try:
                yield
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            return
        if optimizer not in self._found_inf:
            self.unscale(optimizer)
        before = [tensor.detach().clone() for tensor in written]
        yield
        skipped = self._found_inf[optimizer].bool()
        with torch.no_grad():
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(torch.where(skipped, value, tensor))

    def update(self) -> None:
        """Let the scale shrink, if a gradient of any optimizer overflowed, or grow."""
        found_inf = functools.reduce(torch.add, self._found_inf.values())
        torch.ops.aten._amp_update_scale_(
            self._scale, self._growth_tracker, found_inf, *scaler_rules(self._scaler)
        )
