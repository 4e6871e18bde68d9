"""Runs a program eagerly and through the Triton emitter, and compares what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import aotdist
from aotdist.codegen import triton
from aotdist.kernels.emission import Fused
from aotdist.torch_seam.trees import pytree

Outcome = tuple[list[torch.Tensor], list[torch.Tensor | None]]


class Emissions:
    """Remembers what the emitter made while it is installed.

    Args:
        monkeypatch: pytest's; undoes it.
    """

    def __init__(self, monkeypatch: Any) -> None:
        self.made: list[Fused] = []
        fuse = triton.fuse

        def remembering(*args: Any, **kwargs: Any) -> Fused:
            self.made.append(fuse(*args, **kwargs))
            return self.made[-1]

        monkeypatch.setattr(triton, "fuse", remembering)

    def num_kernels(self) -> int:
        """Of all graphs together."""
        return sum(len(fused.kernels) for fused in self.made)

    def sources(self) -> str:
        """Of all graphs together."""
        return "\n".join(fused.source for fused in self.made)


def outcome(program: Callable[..., Any], args: Sequence[Any]) -> Outcome:
    """What a program returns, and the gradients of all that it returns with respect to its arguments."""
    outs = [out for out in pytree.tree_leaves(program(*args)) if isinstance(out, torch.Tensor)]
    leaves = [arg for arg in pytree.tree_leaves(args) if isinstance(arg, torch.Tensor) and arg.requires_grad]
    roots = [out for out in outs if out.requires_grad and out.dtype.is_floating_point]
    if not roots or not leaves:
        return [out.detach() for out in outs], []
    weights = [
        torch.linspace(0.5, 1, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
        for out in roots
    ]
    gradients = torch.autograd.grad(roots, leaves, weights, allow_unused=True)
    return [out.detach() for out in outs], list(gradients)


def strides(tensor: torch.Tensor) -> list[int]:
    """Those that say where elements lie."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def assert_same(
    program: Callable[..., Any], *args: Any, emulate_casts: bool = True, **tolerance: float
) -> None:
    """Values, dtypes, strides and gradients are eager's, up to the order of sums.

    Not the strides of gradients: what operators are made of lays some out otherwise.
    """
    torch.manual_seed(0)
    expected = outcome(program, args)
    compiled = aotdist.compile(program, backend="triton", settings={"emulate_casts": emulate_casts})
    torch.manual_seed(0)
    found = outcome(compiled, args)
    torch.testing.assert_close(found[0], expected[0], equal_nan=True, **tolerance)
    assert [strides(out) for out in found[0]] == [strides(out) for out in expected[0]]
    torch.testing.assert_close(found[1], expected[1], equal_nan=True, **tolerance)
