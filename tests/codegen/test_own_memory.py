"""Outputs whose operators Inductor drops are tensors of their own: who writes one writes nothing else."""

from collections.abc import Callable

import pytest
import torch

import aotdist

pytestmark = pytest.mark.usefixtures("inductor_cache")

DROPPED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "of another output": lambda x: ((y := x * 2), y + torch.zeros(4, 4)),
    "of another output, twice": lambda x: ((y := x * 2), y * torch.ones(4, 4), y - torch.zeros(4, 4)),
    "of an argument": lambda x: (x + torch.zeros(4, 4), x * 2),
    "of what the backward reads": lambda x: ((y := x.exp()) + torch.zeros(4, 4), y * y),
    "a view of it": lambda x: ((y := x * 2), (y + torch.zeros(4, 4)).t()),
}


@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_outputs_have_their_own_memory(name: str, requires_grad: bool) -> None:
    x = torch.arange(16.0).reshape(4, 4).requires_grad_(requires_grad)
    eager, ours = DROPPED[name](x), aotdist.compile(DROPPED[name], backend="inductor")(x)
    places = {tensor.untyped_storage().data_ptr() for tensor in (x, *ours)}
    assert len(places) == 1 + len(ours)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)
        assert a.requires_grad == requires_grad
    if requires_grad:
        for outs in (eager, ours):
            with torch.no_grad():
                outs[0].mul_(3)
        found, expected = (torch.autograd.grad(outs[-1].sum(), x)[0] for outs in (ours, eager))
        torch.testing.assert_close(found, expected)


def test_what_has_no_other_use_is_not_copied() -> None:
    compiled = aotdist.compile(lambda x: x * 2 + torch.zeros(4, 4), backend="inductor")
    compiled(torch.randn(4, 4))
    (graphs,) = compiled.graphs
    assert "clone" not in graphs["inference"].code
