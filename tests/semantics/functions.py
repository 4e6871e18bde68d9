"""Autograd functions whose backwards are not their forwards' derivatives, so that nobody can make them up."""

from typing import Any

import torch


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 7


class Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].t() * 7


class Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 5


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class Detached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 11


class Several(torch.autograd.Function):
    """Two views and a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.view_as(x), x.detach(), x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        alias, detached, scaled = grads
        return alias * 3 + detached * 5 + scaled


class WithConstant(torch.autograd.Function):
    """One of its outputs gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        constant = x > 0
        ctx.mark_non_differentiable(constant)
        return x * 1, constant

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 13


FUNCTIONS = (Scaled, Dirty, Transposed, Alias, Identity, Detached, Several, WithConstant)
