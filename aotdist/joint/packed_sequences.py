"""Packed sequences whose lengths are known at capture: Python numbers, or what follows from sizes.

PyTorch packs, runs recurrent layers and pads in C++ that reads the lengths from memory, of which a trace has
none. Here they are read as numbers, and rows are put into other places by index; lengths that are only known
at a call are refused by the line that packs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aotdist.torch_seam.control_flow import PACK_SEQUENCE, PAD_SEQUENCE
from aotdist.torch_seam.modes import no_modes

_LAYERS: Sequence[Callable[..., Any]] = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class _Packed(torch.autograd.Function):
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


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Shapes: (time, batch, *) or (batch, time, *), (batch,) -> (rows, *), (time,)."""
    numbers = lengths.tolist()
    padded = input.transpose(0, 1) if batch_first else input
    with no_modes():  # a trial, which raises what eager raises
        _, batch_sizes = PACK_SEQUENCE(torch.empty(*padded.shape[:2], 1), torch.tensor(numbers), False)
        batch_sizes = batch_sizes.tolist()
    return _Packed.apply(padded, _rows(batch_sizes, padded)), torch.tensor(batch_sizes)


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
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


def _layer(function: Callable[..., Any], *args: Any) -> Any:
    """A recurrent layer, which reads the batch sizes of a packed sequence, if it is given one."""
    if not isinstance(args[1], Tensor) or not isinstance(args[2], (Tensor, tuple)):
        return function(*args)
    numbers = args[1].tolist()
    with no_modes():
        batch_sizes = torch.tensor(numbers)
    return function(args[0], batch_sizes, *args[2:])


INSTEAD: Mapping[Any, Callable[..., Any]] = {
    PACK_SEQUENCE: _pack,
    PAD_SEQUENCE: _pad,
    **{layer: functools.partial(_layer, layer) for layer in _LAYERS},
}
"""What is called in a trace for PyTorch's functions."""
