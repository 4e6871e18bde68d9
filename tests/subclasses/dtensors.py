"""DTensors to call programs with, on worlds of several ranks, and the comparison with eager."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from aotdist.compiled import Compiled
from tests.semantics.observation import Scene, play, same_as_eager

Size: TypeAlias = tuple[int, ...]
Make: TypeAlias = Callable[[DeviceMesh], Any]
"""Makes an argument on a mesh."""

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()

SETTLED: Mapping[str, Placement] = {"R": R, "S0": S0, "S1": S1}
"""What a program may ask for; partial sums only operators make."""
PLACEMENTS: Mapping[str, Placement] = {**SETTLED, "P": P}
SIZES: Mapping[str, Size] = {"even": (4, 6), "uneven": (5, 3), "empty": (1, 6)}
"""On two ranks: shards alike; rows and columns that the mesh does not divide; a rank without rows."""


def placements_and_sizes(
    first: Container[tuple[str, str]], placements: Iterable[str] = PLACEMENTS
) -> pytest.MarkDecorator:
    """Runs a test for every `placement` and `size`, by name: the `first` always, others in the sweep."""
    return pytest.mark.parametrize(
        ("placement", "size"),
        [
            pytest.param(*pair, marks=() if pair in first else pytest.mark.sweep)
            for pair in itertools.product(placements, SIZES)
        ],
    )


def grid(*sizes: int) -> DeviceMesh:
    """All ranks in a row, or in a grid."""
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),))


@functools.cache
def row() -> DeviceMesh:
    """All ranks in a row, made once: a mesh is not to be made inside of a program."""
    return grid()


def numbers(size: Size, seed: int = 0) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def mine(size: Size, seed: int = 0) -> torch.Tensor:
    """Other numbers on every rank."""
    return numbers(size, seed + 100 * (1 + dist.get_rank()))


def spread(mesh: DeviceMesh, size: Size, *placements: Placement, seed: int = 0) -> DTensor:
    """A DTensor without history; the summands of a partial one are other numbers on every rank."""
    settled = [Replicate() if placement.is_partial() else placement for placement in placements]
    tensor = distribute_tensor(numbers(size, seed), mesh, settled, src_data_rank=None)
    if settled == list(placements):
        return tensor
    summands = mine(tensor.to_local().shape, seed)
    return DTensor.from_local(summands, mesh, placements, shape=tensor.shape, stride=tensor.stride())


def leaf(size: Size, *placements: Placement, seed: int = 0) -> Make:
    """A DTensor that gets a gradient."""
    return lambda mesh: spread(mesh, size, *placements, seed=seed).requires_grad_()


def non_leaf(size: Size, *placements: Placement, seed: int = 0) -> Make:
    """A DTensor that gets a gradient and may be written."""
    return lambda mesh: leaf(size, *placements, seed=seed)(mesh) * 1.5


def without_history(size: Size, *placements: Placement, seed: int = 0) -> Make:
    """A DTensor that gets no gradient."""
    return lambda mesh: spread(mesh, size, *placements, seed=seed)


def compare(
    fn: Callable[..., Any], *makers: Make, mesh: DeviceMesh | None = None, **options: Any
) -> Compiled:
    """Two calls, eager and compiled, nobody able to tell the difference; see `same_as_eager`."""
    on = mesh or grid()

    def build() -> Scene:
        return Scene(fn, tuple(make(on) for make in makers))

    return same_as_eager(build, **{"calls": 2, **options})


def refused_by_eager(fn: Callable[..., Any], *makers: Make, mesh: DeviceMesh | None = None) -> str | None:
    """What eager says if it cannot run the program, or differentiate it."""
    on = mesh or grid()
    args = tuple(make(on) for make in makers)
    try:
        play(Scene(fn, args), fn)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        return str(error)
    return None


def compared(fn: Callable[..., Any], *makers: Make) -> bool:
    """Whether eager runs the program, and differentiates it; then one call is compared."""
    if refused_by_eager(fn, *makers) is not None:
        return False
    compare(fn, *makers, calls=1)
    return True


def assert_few_are_refused(found: Sequence[Collection[str]], most: int) -> None:
    """Eager refuses the same programs, by name, on all ranks, and at `most` so many."""
    assert all(refused == found[0] for refused in found)
    assert len(found[0]) <= most, found[0]
