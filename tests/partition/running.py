"""Runs a joint graph whole and cut in two, to compare them bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aotdist.program import Graph, Split

Tensors = Sequence[torch.Tensor | None]


def run_joint(joint: Graph, args: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Every result of the joint graph, in the order of its slots."""
    with torch.no_grad():
        return list(joint.gm(*args))


def run_split(split: Split, joint: Graph, args: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The same, through the two halves; written primals are really written in between."""
    by_slot = dict(zip(joint.ins, args, strict=True))
    with torch.no_grad():
        outs = split.forward.gm(*(by_slot[slot] for slot in split.forward.ins))
        forward = dict(zip(split.forward.outs, outs, strict=True))
        results = {slot: _own(value) for slot, value in forward.items()}
        for slot, value in forward.items():
            if slot.role == "write":
                _primal(by_slot, slot.path).copy_(value)
        values = [
            by_slot[split.saved_primals[slot]] if slot in split.saved_primals else forward[slot]
            for slot in split.saved
        ]
        tangents = [by_slot[slot] for slot in split.backward.ins[len(values) :]]
        grads = split.backward.gm(*values, *tangents)
    results.update(zip(split.backward.outs, grads, strict=True))
    return [results[slot] for slot in joint.outs]


def assert_same_bits(actual: Tensors, expected: Tensors) -> None:
    """Raises unless both hold the same values, bit by bit."""
    for got, want in zip(actual, expected, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert got.dtype == want.dtype and got.shape == want.shape
            assert torch.equal(_bits(got), _bits(want))


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def _own(value: torch.Tensor) -> torch.Tensor:
    return value.clone()


def _primal(by_slot: dict, path: str) -> torch.Tensor:  # type: ignore[type-arg]
    return next(value for slot, value in by_slot.items() if slot.role == "primal" and slot.path == path)
