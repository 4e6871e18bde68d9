"""Steps of optimizers, gradient scalers and learning-rate schedules in a traced training step.

In eager a `GradScaler` reads whether a gradient overflowed, and then skips the optimizer's step. Here the
step is always computed, and if a gradient has overflowed, `torch.where` selects the values of before.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import lr_scheduler

from aotdist.capture.constants import is_constant
from aotdist.errors import PassesPrograms
from aotdist.step.held import HeldItem, HeldState
from aotdist.torch_seam.optimizers import (
    has_scaled,
    intercept_schedules,
    intercept_steps,
    scaler_rules,
    scaler_state,
    takes_scale,
)
from aotdist.torch_seam.patches import replaced_here
from aotdist.torch_seam.trees import pytree
from aotdist.trace.failures import refusal
from aotdist.trace.numbers.scalars import Scalars, TracedFloat
from aotdist.trace.stand_ins import current_inputs


class Scaling:
    """What one enabled scaler does in a traced step.

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
        found = (grad for param in params if (grad := param.grad) is not None)
        grads = [grad._values() if grad.is_sparse else grad for grad in found]
        found_inf = torch.full((), 0.0, dtype=torch.float32, device=self._scale.device)
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            of_dtype = [grad for grad in grads if grad.dtype == dtype]
            torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(of_dtype, found_inf, factor)
        self._found_inf[optimizer] = found_inf

    @contextlib.contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer, written: Sequence[torch.Tensor]) -> Generator[None]:
        """A context for the optimizer's step; what that wrote is undone if one of its gradients overflowed.

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
        """Update the scale: it shrinks if a gradient of any optimizer overflowed."""
        found_inf = functools.reduce(torch.add, self._found_inf.values())
        torch.ops.aten._amp_update_scale_(
            self._scale, self._growth_tracker, found_inf, *scaler_rules(self._scaler)
        )


class MakesState(PassesPrograms):
    """Raised where an optimizer or a scaler creates state: this call has to run eagerly.

    Args:
        optimizer: the optimizer, if it was not known before.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.optimizer = optimizer


class ReadsAhead(PassesPrograms):
    """Raised where a step reads what a schedule sets, which can be computed before the call.

    Args:
        schedules: the schedules that have stepped so far, in order.
    """

    def __init__(self, schedules: Sequence[Any]) -> None:
        super().__init__()
        self.schedules = schedules


class _Outdated(TracedFloat):
    """A placeholder for a number that a schedule sets after the call; reading it in the trace raises.

    Args:
        ahead: the error to raise where it is read, if the number can be computed before the call.
    """

    def __init__(self, ahead: ReadsAhead | None) -> None:
        self._ahead = ahead

    @property
    def made_by(self) -> Any:  # type: ignore[override]
        """The node of the number: whatever reads the number asks for it."""
        raise self._ahead or refusal(
            "the epoch of a schedule is read after its step, or a learning rate that depends on what the "
            "compiled step computes: schedules step when that has run",
            fix="let the schedule step last, once in a call, or outside",
        )

    def refusal(self) -> Any:
        """The error for code that asks for its value."""
        return self.made_by

    def __getattr__(self, name: str) -> Any:
        return self.made_by  # of a learning rate that is a tensor

    node = scalars = made_by  # type: ignore[assignment]


def steps_ahead(schedules: Sequence[Any], held: HeldState) -> list[list[HeldItem]]:
    """The hyperparameters after each step of schedules, computed by copies of these.

    Args:
        schedules: the schedules in the order in which they step.
        held: what the optimizers hold before.

    Returns:
        the values after each step; up to the first one that fails, writes a tensor, or changes a constant of
        the program.
    """
    found, copies = list[list[HeldItem]](), dict[int, Any]()
    places = {(id(place.owner), place.key): place for place in held.numbers}
    for at, schedule in enumerate(schedules):
        optimizer = schedule.optimizer
        if id(optimizer) not in copies:
            copied = copies[id(optimizer)] = types.SimpleNamespace(**vars(optimizer))
            copied.param_groups = [dict(group) for group in optimizer.param_groups]
        if id(schedule) not in copies:
            copies[id(schedule)] = copy.deepcopy(schedule, {id(optimizer): copies[id(optimizer)]})
        try:
            copies[id(schedule)].step()
        except Exception:  # it has come to its end; the step itself will say so
            break
        items = list[HeldItem]()
        for group, after in zip(optimizer.param_groups, copies[id(optimizer)].param_groups, strict=True):
            for key, value in after.items():
                if (place := places.get((id(group), key))) is not None:
                    items.append(replace(place, path=f"schedules[{at}].{place.path}", value=value))
                elif isinstance(value, torch.Tensor) or (is_constant(value) and value != group[key]):
                    return found
        found.append(items)
    return found


