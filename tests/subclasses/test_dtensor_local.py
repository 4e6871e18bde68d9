"""Between DTensors and plain tensors: `to_local`, `from_local`, `full_tensor`, `local_map`."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor, ones, zeros
from torch.distributed.tensor.experimental import local_map

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.ranks.harness import World
from tests.subclasses.dtensors import (
    PLACEMENTS,
    S0,
    S1,
    SIZES,
    P,
    R,
    compare,
    grid,
    leaf,
    mine,
    numbers,
    without_history,
)

pytestmark = pytest.mark.ranks

EVEN = SIZES["even"]


def plain(mesh: DeviceMesh) -> torch.Tensor:
    """Other numbers on every rank."""
    return mine((2, 3)).requires_grad_()


def unwrapped_case(placement: str, size: str) -> None:
    """Strides of dimensions of one element are left out: a shard keeps those of the whole.

    So is how often autograd has seen what uneven shards are gathered into written.
    """
    fns = (
        lambda x: (x.to_local() * 2, x.full_tensor() * 2),
        lambda x: x.full_tensor() if size == "even" else x.full_tensor() * 1,
        lambda x: x.to_local() if size != "empty" else x.to_local() * 1,
    )
    for fn in fns:
        compare(fn, leaf(SIZES[size], PLACEMENTS[placement]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_out_of_dtensors(world2: World, placement: str, size: str) -> None:
    world2.run(unwrapped_case, placement, size)


def wrapped_case(placement: str) -> None:
    mesh, placements = grid(), [PLACEMENTS[placement]]

    def uneven(x: torch.Tensor) -> torch.Tensor:
        rows = 3 if dist.get_rank() == 0 else 2
        part = x.expand(3, 2, 3)[:rows].flatten(1)
        return DTensor.from_local(part, mesh, placements, shape=torch.Size((5, 6)), stride=(6, 1)) * 2

    compare(lambda x: DTensor.from_local(x, mesh, placements), plain)
    compare(lambda x: DTensor.from_local(x * 2, mesh, placements).full_tensor(), plain)
    compare(lambda x: (x, DTensor.from_local(x, mesh, placements) * 2), plain)
    if placement == "S0":
        compare(uneven, plain)
    if placement != "P":
        compare(lambda x: distribute_tensor(x, mesh, placements) * 2, plain)
        compare(lambda x: distribute_tensor(x, mesh, placements, src_data_rank=None) * 2, plain)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_into_dtensors(world2: World, placement: str) -> None:
    world2.run(wrapped_case, placement)


def gradients_case() -> None:
    """Gradients placed as they are said to be: of other ranks' parts of what was taken out, or put in."""
    mesh = grid()
    for placement in (R, P):
        for said in ([R], [P]):
            made = leaf(EVEN, placement)
            compare(lambda x, said=said: x.to_local(grad_placements=said) * 2, made)
            compare(lambda x, said=said: x.full_tensor(grad_placements=said) * 2, made)
    if "grad_placements" not in signature(DTensor.from_local).parameters:
        return  # torch 2.11
    for placement, said in ((R, R), (R, P), (P, R), (P, P), (S0, S0), (S1, S1)):

        def put_in(x: torch.Tensor, placement: Placement = placement, said: Placement = said) -> torch.Tensor:
            return DTensor.from_local(x, mesh, [placement], grad_placements=[said]) * 2

        compare(put_in, plain)


def test_gradients_of_given_placements(world2: World) -> None:
    world2.run(gradients_case)


def mixed_case() -> None:
    """Results of both kinds, from arguments of both kinds."""
    mesh = grid()

    def program(x: Any, y: torch.Tensor) -> Any:
        return x * 2, y + x.to_local().sum(), x.to_local(), DTensor.from_local(y, mesh, [R])

    def made_inside(x: Any) -> Any:
        return (
            x + zeros(4, 6, device_mesh=mesh, placements=[S0]) + ones(4, 6, device_mesh=mesh, placements=[R])
        )

    compare(program, leaf(EVEN, S0), plain)
    compare(made_inside, leaf(EVEN, S0))
    compare(lambda x: x.to_local().sum() * 2, leaf(EVEN, S0))
    compare(lambda x: DTensor.from_local(x.detach(), mesh, [S0]) * 2, plain)


def test_both_kinds(world2: World) -> None:
    world2.run(mixed_case)


def local_map_case() -> None:
    mesh = grid()
    columns, rows = leaf(EVEN, S1), leaf((6, 4), S0)

    def mapped(fn: Callable[..., Any], out: Any, **options: Any) -> Callable[..., Any]:
        return local_map(fn, out_placements=out, device_mesh=mesh, **options)

    product = mapped(torch.matmul, [P], in_placements=([S1], [S0]))
    compare(product, columns, rows)
    compare(lambda w, x: product(w * 2, x).redistribute(placements=[R]), columns, rows)
    anyhow = mapped(torch.matmul, [P], in_placements=([S1], [S0]), redistribute_inputs=True)
    compare(anyhow, leaf(EVEN, S0), leaf((6, 4), R))
    shared = mapped(torch.matmul, [S0], in_placements=([S0], [R]), in_grad_placements=([S0], [P]))
    compare(shared, leaf(EVEN, S0), leaf((6, 4), R))
    compare(mapped(lambda w: (w * 2, w.sum(), 3), ([S0], [P], None)), leaf(EVEN, S0))

    def reduced(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return funcol.wait_tensor(funcol.all_reduce(w @ x, "sum", mesh))

    made = (without_history(EVEN, S1), without_history((6, 4), S0))
    compare(mapped(reduced, [R], in_placements=([S1], [S0])), *made)


def test_local_map(world2: World) -> None:
    world2.run(local_map_case)


def unfinished_case() -> None:
    """An argument whose collective still runs is waited for."""
    mesh = grid()
    double = aotdist.compile(lambda x: x * 2, backend="fx")
    for seed in range(3):
        x = DTensor.from_local(mine((500, 500), seed), mesh, [P]).requires_grad_()
        given = x.redistribute(placements=[R], async_op=True)
        out = double(given)
        assert torch.equal(out.to_local(), x.detach().full_tensor() * 2)
        out.sum().backward()
        assert torch.equal(x.grad.to_local(), torch.full((500, 500), 2.0))
    reduced = funcol.all_reduce(mine((500, 500)), "sum", mesh)
    assert torch.equal(double(reduced), (numbers((500, 500), 100) + numbers((500, 500), 200)) * 2)


def test_collectives_that_still_run(world2: World) -> None:
    world2.run(unfinished_case)


def refusals_case() -> None:
    mesh = grid()
    refused: dict[str, Callable[[torch.Tensor], Any]] = {
        "exchanges Python objects": lambda x: DTensor.from_local(x, mesh, [R], run_check=True),
        "`c10d::reduce_`, a collective that writes": lambda x: dist.reduce(x, dst=0),
    }
    for reason, fn in refused.items():
        with pytest.raises(UnsupportedProgram, match=reason):
            aotdist.compile(fn, backend="fx")(torch.ones(2, 2))


def test_what_a_graph_cannot_hold_is_refused(world2: World) -> None:
    """The exchange of metadata, and collectives that write into what they are given."""
    world2.run(refusals_case)
