"""Single kernels: programs of a few operators whose time is that of the memory which they must touch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.compilers import Way

Direction = Literal["forward", "backward", "both"]
"""What is timed of a program: itself, its gradients alone, or both together."""

ByHand: TypeAlias = Mapping[Way, Callable[[], Callable[..., Any]]]

_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the tensors are.

    Args:
        rows: of activations.
        columns: of activations.
        vocab: classes of the cross-entropy.
        parameters: that AdamW updates.
    """

    rows: int = 8192
    columns: int = 8192
    vocab: int = 32_000
    parameters: int = 2**26


SMALL = Sizes(rows=8, columns=32, vocab=48, parameters=256)


@dataclass(frozen=True, slots=True)
class Operator:
    """A program of one kernel, or of as few as can be.

    Args:
        name: as the tables show it.
        program: of tensors.
        inputs: makes them, on the device that is current; all the floating-point ones get gradients
            where gradients are timed.
        direction: what is timed.
        moves: the least bytes that it reads and writes, as a multiple of those of its first input.
        writes: whether it changes its inputs, and returns nothing.
        by_hand: kernels that others wrote for it; imported when they are made.
    """

    name: str
    program: Callable[..., Any]
    inputs: Callable[[Sizes], Sequence[Tensor]]
    direction: Direction = "forward"
    moves: float = 1
    writes: bool = False
    by_hand: ByHand = field(default_factory=dict[Way, Callable[[], Callable[..., Any]]])


def gated(x: Tensor, y: Tensor) -> Tensor:
    """Shapes: (rows, columns), (rows, columns) -> (rows, columns)."""
    return F.gelu(x, approximate="tanh") * y


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Shapes: (rows, columns), (columns,) -> (rows, columns)."""
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Shapes: (rows, columns), (columns,), (columns,) -> (rows, columns)."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-6)


def softmax(x: Tensor) -> Tensor:
    """Shapes: (rows, columns) -> (rows, columns)."""
    return x.softmax(-1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Shapes: (rows, vocab), (rows,) -> ()."""
    return F.cross_entropy(logits, targets)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 with a scale for each row. Shapes: (rows, columns) -> (rows, columns), (rows, 1)."""
    scale = _LARGEST / x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
    return (x * scale).clamp(-_LARGEST, _LARGEST).to(_FLOAT8), scale


def quantise_both_ways(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 with one scale that is known, and its transpose: what a linear layer multiplies twice.

    Shapes: (rows, columns) -> (rows, columns), (columns, rows).
    """
    quantised = x.clamp(-_LARGEST, _LARGEST).to(_FLOAT8)
    return quantised, quantised.t().contiguous()


def adamw(parameter: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> None:
    """A step of AdamW, the hundredth, in place. Shapes: four times (parameters,)."""
    parameter.mul_(1 - _RATE * _DECAY)
    mean.lerp_(grad, 1 - _BETA1)
    square.mul_(_BETA2).addcmul_(grad, grad, value=1 - _BETA2)
    deviation = square.sqrt() / (1 - _BETA2**_STEP) ** 0.5 + _EPSILON
    parameter.addcdiv_(mean, deviation, value=-_RATE / (1 - _BETA1**_STEP))


_RATE, _BETA1, _BETA2, _EPSILON, _DECAY, _STEP = 1e-3, 0.9, 0.999, 1e-8, 0.01, 100


def _fused_adamw() -> Callable[..., None]:
    def update(parameter: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> None:
        step = torch.full((), float(_STEP), device=parameter.device)
        torch.ops.aten._fused_adamw_(
            [parameter], [grad], [mean], [square], [], [step],
            lr=_RATE, beta1=_BETA1, beta2=_BETA2, weight_decay=_DECAY, eps=_EPSILON,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return update


def _liger(name: str, *more: object) -> Callable[[], Callable[..., Any]]:
    def imported() -> Callable[..., Any]:
        functional = importlib.import_module("liger_kernel.transformers.functional")
        function = getattr(functional, f"liger_{name}")
        return lambda *inputs: function(*inputs, *more)

    return imported


def _activations(sizes: Sizes) -> Tensor:
    return torch.randn(sizes.rows, sizes.columns, dtype=torch.bfloat16)


def _scales(sizes: Sizes) -> Tensor:
    return torch.rand(sizes.columns, dtype=torch.bfloat16) + 0.5


def _logits(sizes: Sizes) -> list[Tensor]:
    logits = torch.randn(sizes.rows, sizes.vocab, dtype=torch.bfloat16)
    return [logits, torch.randint(sizes.vocab, (sizes.rows,))]


def _states(sizes: Sizes) -> list[Tensor]:
    return [torch.rand(sizes.parameters) for _ in range(4)]


def _normed(sizes: Sizes) -> list[Tensor]:
    return [_activations(sizes), _scales(sizes)]


def _normed_and_moved(sizes: Sizes) -> list[Tensor]:
    return [_activations(sizes), _scales(sizes), _scales(sizes)]


def _one(sizes: Sizes) -> list[Tensor]:
    return [_activations(sizes)]


def _two(sizes: Sizes) -> list[Tensor]:
    return [_activations(sizes), _activations(sizes)]


_RMS: ByHand = {"Liger": _liger("rms_norm", 1e-6)}
_LAYER: ByHand = {"Liger": _liger("layer_norm", 1e-6)}

OPERATORS: tuple[Operator, ...] = (
    Operator("pointwise", gated, _two, moves=3),
    Operator("rms norm", rms_norm, _normed, moves=2, by_hand=_RMS),
    Operator("rms norm backward", rms_norm, _normed, "backward", moves=3, by_hand=_RMS),
    Operator("layer norm", layer_norm, _normed_and_moved, moves=2, by_hand=_LAYER),
    Operator("layer norm backward", layer_norm, _normed_and_moved, "backward", moves=3, by_hand=_LAYER),
    Operator("softmax", softmax, _one, moves=2),
    Operator("softmax backward", softmax, _one, "backward", moves=3),
    Operator(
        "cross-entropy and gradient",
        cross_entropy,
        _logits,
        "both",
        moves=2,
        by_hand={"Liger": _liger("cross_entropy")},
    ),
    Operator("quantise", quantise, _one, moves=1.5),
    Operator("quantise both ways", quantise_both_ways, _one, moves=2),
    Operator("AdamW", adamw, _states, moves=7, writes=True, by_hand={"fused": _fused_adamw}),
)
