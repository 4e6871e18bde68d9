"""AdamW over plain or sharded parameters, gradient clipping, and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aotdist.launch.config import OptimOptions


def build_optimizer(model: nn.Module, options: OptimOptions) -> torch.optim.AdamW:
    """AdamW that decays matrices and no vectors.

    The fused step matters for DTensors: one dispatch for all parameters instead of ten for each.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps, fused=True
    )


def learning_rate(step: int, options: OptimOptions) -> float:
    """The rate of a step, counted from 1: linear warm-up, then half a cosine that ends at the last step."""
    floor = options.lr * options.min_lr_ratio
    if step <= options.warmup_steps:
        return options.lr * step / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return floor + (options.lr - floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(model: nn.Module, clip_norm: float) -> Tensor:
    """Clip the norm of all gradients to `clip_norm` (0: do not) and return the norm before.

    Shapes: -> scalar, the same on every rank.
    """
    if clip_norm > 0:
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    else:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
