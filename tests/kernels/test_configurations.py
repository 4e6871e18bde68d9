"""Kernels have few ways to be cut into blocks, and compute the same in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aotdist.codegen import ahead
from aotdist.codegen.contract import Emission
from aotdist.codegen.triton import with_kernels
from aotdist.kernels import costs, emission, gpus, triton_seam
from aotdist.kernels.background import Background
from aotdist.kernels.compilation import Packed
from aotdist.kernels.costs import MOST, configurations
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.gpus import TARGETS, USUAL, Gpu
from aotdist.kernels.launching import MIN_COLUMNS, Config, config_of, num_stages_of
from aotdist.settings import Settings
from benchmarks.kernels.graphs import graphs_of
from tests.kernels.as_on_a_gpu import cut_as_on_a_gpu
from tests.kernels.reference import Emissions, assert_same


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def loss(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


def columns(x: Tensor) -> Tensor:
    return x.square().sum(0)


def both_ways(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, (x * 2).t().contiguous()


def many(x: Tensor, y: Tensor) -> list[Tensor]:
    return torch._foreach_mul([x, y], 2)


def as_on_a_gpu(program: Callable[..., object], *args: Tensor) -> list[EmittedKernel]:
    """The kernels of a program with the blocks that a GPU has; it is not run."""
    made = [
        emitted
        for _, graph in graphs_of(program, *args)
        for emitted in with_kernels(graph, keeps_casts=False, label="test").kernels
    ]
    return [replace(one, ways=(config_of(one.kernel, is_interpreted=False),)) for one in made]


@pytest.mark.parametrize(
    ("program", "sizes"),
    [
        (torch.nn.functional.gelu, (4096, 4096)),
        (norm, (4096, 2048)),
        (loss, (4096, 32000)),
        (columns, (4096, 4096)),
        (both_ways, (4096, 4096)),
    ],
)
def test_large_kernels_have_two_to_four_ways_with_the_usual_one_among_them(program, sizes):
    for emitted in as_on_a_gpu(program, torch.zeros(sizes, dtype=torch.bfloat16)):
        ways = configurations(emitted)
        assert 2 <= len(ways) <= MOST
        assert len(set(ways)) == len(ways)
        assert emitted.config in ways[:2]
        assert all(costs.estimate(emitted, way).fits for way in ways)


def test_what_takes_no_longer_than_a_launch_has_one_way():
    (emitted,) = as_on_a_gpu(F.gelu, torch.zeros(512, 512))
    assert configurations(emitted) == (emitted.config,)


def test_blocks_stay_as_wide_as_memory_is_read():
    (emitted,) = as_on_a_gpu(lambda x: x.sum(0), torch.zeros(8000, 4000, dtype=torch.bfloat16))
    assert all(way.xblock >= MIN_COLUMNS for way in configurations(emitted))


def test_several_members_keep_their_blocks():
    (emitted,) = as_on_a_gpu(many, torch.zeros(4096, 4096), torch.zeros(8192, 2048))
    assert len(emitted.members) == 2
    ways = configurations(emitted)
    assert len(ways) > 1
    assert {(way.xblock, way.rblock) for way in ways} == {(emitted.config.xblock, 1)}


def test_a_way_that_should_be_much_quicker_leads(monkeypatch: pytest.MonkeyPatch):
    (emitted,) = as_on_a_gpu(F.gelu, torch.zeros(4096, 4096))
    better = replace(emitted.config, num_warps=8)

    def estimate(_: EmittedKernel, config: Config) -> costs.Estimate:
        return costs.Estimate(1e-4 if config == better else 2e-4, fits=True)

    monkeypatch.setattr(costs, "estimate", estimate)
    assert configurations(emitted)[0] == better


def test_a_kernel_that_waits_less_costs_less():
    (emitted,) = as_on_a_gpu(lambda x: x.sum(0), torch.zeros(4096, 4096))
    few, more = (costs.estimate(emitted, replace(emitted.config, rblock=rblock)) for rblock in (32, 256))
    assert more.seconds < few.seconds
    assert more.seconds > emitted.num_bytes / emitted.gpu.bandwidth


def test_what_a_kernel_costs_is_a_matter_of_its_gpu():
    (usual,) = as_on_a_gpu(F.gelu, torch.zeros(8192, 8192))
    other = replace(usual, gpu=Gpu(usual.gpu.bandwidth / 2, usual.gpu.num_processors))
    fewer = replace(usual, gpu=Gpu(usual.gpu.bandwidth, usual.gpu.num_processors // 8))
    seconds = [costs.estimate(one, usual.config).seconds for one in (usual, other, fewer)]
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.1) and seconds[2] > 2 * seconds[0]


def test_kernels_are_for_the_gpu_that_is_here_and_artifacts_for_their_target(monkeypatch: pytest.MonkeyPatch):
    gpus._gpu_at.cache_clear()
    found = {"multiprocessor_count": 16, "mem_clock_rate": 2_619_000, "mem_bus_width": 5120}
    monkeypatch.setattr(triton_seam, "current_gpu", lambda: 0)
    monkeypatch.setattr(triton_seam, "properties_of", lambda device: found)
    monkeypatch.setattr(Background, "here", lambda: None)
    emissions = Emissions(monkeypatch)
    assert_same(columns, torch.randn(40, 512))
    (here,) = emissions.made[0].kernels
    assert here.gpu.num_processors == 16 and here.gpu.bandwidth == pytest.approx(3.35e12, rel=0.01)
    (_, graph), *_ = graphs_of(columns, torch.zeros(4096, 2112))
    (sums,) = with_kernels(graph, keeps_casts=False, label="test", gpu=here.gpu).kernels
    widths = [config_of(sums.kernel, is_interpreted=False, gpu=gpu).xblock for gpu in (here.gpu, USUAL)]
    assert widths == [64, 16]
    for target in TARGETS:
        monkeypatch.setattr(ahead, "pack", lambda one, of: Packed(b"", "", {}, {}, one.gpu.num_processors))
        emission = Emission("inference", None, Settings(), name="test")  # type: ignore[arg-type]
        emitted = ahead.TargetBackend(target=target).emit(graph, emission)
        assert {one.registers for one in emitted.fusion().kernels} == {gpus.GPUS[target].num_processors}
    found |= {"mem_clock_rate": 0}
    gpus._gpu_at.cache_clear()
    assert gpus.gpu_here() == Gpu(USUAL.bandwidth, 16)
    gpus._gpu_at.cache_clear()


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x[0, 0].expand(4096, 4096) * 2,
        lambda x: torch.zeros(4096, 4096),
        lambda x: torch.ones(4096, 4096).tril(),
    ],
    ids=["one number", "nothing", "places"],
)
def test_what_only_writes_costs_what_it_writes(program):
    (emitted,) = as_on_a_gpu(program, torch.zeros(1, 1))
    assert emitted.config in configurations(emitted)
    seconds = costs.estimate(emitted, emitted.config).seconds
    assert (
        emitted.num_bytes / emitted.gpu.bandwidth < seconds < 1.2 * emitted.num_bytes / emitted.gpu.bandwidth
    )


def test_what_writes_nothing_in_the_traced_call_costs_a_load():
    (emitted,) = as_on_a_gpu(lambda x: x * 2, torch.zeros(4))
    var = replace(emitted.kernel.x[0], size=0)
    none = replace(emitted, members=(replace(emitted.kernel, x=(var,)),), num_bytes=0)
    assert none.num_blocks == 0
    assert 0 < costs.estimate(none, none.config).seconds < 2e-6
    assert configurations(none) == (none.config,)


def test_a_loop_has_registers_for_all_that_it_keeps():
    """A variance keeps two numbers for each place: with 32 of these, a thread has too few registers."""
    x = torch.zeros(32, 65536, dtype=torch.bfloat16)
    (emitted,) = as_on_a_gpu(lambda x, y: torch.var_mean(x + y, -1), x, x.clone())
    assert not costs.estimate(emitted, replace(emitted.config, rblock=4096, num_warps=4)).fits
    assert costs.estimate(emitted, replace(emitted.config, rblock=2048, num_warps=4)).fits


def test_a_kernel_of_many_loads_has_blocks_that_fit():
    """A thread cannot hold 16 elements of each of 24 rows."""

    def program(x: Tensor) -> Tensor:
        return sum(row * number for number, row in enumerate(x.unbind(1))).sum(1)

    (emitted,) = as_on_a_gpu(program, torch.zeros(300, 24, 9216))
    assert not costs.estimate(emitted, emitted.config).fits
    first = configurations(emitted)[0]
    assert costs.estimate(emitted, first).fits


@pytest.mark.parametrize("rows, block", [(128, 32), (65, 32), (8, 256)])
def test_a_block_holds_all_that_it_reduces_at_once(rows: int, block: int):
    """Few rows are added up by threads that have several of them."""
    (emitted,) = as_on_a_gpu(lambda x: x.sum(0), torch.empty(rows, 2**17))
    assert "for start in" not in emitted.printed.source
    assert emitted.config.rblock >= rows and emitted.config.xblock == block


def test_blocks_are_wide_along_both_axes_that_memory_is_read_along():
    """The gradient of a group norm, one of whose operands is in channels-last."""
    x = torch.zeros(8, 256, 56, 56, dtype=torch.bfloat16)
    y = x.to(memory_format=torch.channels_last)
    (emitted,) = as_on_a_gpu(lambda x, y: (x * y).sum((2, 3)), x, y)
    assert emitted.config.xblock >= MIN_COLUMNS and emitted.config.rblock >= 64


@pytest.mark.parametrize(
    "length, dtype, stages",
    [(1024, torch.bfloat16, 4), (4096, torch.float32, 4), (8192, torch.float32, 1), (128, torch.bfloat16, 1)],
)
def test_a_norm_backward_asks_for_rows_ahead_as_far_as_shared_memory_goes(
    length: int, dtype: torch.dtype, stages: int
):
    x, weight = (
        torch.zeros(*sizes, dtype=dtype, requires_grad=True) for sizes in ((16384, length), (length,))
    )
    made = as_on_a_gpu(lambda x, weight: F.rms_norm(x, (length,), weight), x, weight)
    (backward,) = (one for one in made if one.kernel.p is not None)
    assert num_stages_of(backward.kernel) == stages
    assert ("num_stages" in backward.printed.source) == (stages > 1)
    assert backward.config.xblock * backward.config.rblock == max(4096, length)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(MOST))
@pytest.mark.parametrize("program", [F.gelu, norm, loss, columns, both_ways])
def test_every_way_computes_the_same(number, program, monkeypatch: pytest.MonkeyPatch):
    def turned(emitted: EmittedKernel) -> tuple[Config, ...]:
        ways = configurations(emitted)
        return ways[number % len(ways) :] + ways[: number % len(ways)]

    cut_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(emission, "configurations", turned)
    emissions = Emissions(monkeypatch)
    x = torch.randn(72, 2400, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert_same(program, x, rtol=1e-4, atol=1e-5)
    assert any(len(one.ways) > 1 for fused in emissions.made for one in fused.kernels)
