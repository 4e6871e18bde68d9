"""All programs that the emitter's tests interpret are compiled for a GPU, too; and are what `fx` computes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import aotdist
from aotdist.torch_seam.trees import pytree
from tests.kernels.sources import SOURCES, Program
from tests.kernels.test_compilation import said_without_interpreting

MOST = 2e-6
"""By how much a result or a gradient may differ from that of `fx`, as a part of its greatest number."""


def assert_faultless(every: int, ways: int, *sources: str) -> None:
    *faults, last = said_without_interpreting("emission_sweep", "sm_90", every, ways, *sources)
    assert not faults, "\n".join(faults)
    num_graphs, _, num_compiled = (int(part.split()[0]) for part in last.split(", "))
    assert num_graphs > 8 and num_compiled > 4


@pytest.mark.timeout(300)
def test_one_program_in_many_is_compiled() -> None:
    assert_faultless(60, 1, "operators", "random", "one_kernel")


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("source", SOURCES)
def test_all_programs_are_compiled(source: str) -> None:
    assert_faultless(1, 4, source)


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the database calls what is deprecated
        yield


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("source", ["operators", "one_kernel", "narrow_models"])
def test_all_gradients_are_those_of_fx(source: str, quiet: None) -> None:
    """Not of random programs: many sum to nothing but rounding, and `test_programs` has them in double."""
    faults, count = [], 0
    for program in SOURCES[source](1):
        try:
            expected = results(program, "fx")
        except aotdist.UnsupportedProgram:
            continue  # of the trace, the same for every backend
        found = results(program, "triton")
        assert len(found) == len(expected)
        count += 1
        worst = max((difference(*pair) for pair in zip(found, expected, strict=True)), default=0.0)
        if not worst <= MOST:
            faults.append(f"{program.label}: {worst}")
    assert not faults and count, "\n".join(faults)


def results(program: Program, backend: str) -> list[Tensor | None]:
    """What a program returns, and the gradients of its leaves."""
    torch.manual_seed(0)
    compiled = aotdist.compile(program.function, backend=backend, settings=program.settings)
    outs = tensors_in(compiled(*program.args, **program.kwargs))
    given = [tensor for tensor in tensors_in((program.args, program.kwargs)) if tensor.requires_grad]
    leaves = [*program.leaves, *given]
    roots = [out for out in outs if out.requires_grad and out.dtype.is_floating_point]
    if not roots or not leaves:
        return [*outs]
    # At random: what is alike along a row cancels in a softmax's gradient, and leaves the rounding of each.
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(out.shape, dtype=out.dtype, generator=generator) for out in roots]
    return [*outs, *torch.autograd.grad(roots, leaves, weights, allow_unused=True)]


def tensors_in(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def difference(found: Tensor | None, expected: Tensor | None) -> float:
    """The largest of all elements, as a part of the greatest number; infinite if they are not of one kind."""
    if found is None or expected is None:
        return 0.0 if found is expected else torch.inf
    if (found.shape, found.dtype, found.layout) != (expected.shape, expected.dtype, expected.layout):
        return torch.inf
    one, other = (_numbers(tensor) for tensor in (found, expected))
    is_same = (one == other) | (one.isnan() & other.isnan())
    if is_same.all():
        return 0.0
    apart = torch.where(is_same, 0.0, (one - other).abs())
    greatest = other[other.isfinite()].abs().max() if other.isfinite().any() else torch.zeros(())
    return (apart.max() / greatest).nan_to_num(torch.inf, torch.inf).item()


def _numbers(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).double()
