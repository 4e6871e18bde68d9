"""Fused optimizer steps (`_fused_adamw_`), which PyTorch's functionalisation cannot handle.

It fails for their empty lists, and most have no meta kernels. Their functional variants return new tensors;
these are recorded, and their results are written where the step would have written them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aotdist.torch_seam.operators import OpOverload, functional_twin, written_arguments

_SCALED = ("grad_scale", "found_inf")


def is_fused_optimizer(func: Any) -> bool:
    """Whether an operator is an optimizer's fused step, in place."""
    return func in _TWIN_OF


def is_functional_step(func: Any) -> bool:
    """Whether an operator is the functional variant of one."""
    return func in _STEP_OF


def step_functionally(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Do the step by its functional variant, and write the results."""
    results = _TWIN_OF[func](*args, **kwargs)
    for (position, name), new in zip(written_arguments(func), results, strict=True):
        # Gradients are written only where they are unscaled on the way.
        if name != "grads" or any(kwargs.get(scaled) is not None for scaled in _SCALED):
            for target, value in zip(args[position], new, strict=True):
                target.copy_(value)


def results_like(func: OpOverload, args: Sequence[Any]) -> tuple[list[torch.Tensor], ...]:
    """Tensors of the sizes that the functional variant of a step returns; their values are arbitrary."""
    lists = (args[position] for position, _ in written_arguments(_STEP_OF[func]))
    return tuple([torch.empty_like(tensor) for tensor in tensors] for tensors in lists)


def _steps() -> list[OpOverload]:
    packets = (getattr(torch.ops.aten, f"_fused_{name}_") for name in ("adam", "adamw", "sgd", "adagrad"))
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


_TWIN_OF = {step: twin for step in _steps() if (twin := functional_twin(step)) is not None}
_STEP_OF = {twin: step for step, twin in _TWIN_OF.items()}
