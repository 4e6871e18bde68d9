"""`to_float8`: linear layers that multiply in 8 bits, and the way back.

A layer gets another class, attributes and, for delayed scaling, a buffer. It keeps its identity, parameters,
their names and its hooks, so optimizers, `fully_shard`, `parallelize_module` and checkpoints may come before
or after. Parameters and gradients keep their dtype.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from aotdist.errors import BadSettings
from aotdist.subclasses.conversion import (
    Conversion,
    ConvertedLayer,
    Filter,
    convert,
    linears_to_convert,
)
from aotdist.subclasses.float8_gather import WeightScales
from aotdist.subclasses.float8_linear import BlockwiseFloat8Linear, DelayedFloat8Linear, new_history
from aotdist.subclasses.float8_tensor import ALIGNMENT
from aotdist.subclasses.protocol import CONVERSION

Recipe: TypeAlias = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"]

_OF_TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""Names that `torchao.float8.Float8LinearConfig.from_recipe_name` knows."""

HISTORY_STEPS = 16
"""Steps that delayed scaling looks back: torchao's and Transformer Engine's examples take 16."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Float8Converted(Conversion):
    """What `to_float8` did; `print` it.

    Args:
        converted: paths of the layers that multiply in 8 bits now.
        skipped: why each of the other linear layers does not, by path.
        recipe: where scales come from.
    """

    recipe: Recipe

    def __str__(self) -> str:
        lines = [f"float8 ({self.recipe}): {len(self.converted)} linear layers converted"]
        lines += [f"  {path}" for path in self.converted]
        lines += [f"  skipped {path}: {reason}" for path, reason in self.skipped.items()]
        return "\n".join(lines)


def to_float8(
    module: nn.Module,
    recipe: Recipe = "tensorwise",
    filter: Filter | None = None,
    *,
    float8_all_gather: bool = False,
) -> Float8Converted:
    """Let the linear layers of `module` multiply in 8 bits, in place.

    Inputs, weights and gradients are scaled, rounded to float8 and multiplied, in forward and in backward;
    parameters, their gradients and `state_dict` stay as precise as they are. On a CPU the rounding is the
    same and the arithmetic is emulated.

    Args:
        module: its layers of type `nn.Linear` are converted, itself too if it is one.
        recipe: where scales come from.
            `tensorwise`, `rowwise`, `rowwise_with_gw_hp`: torchao's (extra `fp8`), from the tensor at hand:
            one scale; one for each row; the same, with the weight's gradient in high precision.
            `delayed`: one scale, from the largest magnitudes of the last 16 steps, kept in a buffer
            `amax_history`.
            `blockwise`: one for each 1x128 of activations and gradients, and for each 128x128 of weights.
        filter: called with the path and the layer; False leaves a layer as it is.
        float8_all_gather: with `delayed`, let FSDP2 gather the weights in 8 bits: pass them to `fully_shard`,
            and the optimizer the parameters, afterwards. Weights are then scaled by what they are, in one
            pass over all of them after each step. Weights that modules share are gathered as they are.

    Raises:
        BadSettings: the recipe is unknown, torchao is missing, or nothing can be converted; or
            `float8_all_gather` is given with another recipe, or after `fully_shard`.
    """
    if recipe not in get_args(Recipe):
        raise BadSettings(f"{recipe!r} is no FP8 recipe", fix=f"choose one of {', '.join(get_args(Recipe))}")
    if float8_all_gather and recipe != "delayed":
        raise BadSettings(
            f"`float8_all_gather` needs one scale for a weight, which is not what `{recipe}` of ours has",
            fix="choose the recipe `delayed`, or leave out `float8_all_gather`",
        )
    chosen, skipped = linears_to_convert(
        module, filter, lambda linear: _reason_against(linear, recipe), "multiply in float8"
    )
    gathered = _gathered(module, chosen) if float8_all_gather else frozenset[str]()
    scales = WeightScales()
    layers = tuple(
        _convert(path, linear, recipe, scales if path in gathered else None)
        for path, linear in chosen.items()
    )
    return Float8Converted(tuple(chosen), skipped, layers, recipe)


def _reason_against(linear: nn.Linear, recipe: Recipe) -> str | None:
    if linear.weight.dtype not in _DTYPES:
        return f"has weights of {linear.weight.dtype}, which is none of float32, bfloat16 and float16"
    if linear.in_features % ALIGNMENT or linear.out_features % ALIGNMENT:
        sizes = f"{linear.out_features} x {linear.in_features}"
        return f"is {sizes}, which {ALIGNMENT} does not divide"
    if recipe == "delayed" and linear.weight.is_meta:
        return "is on the meta device, so there is no weight yet for the amax history to begin with"
    return None


def _gathered(module: nn.Module, chosen: Mapping[str, nn.Linear]) -> frozenset[str]:
    """Paths of the layers whose weights are to be gathered in 8 bits.

    Raises:
        BadSettings: a module is sharded already.
    """
    from torch.distributed.fsdp import FSDPModule  # here: it would add 0.2 s to `import aotdist`

    uses = Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))
    for path, inner in module.named_modules():
        if isinstance(inner, FSDPModule):
            raise BadSettings(
                f"`{path or '(root)'}` is sharded by FSDP2 already, so how it is gathered is settled",
                fix="call `to_float8` before `fully_shard`",
            )
    return frozenset(path for path, linear in chosen.items() if uses[id(linear.weight)] == 1)


def _convert(path: str, linear: nn.Linear, recipe: Recipe, scales: WeightScales | None) -> ConvertedLayer:
    conversion = {CONVERSION: f"float8 ({recipe}{', gathered in float8' if scales else ''})"}
    if recipe in _OF_TORCHAO:
        new_class, attributes = _torchao_linear(linear, recipe)
        return convert(path, linear, new_class, attributes | conversion)
    if recipe == "blockwise":
        return convert(path, linear, BlockwiseFloat8Linear, conversion)
    buffers = {"amax_history": new_history(linear.weight, HISTORY_STEPS)}
    weight = None if scales is None else scales.gathered_weight(linear)
    return convert(path, linear, DelayedFloat8Linear, conversion, buffers=buffers, weight=weight)


# The recipes of torchao: dynamic scales, one for a tensor or one for each row.


def _torchao_linear(linear: nn.Linear, recipe: str) -> tuple[type[nn.Linear], dict[str, Any]]:
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
            f"recipes {', '.join(_OF_TORCHAO)} are torchao's, which cannot be imported: {error}",
            fix="pip install 'aotdist[fp8]', or choose the recipe `delayed` or `blockwise`",
        ) from error
