"""Batches of sequences of different lengths: packed sequences, and transformer encoders on padded batches.

PyTorch packs, runs recurrent layers and pads in C++ that reads the lengths from memory, of which a trace has
none. Here lengths that are known at capture (Python numbers, or what follows from sizes) are read as numbers,
and rows are put into other places by index; others are refused by the line that packs.

In evaluation, where the padding is at the end of each sequence, `nn.TransformerEncoder` packs the batch into
a nested tensor that its layers work on, and returns zeros for the padding; elsewhere the layers are given the
mask. A trace holds no such tensors, and does not know where the padding is. Here the encoder is handed a
`Packed` in either case: what a layer makes of it is one operator of our own, which looks at the mask when it
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from aotdist.torch_seam.control_flow import (
    ENCODER_LAYER,
    IS_LEFT_ALIGNED,
    PACK,
    PACK_SEQUENCE,
    PAD_SEQUENCE,
    are_on_fast_path,
    encoder_that_asks,
)
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.operators import schema_of
from aotdist.trace.failures import refusal


class _Rows(torch.autograd.Function):
    """Rows by index, as copies: `index_select` would add gradients to zeros, which lose their sign."""

    passes_gradients_on = True

    @staticmethod
    def forward(ctx: Any, padded: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = padded.size()
        return padded.flatten(0, 1).index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        zeros = grads[0].new_zeros(ctx.size).flatten(0, 1)
        return zeros.index_copy(0, rows, grads[0]).view(ctx.size), None


def _pack(_func: Any, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Shapes: (time, batch, *) or (batch, time, *), (batch,) -> (rows, *), (time,)."""
    numbers = lengths.tolist()
    padded = input.transpose(0, 1) if batch_first else input
    with no_modes():  # a trial, which raises what eager raises
        _, batch_sizes = PACK_SEQUENCE(torch.empty(*padded.shape[:2], 1), torch.tensor(numbers), False)
        batch_sizes = batch_sizes.tolist()
    return _Rows.apply(padded, _rows(batch_sizes, padded)), torch.tensor(batch_sizes)


def _pad(
    _func: Any, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Shapes: (rows, *), (time,) -> (time, batch, *) or (batch, time, *), (batch,)."""
    numbers = batch_sizes.tolist()
    if 0 < total_length < len(numbers):
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, but got "
            f"total_length={total_length} and max sequence length being {len(numbers)}"
        )
    size = (max(total_length, len(numbers)), numbers[0], *data.shape[1:])
    empty = data.new_full(size, padding_value)
    padded = empty.flatten(0, 1).index_copy(0, _rows(numbers, empty), data).view(size)
    lengths = [sum(number > at for number in numbers) for at in range(numbers[0])]
    return padded.transpose(0, 1) if batch_first else padded, torch.tensor(lengths)


def _rows(batch_sizes: Sequence[int], padded: Tensor) -> Tensor:
    """Where the packed rows are among all those of a padded batch, time first."""
    rows = [time * padded.size(1) + at for time, number in enumerate(batch_sizes) for at in range(number)]
    return torch.tensor(rows, device=padded.device)


def _recurrent(function: Callable[..., Any], *args: Any) -> Any:
    """A recurrent layer, which reads the batch sizes of a packed sequence, if it is given one."""
    if not isinstance(args[1], Tensor) or not isinstance(args[2], (Tensor, tuple)):
        return NotImplemented
    numbers = args[1].tolist()
    with no_modes():
        batch_sizes = torch.tensor(numbers)
    return function(args[0], batch_sizes, *args[2:])


SEQUENCES: Mapping[Any, Callable[..., Any]] = {
    PACK_SEQUENCE: _pack,
    PAD_SEQUENCE: _pad,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
}
"""What is called for functions of packed sequences."""

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


def _is_left_aligned(_func: Any, src: Tensor, kept: Tensor) -> bool:
    """Whether the encoder that asks is to pack a batch, if it may; otherwise its layers are given the mask.

    Raises:
        UnsupportedProgram: it is not an encoder that asks.
    """
    encoder = encoder_that_asks()
    if encoder is None:
        raise refusal("`torch._nested_tensor_from_mask_left_aligned` asks for data", "compute with the mask")
    return are_on_fast_path(encoder.layers)


def _encoder_pack(_func: Any, src: Tensor, kept: Tensor, mask_check: bool = True) -> Packed:
    """What stands for the nested tensor that an encoder asks for.

    Raises:
        UnsupportedProgram: it is not an encoder that asks.
    """
    encoder = encoder_that_asks()
    if encoder is None:
        raise refusal("`torch._nested_tensor_from_mask` makes a nested tensor", "compute with the mask")
    return Packed(src, kept, looks=getattr(encoder, "mask_check", True))


ENCODERS: Mapping[Any, Callable[..., Any]] = {IS_LEFT_ALIGNED: _is_left_aligned, PACK: _encoder_pack}
"""What is called for functions that encoders call."""