class TracedSteps:
    """Intercepts the steps of optimizers, scalers and schedules while a step is traced.

    Args:
        optimizers: the known ones, whose state is passed to the program.
        scalars: the numbers that they hold.
        written: what each optimizer's step may write.
        ahead: for each of the first steps of schedules, the hyperparameters that it sets, as traced numbers.
        asked: the schedules of these steps.

    Attributes:
        stepped: the optimizers that stepped, in order.
        schedules: those whose `step` is to be called after the call: they compute in Python, outside of the
            graph.
        later: the arguments of these calls, positional and by keyword; tensors in them are graph outputs.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        scalars: Scalars,
        written: Callable[[torch.optim.Optimizer], Sequence[torch.Tensor]],
        ahead: Sequence[Sequence[tuple[HeldItem, Sequence[Any]]]],
        asked: Sequence[Any],
    ) -> None:
        self._optimizers = optimizers
        self._scalars = scalars
        self._written = written
        self._ahead, self._asked = ahead, asked
        self._rates, self._are_known = dict[int, Any](), True
        self._scaling: dict[torch.amp.GradScaler, Scaling] = {}
        self._outdated = contextlib.ExitStack()
        self.stepped: list[torch.optim.Optimizer] = []
        self.schedules = list[Any]()
        self.later = list[tuple[tuple[Any, ...], Mapping[str, Any]]]()

    @contextlib.contextmanager
    def intercepted(self) -> Generator[None]:
        """The context in which a step is traced."""
        scaler = torch.amp.GradScaler
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._rates = {id(group): group.get("lr") for group in groups}
        with contextlib.ExitStack() as stack, self._outdated:
            stack.enter_context(intercept_steps(self._before, self._after))
            for name, instead in {
                "scale": self._scale,
                "unscale_": self._unscale,
                "step": self._step,
                "update": self._update,
            }.items():
                stack.enter_context(replaced_here(scaler, name, _where_enabled(instead)))
            for own in scaler.__subclasses__():
                if "scale" in vars(own) and own.__module__.startswith("torch."):
                    stack.enter_context(replaced_here(own, "scale", _where_enabled(_refuse_scaler)))
            stack.enter_context(intercept_schedules(self._schedule))
            stack.enter_context(replaced_here(lr_scheduler.LRScheduler, "get_last_lr", self._last_rates))
            yield
            if self.schedules and not self._are_by_schedules(groups):
                raise refusal(
                    "a learning rate is assigned after a schedule's step, which is done when the compiled "
                    "step has run",
                    fix="assign it before, or outside",
                )

    def scalers(self) -> list[torch.amp.GradScaler]:
        """The scalers that were used."""
        return list(self._scaling)

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(optimizer is known for known in self._optimizers):
            _refuse_made_inside(optimizer)
            raise MakesState(optimizer)
        self._scalars.reads = True

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        self._scalars.reads = False
        self.stepped.append(optimizer)

    def _of(self, scaler: torch.amp.GradScaler) -> Scaling:
        if not has_scaled(scaler):
            raise MakesState
        return self._scaling.setdefault(scaler, Scaling(scaler))

    def _scale(self, scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self._of(scaler).scaled, outputs)

    def _unscale(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        self._of(scaler).unscale(optimizer)

    def _step(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        with self._of(scaler).stepping(optimizer, self._written(optimizer)):
            return optimizer.step(*args, **kwargs)

    def _update(self, scaler: torch.amp.GradScaler, new_scale: Any = None) -> None:
        if new_scale is not None:
            raise refusal("a scaler is given a new scale inside of a compiled step", fix="do it outside")
        self._of(scaler).update()

    def _schedule(self, original: Callable[..., None], schedule: Any, *args: Any, **kwargs: Any) -> None:
        groups = schedule.optimizer.param_groups
        self._are_known &= self._are_by_schedules(groups) and not (args or kwargs)
        self.schedules.append(schedule)
        # A loss is given with its history, which is gone after `backward()`.
        self.later.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs)))
        number = len(self.schedules)
        is_asked = len(self._asked) >= number and all(map(operator.is_, self.schedules, self._asked))
        if self._are_known and is_asked and len(self._ahead) >= number:
            changed = list(self._ahead[number - 1])
        else:
            ahead = ReadsAhead([*self.schedules]) if self._are_known and not is_asked else None
            outdated = [_Outdated(ahead)]
            changed = [(HeldItem("lr", group, "lr", None), outdated) for group in groups]
        if "last_epoch" in vars(schedule):
            changed.append((HeldItem("last_epoch", vars(schedule), "last_epoch", None), [_Outdated(None)]))
        for place, values in changed:
            self._outdated.callback(operator.setitem, place.owner, place.key, place.owner[place.key])
            place.put(*values)
        self._rates |= {id(group): group["lr"] for group in groups}

    def _are_by_schedules(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether only schedules have assigned learning rates since the call began."""
        return all(group.get("lr") is self._rates.get(id(group)) for group in groups)

    def _last_rates(self, original: Callable[..., Any], schedule: lr_scheduler.LRScheduler) -> list[Any]:
        return [group["lr"] for group in schedule.optimizer.param_groups]


def _where_enabled(instead: Callable[..., Any]) -> Callable[..., Any]:
    """`instead` for scalers that are enabled, the original method for the others."""

    def chosen(original: Callable[..., Any], scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        return (instead if scaler.is_enabled() else original)(scaler, *args, **kwargs)

    return chosen


def _refuse_scaler(scaler: torch.amp.GradScaler, outputs: Any) -> None:
    """Refuse a scaler of PyTorch's that does by itself what ours replaces."""
    raise refusal(
        f"a {type(scaler).__name__}, which is FSDP1's, scales inside of a compiled step",
        fix="use `torch.amp.GradScaler`: with FSDP2 all ranks see which gradients overflowed",
    )


def _refuse_made_inside(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that was made inside of the step: its parameters are tensors of the trace."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(current_inputs().index_of(param) is not None for param in params):
        raise refusal(
            f"{type(optimizer).__name__} is made inside of a compiled step, and would be made at each call",
            fix="make it once, outside",
        )
