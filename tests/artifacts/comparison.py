"""Runs a program eagerly and from an artifact, and compares values, gradients and writes bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist import assumptions as tracing
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.trees import pytree
from tests.artifacts.programs import Made


def assert_same_as_eager(
    make: Callable[[], Made], path: Path, *, grad: bool = True, exactly: bool = True
) -> None:
    """Two steps of the artifact at `path`, which was built of `make`, are what eager's are."""
    eager, loaded = make(), make()
    called = aotdist.load(path, loaded[0])
    for _ in range(2):
        steps = step(*eager, eager[0], grad=grad), step(*loaded, called, grad=grad)
        assert_same(*steps, exactly=exactly)


def step(target: Any, args: tuple[Any, ...], call: Any, *, grad: bool) -> list[torch.Tensor | None]:
    """Results, gradients, and what arguments and state hold afterwards."""
    torch.manual_seed(1)
    with nullcontext() if grad else torch.no_grad():
        results = [leaf for leaf in pytree.tree_leaves(call(*args)) if isinstance(leaf, torch.Tensor)]
    differentiable = [result for result in results if result.requires_grad]
    if differentiable:
        torch.stack([_total(result) for result in differentiable]).sum().backward()
    held = [arg for arg in args if isinstance(arg, torch.Tensor)]
    state = (
        [*target.parameters(), *target.buffers()] if isinstance(target, nn.Module) else list(_cells(target))
    )
    return [*results, *held, *state, *(tensor.grad for tensor in state if tensor.requires_grad)]


def _total(result: torch.Tensor) -> torch.Tensor:
    total = result.square().sum()
    return total.full_tensor() if hasattr(total, "full_tensor") else total  # type: ignore[operator]


def _cells(function: Any) -> Iterator[torch.Tensor]:
    for cell in function.__closure__ or ():
        if isinstance(cell.cell_contents, torch.Tensor):
            yield cell.cell_contents


def assert_same(
    expected: list[torch.Tensor | None], found: list[torch.Tensor | None], *, exactly: bool = True
) -> None:
    assert len(expected) == len(found)
    for position, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a is None or b is None:
            assert a is b, position
            continue
        for x, y in zip(plain_tensors(a), plain_tensors(b), strict=True):
            assert x.stride() == y.stride(), position
            assert torch.equal(x, y) if exactly else torch.allclose(x, y, rtol=1e-4, atol=1e-6), position


def forbid_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is traced any more."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something is traced")

    monkeypatch.setattr(tracing, "trace", refuse)
