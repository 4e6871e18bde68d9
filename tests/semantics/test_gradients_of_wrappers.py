"""Gradients that are wrappers: which of them are one tensor, how they lie, and what autograd then adds up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.subclasses.protocol import plain_tensors

SIZE = (4, 6)


def _two(plain: torch.Tensor) -> TwoTensor:
    return TwoTensor(plain, plain * 2)


@pytest.fixture(params=["TwoTensor", "DTensor", "plain"])
def wrap(request: pytest.FixtureRequest, mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes a tensor of the class in question."""
    return {
        "TwoTensor": _two,
        "DTensor": lambda plain: DTensor.from_local(plain.clone(), mesh, [Replicate()], run_check=False),
        "plain": lambda plain: plain.clone(),
    }[request.param]


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "one gradient for two": lambda x, w: x + w,
    "passed on": lambda x, w: x + 1 + w.detach(),
    "one of several": lambda x, w: (x + w) + x * 2,
    "transposed": lambda x, w: x.t() + w.t(),
    "a product": lambda x, w: x * w,
    "two results": lambda x, w: (x + w, x * 2),
}

TANGENTS: dict[str, Callable[[tuple[int, ...]], torch.Tensor]] = {
    "contiguous": lambda size: torch.arange(1.0, 25).reshape(size),
    "transposed": lambda size: torch.arange(1.0, 25).reshape(size[::-1]).t(),
}


def seen(tensor: torch.Tensor | None) -> Any:
    """All of a gradient: how it lies, and what lies inside."""
    if tensor is None:
        return None
    plains = plain_tensors(tensor)
    inside = [(plain.stride(), plain.tolist()) for plain in plains]
    return type(tensor), tensor.stride(), inside


def assert_same_seen(
    name: str, wrap: Callable[..., Any], use: Callable[[Any, Any, tuple[Any, ...]], list[Any]]
) -> None:
    """Call a program three times: `use` is given its leaves and its results, and tells what it sees."""
    found: list[list[Any]] = []
    for call in (PROGRAMS[name], aotdist.compile(PROGRAMS[name], backend="fx")):
        torch.manual_seed(0)
        x, w = (wrap(torch.randn(SIZE)).requires_grad_() for _ in range(2))
        got: list[Any] = []
        for _ in range(3):
            results = call(x, w)
            got += use(x, w, results if isinstance(results, tuple) else (results,))
        found.append(got)
    assert found[0] == found[1]


@pytest.mark.parametrize("tangent", TANGENTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_accumulated_and_chosen(wrap: Callable[..., Any], name: str, tangent: str) -> None:
    """Backwards that add up, from gradients that the caller keeps, and some for chosen inputs."""

    def use(x: Any, w: Any, outs: tuple[Any, ...]) -> list[Any]:
        grads = [wrap(TANGENTS[tangent](tuple(out.shape))) for out in outs]
        before = [seen(grad) for grad in grads]
        torch.autograd.backward(outs, grads, retain_graph=True)
        assert [seen(grad) for grad in grads] == before
        got = [seen(x.grad), seen(w.grad)]
        chosen = torch.autograd.grad(outs, [x, w], grads, allow_unused=True)
        got += [seen(grad) for grad in chosen]
        return [*got, (chosen[0] is chosen[1], [chosen[0] is grad for grad in grads])]

    assert_same_seen(name, wrap, use)


@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_that_are_sums(wrap: Callable[..., Any], name: str) -> None:
    """Their gradients are expanded; one that is passed on may not be kept as `.grad`, and added to."""

    def use(x: Any, w: Any, outs: tuple[Any, ...]) -> list[Any]:
        loss = sum(out.sum() for out in outs)
        assert isinstance(loss, torch.Tensor)
        chosen = torch.autograd.grad(loss, [x, w], allow_unused=True, retain_graph=True)
        loss.backward()
        return [seen(grad) for grad in (*chosen, x.grad, w.grad)]

    assert_same_seen(name, wrap, use)
