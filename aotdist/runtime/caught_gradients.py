"""Gradients of returned views, added where eager adds them: at the view, inside of the program.

A view that the program returns is made outside of the autograd node, so autograd would hand the node the
gradient of the view's base, and what the program itself computes with the view would be added to that. Eager
adds all gradients of the view first, and takes the sum to the base: where the view repeats elements
(`expand`), or the base has other uses, the two orders differ in the last bit. So, unless hooks or the like
observe it, the view's gradient is caught before it reaches the view's own node, and goes into the program at
the place of the view there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from aotdist.torch_seam.autograd import backward_task


@dataclass(slots=True)
class CaughtGradients:
    """The gradients of one call's views that were caught.

    Args:
        task: the id of the backward in which they are caught; None while they are let through.
        caught: the gradients of that backward, by position of the waypoint.
    """

    task: int | None = None
    caught: dict[int, torch.Tensor] = field(default_factory=dict)

    def open(self) -> None:
        """Catch gradients from now on, in the running backward."""
        if self.task != backward_task():
            self.task, self.caught = backward_task(), {}

    def has_caught(self) -> bool:
        """Whether gradients were caught in the running backward."""
        return bool(self.caught) and self.task == backward_task()

    def close(self) -> Mapping[int, torch.Tensor]:
        """Catch no more.

        Returns:
            what was caught in the running backward.
        """
        caught = self.caught if self.has_caught() else {}
        self.task, self.caught = None, {}
        return caught

    def hold(self, view: torch.Tensor, position: int, kind: type[torch.Tensor]) -> None:
        """Catch gradients of `view` that are of class `kind`, while open; by a hook before its node."""
        assert view.grad_fn is not None, "a waypoint has a history"
        number = view.output_nr

        def catch(grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...] | None:
            grad = grads[number]
            if grad is None or type(grad) is not kind or self.task != backward_task():
                return None
            self.caught[position] = grad
            return (*grads[:number], None, *grads[number + 1 :])

        view.grad_fn.register_prehook(catch)
