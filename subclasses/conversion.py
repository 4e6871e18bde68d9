"""Linear layers that are converted in place, and back: what `to_float8` and `sparsify_24` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from aotdist.errors import BadSettings
from aotdist.subclasses.protocol import CONVERSION

Filter = Callable[[str, nn.Linear], bool]


@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """A linear layer of another class, and how to undo that.

    Args:
        names: of the attributes and buffers that it was given.
        weights: its weight before and now, if it was given another.
    """

    path: str
    linear: nn.Linear
    new_class: type[nn.Linear]
    names: tuple[str, ...]
    weights: tuple[nn.Parameter, nn.Parameter] | None


def convert(
    path: str,
    linear: nn.Linear,
    new_class: type[nn.Linear],
    attributes: Mapping[str, Any],
    *,
    buffers: Mapping[str, torch.Tensor] | None = None,
    weight: nn.Parameter | None = None,
) -> ConvertedLayer:
    """Give a layer another class, and the attributes, buffers and weight that this class needs."""
    before: Any = linear.weight
    linear.__class__ = new_class
    for name, value in attributes.items():
        setattr(linear, name, value)
    for name, buffer in (buffers or {}).items():
        linear.register_buffer(name, buffer)
    if weight is not None:
        linear.weight = weight
    weights = None if weight is None else (before, weight)
    return ConvertedLayer(path, linear, new_class, (*attributes, *(buffers or ())), weights)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What converting the linear layers of a module did; `print` it.

    Args:
        converted: paths of the layers that were converted.
        skipped: why each of the other linear layers was not, by path.
    """

    converted: tuple[str, ...]
    skipped: Mapping[str, str]
    _layers: tuple[ConvertedLayer, ...] = field(repr=False)

    def undo(self) -> None:
        """Make the layers `nn.Linear`s again, with their original parameters.

        A parameter keeps its present values; one that was packed has those from before.

        Raises:
            BadSettings: a layer is no longer what the conversion made it. Nothing is changed then.
        """
        for layer in self._layers:
            path, kind = layer.path, type(layer.linear)
            if kind is not layer.new_class:
                raise BadSettings(
                    f"`{path}` is a {kind.__name__} now, not the {layer.new_class.__name__} that it was "
                    "converted to",
                    fix="undo only once, and before `fully_shard` is called on the layer itself",
                )
            if layer.weights is not None and layer.linear.weight is not layer.weights[1]:
                raise BadSettings(
                    f"the weight of `{path}` is another now than it was converted to",
                    fix="undo before `fully_shard`, or load the checkpoint into another model",
                )
        for layer in self._layers:
            if layer.weights is not None:
                layer.linear.weight, _ = layer.weights
            layer.linear.__class__ = nn.Linear
            for name in layer.names:
                delattr(layer.linear, name)


def linears_to_convert(
    module: nn.Module, filter: Filter | None, reason_against: Callable[[nn.Linear], str | None], verb: str
) -> tuple[dict[str, nn.Linear], Mapping[str, str]]:
    """The linear layers to convert, and why each of the others is not; both by path.

    Args:
        module: whose layers these are, itself included.
        filter: of the caller; False leaves a layer as it is.
        reason_against: why a layer cannot be converted; None if it can.
        verb: what converted layers can do, for messages.

    Raises:
        BadSettings: it is no module, the filter cannot be called, or there is no layer to convert.
    """
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # not for the untyped
        raise BadSettings(f"cannot convert layers of a {type(module).__name__}", fix="pass a module")
    if filter is not None and not callable(filter):
        fix = "pass a function that takes a path and a layer, or None"
        raise BadSettings(f"`filter` is {filter!r}", fix=fix)
    chosen: dict[str, nn.Linear] = {}
    skipped: dict[str, str] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        path = name or "(root)"
        if hasattr(layer, CONVERSION):
            reason = f"is {getattr(layer, CONVERSION)} already"
        elif type(layer) is not nn.Linear:
            reason = f"is a {type(layer).__name__}, whose forward may be another"
        elif filter is not None and not filter(path, layer):
            reason = "was left out by the filter"
        else:
            reason = reason_against(layer)
        if reason is None:
            chosen[path] = layer
        else:
            skipped[path] = reason
    if not chosen:
        reasons = "; ".join(f"`{path}` {reason}" for path, reason in skipped.items())
        raise BadSettings(
            f"no layer of this {type(module).__name__} can {verb}: {reasons or 'it has no nn.Linear'}",
            fix="pass a module with other `nn.Linear` layers",
        )
    return chosen, MappingProxyType(skipped)
