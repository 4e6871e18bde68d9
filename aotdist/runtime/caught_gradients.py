"""Where the gradient of a view in the caller's hands meets those that the program has for the view.

The caller's view is made outside of the node, so its gradient would come in through the view's base, added up
apart from what the program itself sends the view. Eager adds all of them at the view, and what comes of the
sum to what else uses the base: where the view repeats elements (`expand`), or others use the base, the last
bit tells. So, unless somebody watches, the view's gradient is caught before its node, and goes into the
program at the view's place there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from aotdist.torch_seam.autograd import backward_task


@dataclass(slots=True)
class CaughtGradients:
    """The gradients of one call's views that were caught, by position of the waypoint.

    Args:
        task: the backward that they are caught in; None while they are let through.
        caught: those of that backward.
    """

    task: int | None = None
    caught: dict[int, torch.Tensor] = field(default_factory=dict)

    def open(self) -> None:
        """Catch gradients from now on, in the running backward."""
        if self.task != backward_task():
            self.task, self.caught = backward_task(), {}

    def has_caught(self) -> bool:
        """Whether there are any of the running backward."""
        return bool(self.caught) and self.task == backward_task()

    def close(self) -> Mapping[int, torch.Tensor]:
        """Catch no more; what was caught in the running backward."""
        caught = self.caught if self.has_caught() else {}
        self.task, self.caught = None, {}
        return caught

    def hold(self, view: torch.Tensor, position: int, kind: type[torch.Tensor]) -> None:
        """Catch gradients of `view`, of one kind, while open."""
        assert view.grad_fn is not None, "a waypoint has a history"
        number = view.output_nr

        def catch(grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...] | None:
            grad = grads[number]
            if grad is None or type(grad) is not kind or self.task != backward_task():
                return None
            self.caught[position] = grad
            return (*grads[:number], None, *grads[number + 1 :])

        view.grad_fn.register_prehook(catch)
