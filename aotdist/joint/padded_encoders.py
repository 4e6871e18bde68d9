"""Encoders of transformers on padded batches, in evaluation.

Where the padding is at the end of each sequence, `nn.TransformerEncoder` packs the batch into a nested tensor
that its layers work on, and returns zeros for the padding; elsewhere the layers are given the mask. A trace
holds no nested tensors, and does not know where the padding is. Here the encoder is handed a `Packed` in
either case: what a layer makes of it is one operator of our own, which looks at the mask when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from aotdist.joint.failures import refusal
from aotdist.torch_seam.control_flow import ENCODER_LAYER, are_on_fast_path, encoder_that_asks
from aotdist.torch_seam.operators import schema_of

_LAYER = torch.ops.aten._transformer_encoder_layer_fwd.default
_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_LIBRARY.define(
    schema_of(_LAYER)
    .replace("aten::_transformer_encoder_layer_fwd(", "padded_encoder_layer(")
    .replace("Tensor src", "Tensor src, Tensor kept, bool looks")
    .replace(", Tensor? mask=None, int? mask_type=None", "")
)
_LIBRARY.define("padding_as_zeros(Tensor src, Tensor kept, bool looks) -> Tensor")

_PADDING = 1
"""What PyTorch calls a mask of padding, as against one of attention."""


def _is_packed(src: Tensor, kept: Tensor, looks: bool) -> bool:
    return not looks or torch.ops.aten._nested_tensor_from_mask_left_aligned(src, kept)


@torch.library.impl(_LIBRARY, "padded_encoder_layer", "CompositeExplicitAutograd")
def _layer(src: Tensor, kept: Tensor, looks: bool, *args: Any) -> Tensor:
    if _is_packed(src, kept, looks):
        nested = torch.ops.aten._nested_tensor_from_mask(src, kept, False)
        return torch.ops.aten.to_padded_tensor(_LAYER(nested, *args), 0.0, src.size())
    padding = torch.zeros_like(kept, dtype=src.dtype).masked_fill_(~kept, float("-inf"))
    return _LAYER(src, *args, padding, _PADDING)


@torch.library.impl(_LIBRARY, "padding_as_zeros", "CompositeExplicitAutograd")
def _zeros(src: Tensor, kept: Tensor, looks: bool) -> Tensor:
    if _is_packed(src, kept, looks):
        nested = torch.ops.aten._nested_tensor_from_mask(src, kept, False)
        return torch.ops.aten.to_padded_tensor(nested, 0.0, src.size())
    return src.clone()


def _like(src: Tensor, *_rest: Any) -> Tensor:
    return src.new_empty(src.size())


for _name in ("padded_encoder_layer", "padding_as_zeros"):
    torch.library.register_fake(f"aotdist::{_name}", _like, lib=_LIBRARY)


class Packed:
    """What an encoder takes for the nested tensor that it asked for.

    Args:
        values: of the padded batch. Shapes: (batch, length, features).
        kept: false for padding. Shapes: (batch, length).
        looks: whether the encoder packs batches only that have their padding at the end.
    """

    is_nested = True
    requires_grad = False

    def __init__(self, values: Tensor, kept: Tensor, *, looks: bool) -> None:
        self._values, self._kept, self._looks = values, kept, looks
        self.dtype, self.device = values.dtype, values.device

    def dim(self) -> int:
        """Those of the padded batch."""
        return self._values.dim()

    def to_padded_tensor(self, padding: float, size: Sequence[int]) -> Tensor:
        """The padded batch again."""
        return torch.ops.aotdist.padding_as_zeros(self._values, self._kept, self._looks)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Packed:
        """What a layer makes of it.

        Raises:
            UnsupportedProgram: the layer does not take its fast path.
        """
        if func is not ENCODER_LAYER:
            _refuse(getattr(func, "__name__", str(func)))
        packed, *rest = args[:-2]  # the last two are another mask, which is None
        values = torch.ops.aotdist.padded_encoder_layer(packed._values, packed._kept, packed._looks, *rest)
        return cls(values, packed._kept, looks=packed._looks)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(name)


def _refuse(what: str) -> NoReturn:
    raise refusal(
        f"a layer of `nn.TransformerEncoder` is not on its fast path and asks a nested tensor for `{what}`",
        "make the encoder with `enable_nested_tensor=False`",
    )


def is_left_aligned(src: Tensor, kept: Tensor) -> bool:
    """Whether the encoder that asks is to pack a batch, if it may; otherwise its layers are given the mask.

    Raises:
        UnsupportedProgram: it is not an encoder that asks.
    """
    encoder = encoder_that_asks()
    if encoder is None:
        raise refusal("`torch._nested_tensor_from_mask_left_aligned` asks for data", "compute with the mask")
    return are_on_fast_path(encoder.layers)


def pack(src: Tensor, kept: Tensor, mask_check: bool = True) -> Packed:
    """What stands for the nested tensor that an encoder asks for.

    Raises:
        UnsupportedProgram: it is not an encoder that asks.
    """
    encoder = encoder_that_asks()
    if encoder is None:
        raise refusal("`torch._nested_tensor_from_mask` makes a nested tensor", "compute with the mask")
    return Packed(src, kept, looks=getattr(encoder, "mask_check", True))
