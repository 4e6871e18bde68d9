"""The FP8 recipes of torchao: dynamic scales, one for a tensor or one for each row."""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from aotdist.errors import BadSettings

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""Names that `torchao.float8.Float8LinearConfig.from_recipe_name` knows."""


def torchao_linear(linear: nn.Linear, recipe: str) -> tuple[type[nn.Linear], dict[str, Any]]:
    """The class of torchao's replacement for `linear`, and the attributes of its instance.

    torchao makes a new module, which loses the hooks of the old one; the caller gives the old one this class
    and these attributes instead.

    Raises:
        BadSettings: torchao cannot be imported.
    """
    float8 = _torchao_float8()
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    # Its kernels need compute capability 8.9; elsewhere it multiplies dequantised operands.
    config = replace(config, emulate=not _multiplies_float8(linear.weight.device))
    holder = nn.ModuleList([nn.Linear(1, 1, device="meta")])
    holder[0].weight, holder[0].bias = linear.weight, linear.bias
    swapped: Any = float8.convert_to_float8_training(holder, config=config)[0]
    plain = vars(nn.Linear(1, 1, device="meta"))
    given = {name: value for name, value in vars(swapped).items() if name not in plain}
    return _heeding_autocast(type(swapped)), given


@functools.cache
def _heeding_autocast(cls: type[Any]) -> type[nn.Linear]:
    """Torchao's layer under autocast of its input's device; torchao itself asks for a GPU's autocast."""

    class TorchaoFloat8Linear(cls):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            kind = input.device.type
            if torch.is_autocast_enabled(kind):
                input = input.to(torch.get_autocast_dtype(kind))
            with torch.autocast(kind, enabled=False):  # it would cast operands of emulated products
                return super().forward(input)

    return TorchaoFloat8Linear


def _multiplies_float8(device: torch.device) -> bool:
    if device.type == "meta":  # it will be where the accelerator is
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _torchao_float8() -> Any:
    try:
        return importlib.import_module("torchao.float8")  # 2 s: only who asks for its recipes pays
    except ImportError as error:
        raise BadSettings(
            f"recipes {', '.join(RECIPES)} are torchao's, which cannot be imported: {error}",
            fix="pip install 'aotdist[fp8]', or choose the recipe `delayed` or `blockwise`",
        ) from error
