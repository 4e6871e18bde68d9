"""The conjugate and negative bits of a tensor: its memory is read as the conjugate, or negated."""

from __future__ import annotations

import torch


def is_read_otherwise(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors differ in one of the bits."""
    return (a.is_conj(), a.is_neg()) != (b.is_conj(), b.is_neg())


def with_bits_flipped(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` with those bits flipped that are set in `model`."""
    if model.is_conj():
        tensor = torch.ops.aten._conj.default(tensor)
    return torch.ops.aten._neg_view.default(tensor) if model.is_neg() else tensor


def memory_to_read_as(model: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What memory has to hold for a tensor with the bits of `model` to be equal to `value`."""
    memory = with_bits_flipped(value, value)
    if value.is_neg() != model.is_neg():
        memory = torch.ops.aten.neg.default(memory)
    if value.is_conj() != model.is_conj():
        memory = torch.ops.aten._conj_physical.default(memory)
    return memory
