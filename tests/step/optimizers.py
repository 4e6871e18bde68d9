"""Optimizers as people write their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Shampoo(torch.optim.Optimizer):
    """A preconditioner for each dimension; their roots are computed every third step (Gupta et al., 2018).

    The step is counted by a Python number, and preconditioners are lists in the state.
    """

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, every: int = 3) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["momentum"] = grad.clone()
            state["statistics"] = [1e-4 * torch.eye(size) for size in grad.shape]
            state["roots"] = [torch.eye(size) for size in grad.shape]
        state["momentum"].mul_(group["momentum"]).add_(grad)
        update = state["momentum"]
        for dim, statistic in enumerate(state["statistics"]):
            rows = grad.movedim(dim, 0).reshape(grad.size(dim), -1)
            statistic.add_(rows @ rows.T)
            if state["step"] % group["every"] == 0:
                values, vectors = torch.linalg.eigh(statistic)
                power = -1 / (2 * grad.dim())
                state["roots"][dim] = vectors @ torch.diag(values.clamp_min(1e-6) ** power) @ vectors.T
            update = torch.tensordot(update, state["roots"][dim], dims=([0], [0]))
        state["step"] += 1
        param.add_(update, alpha=-group["lr"] / (1 + 0.1 * state["step"]))


class Counting(torch.optim.Optimizer):
    """Counts steps in its groups, as optimizers do that are free of schedules."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / max(1, group["k"] - 2) ** 0.5)


class OneByOne(torch.optim.Optimizer):
    """Updates one parameter after the other, each by a method of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group["lr"])

    def update(self, param: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        raise NotImplementedError


class Fixed(torch.optim.Optimizer):
    """Has no rate, nor other hyperparameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.1)


class KeepingGradients(OneByOne):
    """Replaces a tensor of its state at each step, instead of writing it."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        before = self.state[param].get("before", torch.zeros_like(param))
        param.sub_(grad + 0.5 * before, alpha=lr)
        self.state[param]["before"] = grad.clone()


class CountingOutside(Counting):
    """Counts steps in an attribute."""

    num_steps = 0

    def step(self, closure: None = None) -> None:
        self.num_steps += 1
        super().step()


class CountingAside(torch.optim.Optimizer):
    """Counts steps in what hangs on an attribute.

    Args:
        params: what is trained.
        counter: the attribute.
        count: how it counts; returns the number of steps.
    """

    def __init__(self, params: Any, counter: Any, count: Callable[[Any], int]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.counter, self._count = counter, count

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        num_steps = self._count(self.counter)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / num_steps)


class Choosing(OneByOne):
    """Does nothing where the gradient is small: it reads that it is."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        if grad.norm().item() > 1e-3:
            param.sub_(grad, alpha=lr)


class Skipping(OneByOne):
    """Multiplies gradients by whether all of them are finite."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        param.sub_(grad * grad.isfinite().all().item(), alpha=lr)


strength = 1.0
"""A global variable by which `Adjustable` scales its updates."""


class Adjustable(torch.optim.Optimizer):
    """Scales its updates by what it has in attributes."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.factor = 1.0
        self.by_kind = {"matrix": 1.0, "vector": torch.tensor(0.5)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group["lr"])

    def _update(self, param: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        of_kind = self.by_kind["matrix" if param.dim() == 2 else "vector"]
        param.sub_(grad * of_kind, alpha=lr * self.factor * self.defaults["lr"] * strength)
