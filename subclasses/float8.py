"""`to_float8`: linear layers that multiply in 8 bits, and the way back.

A layer is given another class, attributes and, for delayed scaling, a buffer. The module, its parameters,
their names and its hooks stay, so optimizers, `fully_shard`, `parallelize_module` and checkpoints may come
before or after; parameters and gradients keep their dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from aotdist.errors import BadSettings
from aotdist.subclasses.conversion import in_words, left_out, refuse_what_is_no_module, sort_linears
from aotdist.subclasses.float8_gather import WeightScales
from aotdist.subclasses.float8_linear import BlockwiseFloat8Linear, DelayedFloat8Linear, new_history
from aotdist.subclasses.float8_tensor import ALIGNMENT
from aotdist.subclasses.float8_torchao import RECIPES, torchao_linear
from aotdist.subclasses.protocol import CONVERSION

Recipe: TypeAlias = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"]

HISTORY_STEPS = 16
"""Steps that delayed scaling looks back: torchao's and Transformer Engine's examples take 16."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Converted:
    """One layer, and what it was given.

    Args:
        path: its name.
        linear: the layer.
        new_class: what it is now.
        given: names of the attributes and buffers that it was given.
        weights: the one that it had and the one that it has now, around the same memory; none if it has
            the same.
    """

    path: str
    linear: nn.Linear
    new_class: type[nn.Linear]
    given: tuple[str, ...]
    weights: tuple[nn.Parameter, nn.Parameter] | None

    def undo(self) -> None:
        """Make it an `nn.Linear` again."""
        if self.weights is not None:
            self.linear.weight, _ = self.weights
        self.linear.__class__ = nn.Linear
        for name in self.given:
            delattr(self.linear, name)


@dataclass(frozen=True, slots=True)
class Float8Converted:
    """What `to_float8` did; `print` it.

    Args:
        recipe: the recipe.
        converted: paths of the layers that multiply in 8 bits now.
        skipped: why each of the other linear layers does not, by path.
    """

    recipe: Recipe
    converted: tuple[str, ...]
    skipped: Mapping[str, str]
    _layers: tuple[_Converted, ...] = field(repr=False)

    def undo(self) -> None:
        """Make the layers what they were; their parameters are the same objects, as they are now.

        Raises:
            BadSettings: a layer is no longer what `to_float8` made it. Nothing is changed then.
        """
        for layer in self._layers:
            if type(layer.linear) is not layer.new_class:
                raise BadSettings(
                    f"`{layer.path}` is a {type(layer.linear).__name__} now, not the "
                    f"{layer.new_class.__name__} that `to_float8` made it",
                    fix="undo once, and before `fully_shard` is called on the layer itself",
                )
            if layer.weights is not None and layer.linear.weight is not layer.weights[1]:
                raise BadSettings(
                    f"the weight of `{layer.path}` is another now than `to_float8` gave it",
                    fix="undo before `fully_shard`, or load the checkpoint into another model",
                )
        for layer in self._layers:
            layer.undo()

    def __str__(self) -> str:
        lines = [f"float8 ({self.recipe}): {len(self.converted)} linear layers converted"]
        lines += [f"  {path}" for path in self.converted]
        lines += [f"  skipped {path}: {reason}" for path, reason in self.skipped.items()]
        return "\n".join(lines)


def to_float8(
    module: nn.Module,
    recipe: Recipe = "tensorwise",
    filter: Callable[[str, nn.Linear], bool] | None = None,
    *,
    float8_all_gather: bool = False,
) -> Float8Converted:
    """Let the linear layers of `module` multiply in 8 bits, in place; all else keeps its precision.

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
            `float8_all_gather` is asked of another recipe, or after `fully_shard`.
    """
    if recipe not in get_args(Recipe):
        raise BadSettings(f"{recipe!r} is no FP8 recipe", fix=f"choose one of {', '.join(get_args(Recipe))}")
    if float8_all_gather and recipe != "delayed":
        raise BadSettings(
            f"`float8_all_gather` needs one scale for a weight, which is not what `{recipe}` of ours has",
            fix="choose the recipe `delayed`, or leave out `float8_all_gather`",
        )
    refuse_what_is_no_module(module)
    chosen, skipped = sort_linears(
        module, lambda path, linear: _why_not(linear, recipe) or left_out(filter, path, linear)
    )
    if not chosen:
        reasons = in_words(skipped)
        raise BadSettings(
            f"no linear layer of this {type(module).__name__} can multiply in float8",
            fix=f"see why: {reasons}" if reasons else "pass a module with `nn.Linear` layers",
        )
    gathered = _gathered(module, chosen) if float8_all_gather else frozenset[str]()
    scales = WeightScales()
    layers = tuple(
        _convert(path, linear, recipe, scales if path in gathered else None)
        for path, linear in chosen.items()
    )
    return Float8Converted(recipe, tuple(chosen), MappingProxyType(skipped), layers)


def _why_not(linear: nn.Linear, recipe: Recipe) -> str | None:
    """What keeps a layer from being converted, if anything does."""
    if hasattr(linear, CONVERSION):
        return f"is {getattr(linear, CONVERSION)} already"
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__}, whose forward may be another"
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


def _convert(path: str, linear: nn.Linear, recipe: Recipe, scales: WeightScales | None) -> _Converted:
    attributes: dict[str, Any] = {}
    buffers: dict[str, torch.Tensor] = {}
    new_class: type[nn.Linear]
    if recipe in RECIPES:
        new_class, attributes = torchao_linear(linear, recipe)
    elif recipe == "delayed":
        new_class, buffers = DelayedFloat8Linear, {"amax_history": new_history(linear.weight, HISTORY_STEPS)}
    else:
        new_class = BlockwiseFloat8Linear
    linear.__class__ = new_class
    conversion = f"float8 ({recipe}{', gathered in float8' if scales else ''})"
    for name, value in (*attributes.items(), (CONVERSION, conversion)):
        setattr(linear, name, value)
    for name, buffer in buffers.items():
        linear.register_buffer(name, buffer)
    before = linear.weight
    if scales is not None:
        scales.wrap(linear)
    weights: Any = (before, linear.weight) if scales else None
    return _Converted(path, linear, new_class, (*attributes, CONVERSION, *buffers), weights)
