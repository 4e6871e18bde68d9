"""Sequences that are packed by lengths which are known at capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
)

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import Scene, same_as_eager

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(4, 6, batch_first=True),
    "deep LSTM": lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True),
    "GRU": lambda: nn.GRU(4, 6, bidirectional=True, batch_first=True),
    "RNN": lambda: nn.RNN(4, 6, nonlinearity="relu", batch_first=True),
}


class Reader(nn.Module):
    def __init__(self, layer: nn.RNNBase, lengths: Sequence[int]) -> None:
        super().__init__()
        self.layer, self.lengths = layer, lengths

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        packed = pack_padded_sequence(x, self.lengths, batch_first=True, enforce_sorted=False)  # type: ignore[arg-type]
        out, state = self.layer(packed)
        padded, lengths = pad_packed_sequence(out, batch_first=True, padding_value=-1.0, total_length=7)
        return padded, lengths, state


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_reads_them(layer: str) -> None:
    def scene() -> Scene:
        return Scene(Reader(LAYERS[layer](), [2, 5, 3]), (torch.randn(3, 5, 4, requires_grad=True),))

    same_as_eager(scene, calls=2)


def packed(x: torch.Tensor) -> PackedSequence:
    return pack_padded_sequence(x, [5, 3, 3], batch_first=True)  # type: ignore[arg-type]


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda x: packed(x).data * 2,
    "packed": packed,
    "time first": lambda x: pack_padded_sequence(x, torch.tensor([3, 2, 1, 1, 1])).data,
    "a list": lambda x: pack_sequence([x[0], x[1][:4], x[2][:1]]).data,
    "unpacked": lambda x: unpack_sequence(packed(x)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_they_are_packed_as_in_eager(program: str) -> None:
    same_as_eager(lambda: Scene(PROGRAMS[program], (torch.randn(3, 5, 4, requires_grad=True),)), calls=2)


def test_lengths_out_of_order_are_eagers_error() -> None:
    for call in (pack_padded_sequence, aotdist.compile(pack_padded_sequence, backend="fx")):
        with pytest.raises(RuntimeError, match="must be sorted in decreasing order"):
            call(torch.randn(5, 3, 4), [3, 5, 2])


def test_lengths_that_come_with_the_call_are_refused_by_line() -> None:
    def program(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return pack_padded_sequence(x, lengths).data

    with pytest.raises(
        UnsupportedProgram, match=r"read off a tensor\n  at .*pack_padded_sequence\(x, lengths"
    ):
        aotdist.compile(program, backend="fx")(torch.randn(5, 3, 4), torch.tensor([5, 3, 2]))


@pytest.mark.sweep
def test_inductor() -> None:
    reader = Reader(LAYERS["LSTM"](), [2, 5, 3])
    x = torch.randn(3, 5, 4)
    losses = [call(x)[0].square().sum() for call in (reader, aotdist.compile(reader, backend="inductor"))]
    torch.testing.assert_close(losses[1], losses[0])
    grads = [torch.autograd.grad(loss, [*reader.parameters()]) for loss in losses]
    torch.testing.assert_close(grads[1], grads[0])
