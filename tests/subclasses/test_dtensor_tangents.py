"""Gradients that arrive placed, or laid out, otherwise than was assumed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

import aotdist
from aotdist.trace.later_backwards import LaterBackwards
from tests.ranks.harness import World
from tests.subclasses.dtensors import PLACEMENTS, S0, S1, SIZES, R, Size, grid, leaf, mine, spread

pytestmark = pytest.mark.ranks

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: x * x,
    "passed on": lambda x: x + 1,
    "transposed": lambda x: x.t(),
    "a matrix product": lambda x: x @ x.t(),
    "a sum": lambda x: x.sum(0),
    "redistributed": lambda x: (x * 2).redistribute(placements=[R]),
}


def gradient(mesh: DeviceMesh, size: Size, placement: Placement, *, transposed: bool) -> torch.Tensor:
    """Of some placement, and of strides that are those of the transposed."""
    if not transposed:
        return spread(mesh, size, placement, seed=7)
    return spread(mesh, tuple(reversed(size)), _other_dim(placement), seed=7).t()


def _other_dim(placement: Placement) -> Placement:
    return {S0: S1, S1: S0}.get(placement, placement)  # pyright: ignore[reportCallIssue, reportArgumentType]


def alone_case() -> None:
    """What one of several results brings the leaf, whose gradient as a whole is placed otherwise."""

    def program(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return x * x, x.diagonal().redistribute(placements=[R])

    def placed(call: Callable[..., Any]) -> list[Any]:
        found: list[Any] = []
        for chosen in ((0,), (1,), (0, 1)):
            x: Any = leaf(SIZES["even"], S0)(grid())
            results = call(x)
            outs = [results[k] for k in chosen]
            torch.autograd.backward(outs, [torch.ones_like(out, requires_grad=False) for out in outs])
            found.append((x.grad.placements, x.grad.full_tensor().tolist()))
        return found

    assert placed(aotdist.compile(program, backend="fx")) == placed(program)


def test_results_differentiated_alone(world2: World) -> None:
    world2.run(alone_case)


@contextmanager
def traced_later() -> Generator[list[Any]]:
    """The backwards that are traced when gradients arrive."""
    found: list[Any] = []
    trace = LaterBackwards.of_kinds
    LaterBackwards.of_kinds = lambda *args: (found.append(args), trace(*args))[1]  # type: ignore[method-assign]
    try:
        yield found
    finally:
        LaterBackwards.of_kinds = trace


def arriving_case(program: str, source: str) -> None:
    """The leaf's gradient is eager's, bit for bit, placements and strides included."""
    mesh, fn = grid(), PROGRAMS[program]
    compiled = aotdist.compile(fn, backend="fx", dynamic=False)
    for size in ("even", "uneven"):
        for placement in PLACEMENTS.values():
            for transposed in (False, True):
                found = []
                for call in (fn, compiled):
                    x = leaf(SIZES[size], PLACEMENTS[source])(mesh)
                    out = call(x)
                    if out.dim() < 2 and (transposed or placement == S1):
                        break
                    out.backward(gradient(mesh, tuple(out.shape), placement, transposed=transposed))
                    found.append(x.grad)
                if found:
                    _assert_same(*found)


def _assert_same(eager: Any, compiled: Any) -> None:
    assert eager.placements == compiled.placements
    assert eager.stride() == compiled.stride()
    assert torch.equal(eager.to_local(), compiled.to_local())


@pytest.mark.parametrize("source", ["R", "S0"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_any_placement(world2: World, program: str, source: str) -> None:
    world2.run(arriving_case, program, source)


def exact_case() -> None:
    """What arrives as assumed: bit for bit, placements and strides included."""
    mesh = grid()
    for fn in PROGRAMS.values():
        for placement in (R, S0, S1):
            found = []
            for call in (fn, aotdist.compile(fn, backend="fx")):
                x = leaf(SIZES["uneven"], placement)(mesh)
                out = call(x)
                settled = [R if p.is_partial() else p for p in out.placements]
                gradient = spread(mesh, tuple(out.shape), *settled, seed=7)
                out.backward(gradient)
                found.append(x.grad)
            _assert_same(*found)


def test_what_was_assumed(world2: World) -> None:
    world2.run(exact_case)


def converted_case(way: str) -> None:
    """Where no other backward can be traced, gradients are redistributed, and equal as a whole."""

    def program(x: Any, scale: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = x * scale
        if way == "the backward writes":
            out.register_hook(count)
        return out, out * 2

    def count(_: torch.Tensor) -> None:
        calls.add_(1)

    mesh, found, calls = grid(), [], torch.zeros(())
    settings = aotdist.Settings(dynamic=way == "symbolic sizes")
    for call in (program, aotdist.compile(program, backend="fx", settings=settings)):
        x, scale = leaf(SIZES["even"], R)(mesh), spread(mesh, SIZES["even"], R, seed=3)
        first, second = call(x, scale)
        if way == "watched":
            first.register_hook(lambda grad: None)
        (first * spread(mesh, SIZES["even"], S0, seed=4)).sum().backward(retain_graph=True)
        (second * spread(mesh, SIZES["even"], S1, seed=5)).sum().backward()
        found.append(x.grad.full_tensor())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("way", ["symbolic sizes", "watched", "the backward writes"])
def test_converted(world2: World, way: str) -> None:
    world2.run(converted_case, way)


def compilers_case(backend: Any) -> None:
    """A gradient that comes as its product with a sharded factor outside has it."""
    mesh, found = grid(), []
    program = PROGRAMS["elementwise"]
    for call in (program, aotdist.compile(program, backend=backend)):
        x = leaf(SIZES["even"], R)(mesh)
        (call(x) * spread(mesh, SIZES["even"], S0, seed=4)).sum().backward()
        found.append(x.grad)
    assert found[0].placements == found[1].placements == (S0,)
    torch.testing.assert_close(*(grad.to_local() for grad in found))


@pytest.mark.parametrize("backend", ["fx", "inductor", "triton"])
def test_compiled_for_other_placements(world2: World, backend: str) -> None:
    world2.run(compilers_case, backend)


def unfinished_case() -> None:
    """A gradient whose collective still runs is waited for; plain ones have a backward of their own, once."""
    mesh = grid()
    double = aotdist.compile(lambda x: x * 2, backend="fx")
    with traced_later() as later:
        for _ in range(2):
            x = leaf((400, 400), R)(mesh)
            double(x).redistribute(placements=[S0], async_op=True).square().sum().backward()
            assert torch.equal(x.grad.to_local(), x.detach().to_local() * 8)
        assert not later
        for _ in range(2):
            x = leaf((4, 6), S0)(mesh)
            double(x).backward(mine((4, 6)))
            assert type(x.grad) is torch.Tensor and torch.equal(x.grad, mine((4, 6)) * 2)
        assert len(later) == 1


def test_of_other_kinds(world2: World) -> None:
    world2.run(unfinished_case)


def accumulated_case() -> None:
    """Gradients of several calls meet at one leaf, as in eager, though each came placed otherwise."""
    mesh, fn = grid(), PROGRAMS["elementwise"]
    found = []
    for call in (fn, aotdist.compile(fn, backend="fx")):
        x = leaf(SIZES["even"], S0)(mesh)
        for placement in PLACEMENTS.values():
            call(x).backward(spread(mesh, SIZES["even"], placement, seed=7))
        found.append(x.grad)
    _assert_same(*found)


def test_accumulated(world2: World) -> None:
    world2.run(accumulated_case)
