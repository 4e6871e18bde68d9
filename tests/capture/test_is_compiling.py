"""`Settings(is_compiling=True)`: what libraries are told that ask whether they may read data."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import UnsupportedProgram


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As transformers looks at a padding mask."""
    is_tracing = torch.compiler.is_compiling()
    is_tracing |= False
    if not is_tracing and mask.all():
        return x.sum()
    return (x * mask).sum()


def test_the_way_without_data_is_taken() -> None:
    program = aotdist.compile(masked, backend="fx", settings={"is_compiling": True})
    x = torch.arange(4.0, requires_grad=True)
    for mask in (torch.ones(4), torch.tensor([1.0, 1.0, 0.0, 0.0])):
        x.grad = None
        assert not torch.compiler.is_compiling()
        loss = program(x, mask)
        loss.backward()
        assert loss == (x * mask).sum() and torch.equal(x.grad, mask)
    assert len(aotdist.api.compiled_call(program).artifacts) == 1


def test_a_checkpoint_takes_the_same_way_again() -> None:
    program = aotdist.compile(
        lambda x, mask: checkpoint(masked, x, mask, use_reentrant=False),
        backend="fx",
        settings={"is_compiling": True},
    )
    x = torch.ones(4, requires_grad=True)
    program(x, torch.ones(4)).backward()
    assert torch.equal(x.grad, torch.ones(4))


def test_without_it_the_refusal_names_it() -> None:
    with pytest.raises(UnsupportedProgram, match=r"Settings\(is_compiling=True\)"):
        aotdist.compile(masked, backend="fx")(torch.ones(4), torch.ones(4))


def test_a_failure_leaves_nothing_behind() -> None:
    program = aotdist.compile(lambda x: x * float(x.sum()), backend="fx", settings={"is_compiling": True})
    with pytest.raises(UnsupportedProgram):
        program(torch.ones(4))
    assert not torch.compiler.is_compiling()
