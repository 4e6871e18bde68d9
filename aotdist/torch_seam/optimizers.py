"""What optimizers and gradient scalers keep to themselves."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from aotdist.torch_seam.patches import all_replaced_here


def method_of_schedule(target: Any) -> str | None:
    """The name, as `StepLR.step`, of what is the method of a schedule; None of anything else."""
    if not isinstance(owner := getattr(target, "__self__", None), lr_scheduler.LRScheduler):
        return None
    return f"{type(owner).__name__}.{target.__name__}"


def scaler_state(scaler: torch.amp.GradScaler) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale, and how many steps in a row did not overflow."""
    assert scaler._scale is not None and scaler._growth_tracker is not None, "the scaler has scaled a loss"
    return scaler._scale, scaler._growth_tracker


def has_scaled(scaler: torch.amp.GradScaler) -> bool:
    """Whether a scaler has scaled a loss: its tensors are made then."""
    return scaler._scale is not None


def scaler_rules(scaler: torch.amp.GradScaler) -> tuple[float, float, int]:
    """By what a scale grows and shrinks, and after how many steps it grows."""
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


def takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer unscales gradients, and skips steps, by itself."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step has hooks, its own or of all, besides those of `intercept_steps`."""
    of_all = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or any(not isinstance(hook, _ThreadHook) for hook in of_all)
    )


class _ThreadHook:
    """A hook that is called for optimizers that step in the thread that made it."""

    def __init__(self, call: Callable[[torch.optim.Optimizer], None]) -> None:
        self._call, self._thread = call, threading.get_ident()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            self._call(optimizer)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let learning-rate schedulers know that a step was done: they warn where none was."""
    optimizer._opt_called = True


@contextmanager
def intercept_steps(
    before: Callable[[torch.optim.Optimizer], None], after: Callable[[torch.optim.Optimizer], None]
) -> Generator[None]:
    """In this context and thread, `before` and `after` are called around each optimizer's step.

    Args:
        before: called with the optimizer.
        after: likewise, if its step did not fail.
    """
    with (
        register_optimizer_step_pre_hook(_ThreadHook(before)),
        register_optimizer_step_post_hook(_ThreadHook(after)),
    ):
        yield


def intercept_schedules(step: Callable[..., None]) -> AbstractContextManager[None]:
    """In this context and thread, `step` is called instead of the steps of learning-rate schedules.

    Args:
        step: called with the method, the schedule, and its arguments.
    """
    schedules = _classes_with_steps(lr_scheduler.LRScheduler)
    return all_replaced_here(*((schedule, "step", step) for schedule in schedules))


def _classes_with_steps(schedule: type) -> set[type]:
    """Those of a class of schedules and its subclasses, users' too, that define `step`."""
    found = set[type]().union(*map(_classes_with_steps, schedule.__subclasses__()))
    return found | {schedule} if "step" in vars(schedule) else found
