"""Batches of sequences of different lengths: packed sequences, and transformer encoders on padded batches.

PyTorch packs, runs recurrent layers and pads in C++ that reads the lengths from memory, which a trace has
not. Here lengths that are known at capture (Python numbers, or what follows from sizes) are read as numbers,
and rows are moved by index; others are refused by the line that packs.

In evaluation, where the padding is at the end of each sequence, `nn.TransformerEncoder` packs the batch into
a nested tensor that its layers work on, and returns zeros for the padding; elsewhere the layers are given the
mask. A trace holds no such tensors, and does not know where the padding is: here they are given the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from aotdist.torch_seam.control_flow import IS_LEFT_ALIGNED, PACK, PACK_SEQUENCE, PAD_SEQUENCE
from aotdist.torch_seam.modes import no_modes
from aotdist.trace.failures import refusal


def _pack(_func: Any, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Shapes: (time, batch, *) or (batch, time, *), (batch,) -> (rows, *), (time,)."""
    numbers = lengths.tolist()
    padded = input.transpose(0, 1) if batch_first else input
    with no_modes():  # a trial, which raises what eager raises
        _, batch_sizes = PACK_SEQUENCE(torch.empty(*padded.shape[:2], 1), torch.tensor(numbers), False)
        batch_sizes = batch_sizes.tolist()
    packed = padded.flatten(0, 1).index_select(0, _rows(batch_sizes, padded))
    return packed, torch.tensor(batch_sizes)


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


def _is_left_aligned(_func: Any, src: Tensor, kept: Tensor) -> bool:
    """Whether an encoder is to pack a batch: data would decide, so its layers are given the mask."""
    return False


def _pack_encoded(_func: Any, src: Tensor, kept: Tensor, mask_check: bool = True) -> NoReturn:
    """Refuse an encoder that packs without asking (`mask_check=False`)."""
    raise refusal(
        "`nn.TransformerEncoder` makes a nested tensor of a padded batch",
        "make the encoder with `enable_nested_tensor=False`",
    )


ENCODERS: Mapping[Any, Callable[..., Any]] = {IS_LEFT_ALIGNED: _is_left_aligned, PACK: _pack_encoded}
"""What is called for functions that encoders call."""
