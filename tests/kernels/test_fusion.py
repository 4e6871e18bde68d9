"""Which nodes share a kernel, and what the kernels look like."""

import pytest
import torch
from torch.nn import functional as F

import aotdist
from tests.kernels.reference import Emissions, assert_same


@pytest.fixture
def emissions(monkeypatch: pytest.MonkeyPatch) -> Emissions:
    return Emissions(monkeypatch)


def numbers(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator).to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


ONE_KERNEL = {
    "a chain": lambda x: (x * 2 + 1).exp().relu(),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: rms_norm(x, x[0]),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax of columns": lambda x: torch.softmax(x, 0),
    "log softmax, transposed": lambda x: torch.log_softmax(x, -1).t().contiguous(),
    "a reshape on the way": lambda x: ((x + 1).view(2, 3, -1) * 2).sum(-1),
    "siblings": lambda x: (x.sin(), x.cos(), x.sum(1)),
    "rotated halves": lambda x: torch.cat((-x[:, 32:], x[:, :32]), -1) * x + x,
    "padded": lambda x: F.pad(x.exp(), (1, 2)) + 1,
    "a sum of what is joined": lambda x: torch.cat((x, x * 2), -1).sum(-1),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_is_one_kernel(name: str, emissions: Emissions) -> None:
    assert_same(ONE_KERNEL[name], numbers(6, 64))
    assert emissions.num_kernels() == 1


def test_a_matmul_stays_a_library_call_between_two_kernels(emissions: Emissions) -> None:
    assert_same(lambda x, w: F.gelu((x + 1) @ w).sum(-1), numbers(8, 16), numbers(16, 4))
    (fused,) = emissions.made
    assert len(fused.kernels) == 2
    assert [str(node.target) for node in fused.reasons] == ["aten.mm.default"]


def test_what_a_matmul_needs_is_not_held_back_by_what_comes_after_it(emissions: Emissions) -> None:
    """`y` is read before the product and after it: one kernel for both would wait for itself."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return (y @ w).sum(-1, keepdim=True) + y

    assert_same(program, numbers(8, 16), numbers(16, 16))
    assert emissions.num_kernels() == 2


def test_a_sum_is_not_taken_where_only_some_of_it_is_read(emissions: Emissions) -> None:
    def joined(x: torch.Tensor) -> torch.Tensor:
        total = (x * 2).sum(-1, keepdim=True)
        return torch.cat((total, x), -1).exp().sum(-1)

    assert_same(joined, numbers(5, 7))


def test_a_cast_is_computed_by_each_of_its_readers(emissions: Emissions) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = w.float()
        return x * wide, (x @ x.t()).sum(1) + wide[:6].sum()

    assert_same(program, numbers(6, 64), numbers(64, dtype=torch.bfloat16))
    assert not any("convert" in store.buffer for kernel in kernels(emissions) for store in kernel.stores)


def kernels(emissions: Emissions) -> list:
    return [one.kernel for fused in emissions.made for one in fused.kernels]


def test_contiguous_dimensions_become_one_variable(emissions: Emissions) -> None:
    assert_same(lambda x, y: x * y + 1, numbers(2, 3, 4, 5), numbers(2, 3, 4, 5))
    (kernel,) = kernels(emissions)
    assert [var.size for var in kernel.x] == [120]


def test_the_variable_that_is_contiguous_in_memory_runs_fastest(emissions: Emissions) -> None:
    assert_same(lambda x: x.exp(), numbers(4, 6).t())
    (kernel,) = kernels(emissions)
    assert [var.size for var in kernel.x] == [24]


def test_what_is_reduced_runs_along_memory(emissions: Emissions) -> None:
    x = numbers(2, 16, 4, 6).to(memory_format=torch.channels_last)
    assert_same(lambda x: F.group_norm(x, 4), x)
    (kernel,) = kernels(emissions)
    assert [var.size for var in kernel.r] == [24, 4]
    assert all((kernel.r[-1], 1) in load.index.terms for load in kernel.loads())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "program", [ONE_KERNEL["softmax"], ONE_KERNEL["layer norm"]], ids=["softmax", "norm"]
)
def test_a_long_row_is_reduced_in_loops(
    program, dtype: torch.dtype, emissions: Emissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotdist.kernels.launching.MAX_PERSISTENT", 64)
    monkeypatch.setattr("aotdist.kernels.launching._LOOPED_BLOCK", 32)
    assert_same(program, numbers(3, 100, dtype=dtype).requires_grad_())
    assert emissions.sources().count("for start in range") >= 3


def test_what_needs_no_sum_is_stored_in_the_loop_that_sums(emissions: Emissions) -> None:
    def with_bias_gradient(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp() * x
        return y, y.sum(0)

    assert_same(with_bias_gradient, numbers(300, 8), rtol=1e-5, atol=1e-5)
    assert emissions.num_kernels() == 1
    assert emissions.sources().count("for start in range") == 1


def test_rows_and_columns_of_a_square_are_summed_by_two_kernels(emissions: Emissions) -> None:
    assert_same(lambda x: (x.sum(0), x.sum(1)), numbers(16, 16))
    assert emissions.num_kernels() == 2


def test_every_kind_of_reduction_in_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotdist.kernels.launching.MAX_PERSISTENT", 4)
    monkeypatch.setattr("aotdist.kernels.launching._LOOPED_BLOCK", 4)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        wide = [x.sum(1), x.amax(1), x.amin(1), x.prod(1), x.mean(1), x.var(1), x.var(1, correction=0)]
        return [*wide, (x > 1).any(1), (x > -9).all(1), x.long().amax(1), x.long().sum(1), (x > 0).sum(1)]

    assert_same(program, numbers(5, 13, dtype=torch.float64))


def test_numbers_that_are_none_and_infinite_ones() -> None:
    x = numbers(4, 9)
    x[0, 1], x[1, 2], x[2, 3] = float("nan"), float("inf"), -float("inf")

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        each = [x.relu(), x.clamp(-1, 1), x.sign(), x.isnan(), x.isinf(), x.log1p(), x.expm1(), x.tanh()]
        return [*each, x.sigmoid(), x.amax(1), x.amin(1), x.maximum(x.flip(1)), torch.where(x > 0, x, -x)]

    assert_same(program, x)


def test_random_numbers_are_drawn_in_the_order_of_the_program() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        first = torch.rand_like(x)
        return torch.rand_like(x) * 2 + (first @ x).sum()

    assert_same(program, numbers(4, 4))


def test_a_program_without_kernels() -> None:
    assert_same(lambda x: x @ x, numbers(4, 4).requires_grad_())


def test_a_program_that_runs_on_the_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotdist.kernels.triton_seam.is_interpreting", lambda: False)
    with pytest.raises(aotdist.BadSettings, match="are on the CPU"):
        aotdist.compile(torch.sin, backend="triton")(numbers(3))


def test_triton_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotdist.kernels.triton_seam.is_installed", lambda: False)
    with pytest.raises(aotdist.BadSettings, match="needs Triton"):
        aotdist.compile(torch.sin, backend="triton")(numbers(3))


@pytest.mark.parametrize("length, heads", [(64, 8), (8, 4)], ids=["by the emitter", "by the program"])
def test_a_bias_that_every_sample_reads_is_brought_side_by_side(
    length: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emissions = Emissions(monkeypatch)

    def attention(scores: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        places = torch.arange(length)[None, :] - torch.arange(length)[:, None] + length
        bias = table[places].permute(2, 0, 1)[None]
        return (scores + (bias if length == 64 else bias.contiguous())).softmax(-1)

    assert_same(attention, numbers(3, heads, length, length), numbers(2 * length + 1, heads))
    (copy, softmax) = (one.kernel for fused in emissions.made[:1] for one in fused.kernels)
    assert copy.num_results * copy.num_reduced == heads * length * length
    loads = [load for load in softmax.loads() if "clone" in load.buffer]
    assert len(loads) == 1 and (softmax.r[0], 1) in loads[0].index.terms
