"""What is said about neighbours in memory is so, and blocks lie along them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aotdist
from aotdist.kernels.access import fast_axis, vector_length
from aotdist.kernels.index import Index, Var, number, variable
from aotdist.kernels.ir import Constant, Expr, Kernel, Store
from aotdist.kernels.launching import config_of, is_persistent
from tests.kernels.reference import Emissions, assert_same

OUTER, INNER = Var("x", 0, 3), Var("x", 1, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def kernel_of(index: Index) -> Kernel:
    value = Expr(Constant(0.0), (), torch.float32)
    return Kernel("k", (OUTER, INNER), (), (Store("out", index, value, torch.float32),))


def value(index: Index, outer: int, inner: int) -> int:
    found = index.substitute({OUTER: number(outer), INNER: number(inner)})
    assert not found.terms
    return found.constant


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([0, 1, 8, 16, 32, 40, 64, 96])),
        st.tuples(st.sampled_from(["divide", "remainder"]), st.sampled_from([1, 4, 16, 24, 32, 64, 128])),
        st.tuples(st.just("times"), st.sampled_from([1, 2, 64])),
    ),
    max_size=4,
)


@given(st.sampled_from([0, 16, 20, 64, 128]), steps, steps, st.sampled_from(DTYPES))
def test_as_many_lie_side_by_side_as_it_says(scale, first, second, dtype):
    index = number(0)
    for chosen in (first, second):
        part = variable(OUTER) * scale + variable(INNER)
        for name, by in chosen:
            match name:
                case "add":
                    part = part + by
                case "divide":
                    part = part // by
                case "remainder":
                    part = part % by
                case _:
                    part = part * by
        index = index + part
    length = vector_length(kernel_of(index), index, dtype)
    for outer in range(OUTER.size):
        for start in range(0, INNER.size, length):
            places = [value(index, outer, start + at) for at in range(length)]
            assert places == list(range(places[0], places[0] + length))
            assert length == 1 or places[0] % length == 0


def test_a_shifted_row_is_found_beyond_quotients():
    index = variable(OUTER) * 64 + (variable(INNER) + 32) % 64
    assert vector_length(kernel_of(index), index, torch.bfloat16) == 8
    odd = variable(OUTER) * 63 + variable(INNER)
    assert vector_length(kernel_of(odd), odd, torch.float32) == 1


@pytest.fixture
def emissions(monkeypatch: pytest.MonkeyPatch) -> Emissions:
    return Emissions(monkeypatch)


@pytest.mark.parametrize("rows", [5, 300, 3000])
@pytest.mark.parametrize("program", [lambda x: x.sum(0), lambda x: torch.softmax(x, 0)])
def test_columns_are_summed_in_blocks_that_are_wide_along_them(program, rows, emissions: Emissions):
    assert_same(
        program, torch.randn(rows, 48, generator=torch.Generator().manual_seed(0)), rtol=1e-4, atol=1e-5
    )
    (emitted,) = emissions.made[0].kernels
    config = config_of(emitted.kernel, is_interpreted=False)
    assert fast_axis(emitted.kernel) == "x"
    assert config.xblock == 16
    assert is_persistent(emitted.kernel) == (config.rblock >= rows)


def test_rows_are_summed_in_blocks_that_are_as_long(emissions: Emissions):
    assert_same(lambda x: x.sum(1), torch.ones(48, 3000))
    (emitted,) = emissions.made[0].kernels
    assert fast_axis(emitted.kernel) == "r"
    assert config_of(emitted.kernel, is_interpreted=False).rblock == 4096


def test_what_is_shifted_within_a_row_is_read_as_a_whole(emissions: Emissions):
    def program(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(4, 2, 64).transpose(0, 1)
        return torch.cat((-heads[..., 32:], heads[..., :32]), -1)

    assert_same(program, torch.randn(4, 128))
    assert "tl.multiple_of" in emissions.sources()


@pytest.mark.parametrize("emulate_casts", [False, True])
def test_products_and_sums_are_rounded_once_only_where_casts_need_not_be_kept(
    emulate_casts, emissions: Emissions
):
    aotdist.compile(lambda x: x * 2 + 1, backend="triton", settings={"emulate_casts": emulate_casts})(
        torch.ones(4)
    )
    (emitted,) = emissions.made[0].kernels
    assert emitted.config.contracts is not emulate_casts
    assert emitted.config.options["enable_fp_fusion"] is not emulate_casts
