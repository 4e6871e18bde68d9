"""Compilers that run their graphs as they are get graphs that write what requires grad through strides."""

from __future__ import annotations

import pytest
import torch

import aotdist
import aotdist.functorch as drop_in


@pytest.mark.parametrize(
    "compiled",
    [
        lambda fn: aotdist.compile(fn, backend=lambda gm, _: gm),
        lambda fn: drop_in.aot_function(fn, drop_in.nop),
    ],
    ids=["compile", "aot_function"],
)
def test_a_transposed_argument_is_written_through_strides(compiled):
    def program(x):
        x.unfold(1, 1, 2).mul_(3)
        return x * 1

    seen = []
    for call in (program, compiled(program)):
        leaf = torch.arange(12.0).view(4, 3).requires_grad_()
        x = (leaf * 1.5).t()
        out = call(x)
        out.square().sum().backward()
        seen.append([out, x, leaf.grad])
    assert all(map(torch.equal, *seen))
