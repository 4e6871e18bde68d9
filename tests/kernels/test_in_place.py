"""New values of inputs are stored where the old ones lie, if nobody misses those."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import aotdist
from benchmarks.kernels.optimizers import State, adamw, adamw_one_by_one, random_state
from benchmarks.models import LlamaShape
from tests.kernels.reference import Emissions
from tests.ranks.harness import World

_SHAPE = LlamaShape(dim=32, num_layers=1, num_heads=2, vocab=50, sequence=4, batch=1)


@pytest.fixture
def emissions(monkeypatch: pytest.MonkeyPatch) -> Emissions:
    return Emissions(monkeypatch)


def num_stored_in_place(emissions: Emissions) -> int:
    launches = [node.target for fused in emissions.made for node in fused.graph.gm.graph.nodes]
    return sum(result.into is not None for launch in launches for result in getattr(launch, "results", ()))


def test_a_step_stores_all_that_it_writes_in_place(emissions: Emissions) -> None:
    expected, found = random_state(_SHAPE), random_state(_SHAPE)
    for backend, state in (("fx", expected), ("triton", found)):
        aotdist.compile(adamw, backend=backend, settings={"is_compiling": True})(state)
    assert num_stored_in_place(emissions) == 4 * len(found["parameters"])
    torch.testing.assert_close(found["parameters"], expected["parameters"], rtol=2e-6, atol=1e-6)
    versions = [[tensor._version for tensor in state["parameters"]] for state in (found, expected)]
    assert versions[0] == versions[1]


def _shards(state: State) -> State:
    mesh = init_device_mesh("cpu", (2,))
    rows = {
        name: [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in row]
        for name, row in state.items()
        if name != "steps"
    }
    return rows | {"steps": state["steps"]}


def sharded_step() -> None:
    expected, found = (_shards(random_state(_SHAPE)) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        emissions = Emissions(patch)
        for backend, state in (("fx", expected), ("triton", found)):
            aotdist.compile(adamw_one_by_one, backend=backend, settings={"is_compiling": True})(state)
    assert emissions.num_kernels() == 2
    assert num_stored_in_place(emissions) == 4 * len(found["parameters"])
    for one, other in zip(found["parameters"], expected["parameters"], strict=True):
        torch.testing.assert_close(one.to_local(), other.to_local(), rtol=2e-6, atol=1e-6)  # type: ignore[attr-defined]
        assert one._version == other._version


@pytest.mark.ranks
def test_a_step_of_shards(world2: World) -> None:
    """Parameters as FSDP2 leaves them: what lies inside of a wrapper is written in place, too."""
    world2.run(sharded_step)


def _added(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2).add_(y)
    return y.sin()


def _also_returned(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return x + 0


def _old_returned(x: Tensor, y: Tensor) -> Tensor:
    old = x.exp()
    x.mul_(y)
    return old


def _old_read_by_a_product(x: Tensor, y: Tensor) -> Tensor:
    product = x @ y
    x.mul_(2)
    return product


def _old_read_late(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """`sin` and `cos` are one kernel, which runs when `x` has its new value; the product comes after it."""
    product = x.t() @ y.sin()
    x.mul_(2)
    return product, y.cos()


def _transposed(x: Tensor, y: Tensor) -> None:
    x.copy_(x.t() + 1)


def _shifted(x: Tensor, y: Tensor) -> None:
    x[1:].add_(x[:-1].clone())


def _read_again_in_part(x: Tensor, y: Tensor) -> Tensor:
    """The part that is joined is read under a condition: once more, and maybe later."""
    joined = torch.cat((x[:3], y[3:])) * 2
    x.add_(1)
    return joined


PROGRAMS: dict[str, tuple[Callable[[Tensor, Tensor], object], int]] = {
    "added": (_added, 1),
    "also returned": (_also_returned, 1),
    "an old value goes on": (_old_returned, 1),
    "an old value read by a product": (_old_read_by_a_product, 1),
    "an old value read late": (_old_read_late, 0),
    "transposed": (_transposed, 0),
    "shifted": (_shifted, 0),
    "read again in part": (_read_again_in_part, 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_old_values_are_not_missed(name: str, emissions: Emissions) -> None:
    program, num_in_place = PROGRAMS[name]
    x, y = (torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    expected, found = (x.clone(), y.clone()), (x.clone(), y.clone())
    results = program(*expected), aotdist.compile(program, backend="triton")(*found)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(results[1], results[0])
    assert num_stored_in_place(emissions) == num_in_place
