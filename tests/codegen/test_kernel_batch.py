"""Several kernels in one translation unit."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from aotdist.codegen.kernel_batch import (
    KERNELS_PER_UNIT,
    CppKernel,
    KernelBatch,
    PendingKernel,
    entry_name,
    unit_source,
)
from aotdist.torch_seam.inductor import compile_threads

pytestmark = pytest.mark.usefixtures("inductor_cache")

SCALE = """
#include <torch/csrc/inductor/cpp_prefix.h>
static float factor() {{ return {factor}; }}
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0)
{{
    for (int64_t i = 0; i < ks0; ++i) out_ptr0[i] = in_ptr0[i] * factor();
}}
"""
TYPES = ("const float*", "float*", "const int64_t")


def scale(factor: float) -> CppKernel:
    return CppKernel(TYPES, SCALE.format(factor=factor))


def test_helpers_of_one_name_stay_apart():
    source = unit_source([scale(2.0), scale(3.0)])
    assert source.count("#include <torch/csrc/inductor/cpp_prefix.h>") == 1
    assert "namespace unit_0" in source and "namespace unit_1" in source
    assert 'extern "C"  void  kernel' not in source


@pytest.mark.parametrize("source", ['extern "C" int kernel() {}', SCALE.format(factor=1) * 2, "// nothing"])
def test_a_kernel_of_another_form_is_left_alone(source: str):
    assert not CppKernel(TYPES, source).mergeable
    assert KernelBatch().add(TYPES, source) is None


def batch_of(kernels: list[CppKernel]) -> tuple[KernelBatch, dict[str, object]]:
    batch = KernelBatch()
    scope: dict[str, object] = {
        entry_name(i): batch.add(kernel.argtypes, kernel.source) for i, kernel in enumerate(kernels)
    }
    batch.submit(scope)
    return batch, scope


def apply(kernel: object, factor: float) -> None:
    result = torch.empty(3)
    kernel(torch.ones(3), result, 3)  # type: ignore[operator]
    assert result.tolist() == [factor] * 3


def test_kernels_are_put_in_the_place_of_their_stand_ins():
    batch, scope = batch_of([scale(2.0), scale(3.0)])
    stand_in = scope["kernel_0"]
    assert isinstance(stand_in, PendingKernel)
    batch.finish()
    assert not any(isinstance(value, PendingKernel) for value in scope.values())
    apply(scope["kernel_0"], 2.0)
    apply(scope["kernel_1"], 3.0)
    apply(stand_in, 2.0)
    batch.finish()


def test_a_stand_in_that_is_called_waits():
    _, scope = batch_of([scale(4.0)])
    apply(scope["kernel_0"], 4.0)
    assert not isinstance(scope["kernel_0"], PendingKernel)


def test_wrong_arguments_are_errors_not_crashes():
    batch, scope = batch_of([scale(2.0)])
    batch.finish()
    with pytest.raises(RuntimeError, match="kernel_0 takes 3 arguments"):
        scope["kernel_0"](torch.ones(3))  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="expected an int argument"):
        scope["kernel_0"](torch.ones(3), torch.ones(3), "three")  # type: ignore[operator]


def test_what_a_kernel_throws_arrives_in_python():
    throwing = SCALE.format(factor=1).replace("for (", 'if (ks0 == 7) throw std::runtime_error("7"); for (')
    batch, scope = batch_of([CppKernel(TYPES, throwing)])
    batch.finish()
    with pytest.raises(RuntimeError, match="7"):
        scope["kernel_0"](torch.ones(3), torch.empty(3), 7)  # type: ignore[operator]


def test_kernels_that_cannot_share_a_unit_are_compiled_apart():
    greedy = "#define kernel_1 0x\n" + SCALE.format(factor=5)
    batch, scope = batch_of([CppKernel(TYPES, greedy), scale(6.0)])
    batch.finish()
    apply(scope["kernel_0"], 5.0)
    apply(scope["kernel_1"], 6.0)


def test_an_error_in_a_kernel_is_the_compilers_own():
    batch, scope = batch_of([CppKernel(TYPES, SCALE.format(factor="undeclared"))])
    with pytest.raises(Exception, match="undeclared"):
        batch.finish()
    with pytest.raises(Exception, match="undeclared"):
        scope["kernel_0"](torch.ones(3), torch.ones(3), 3)  # type: ignore[operator]


def test_large_batches_are_spread_over_the_cores(monkeypatch: pytest.MonkeyPatch):
    units: list[str] = []

    def submit(source: str) -> Any:
        units.append(source)

    monkeypatch.setattr("aotdist.codegen.kernel_batch.submit_cpp_module", submit)
    batch_of([scale(i) for i in range(KERNELS_PER_UNIT)])
    assert len(units) == 1
    units.clear()
    batch_of([scale(i) for i in range(KERNELS_PER_UNIT * 4)])
    assert len(units) == min(4, compile_threads())
    assert sum(source.count("namespace unit_") for source in units) == 2 * 4 * KERNELS_PER_UNIT


LOOKUP = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const int64_t* in_ptr0, float* out_ptr0, const int64_t ks0)
{
    #pragma omp parallel num_threads(2)
    {
        {
            #pragma omp for
            for(int64_t x0=0; x0<ks0; x0+=1)
            {
                { TORCH_CHECK(in_ptr0[x0] < 5, "index out of bounds: 0 <= tmp1 < 5L"); }
                out_ptr0[x0] = 1;
            }
        }
        {
            #pragma omp for schedule(static) collapse(2)
            for(int64_t x0=0; x0<1; x0+=1)
            {
                for(int64_t x1=0; x1<ks0; x1+=1)
                {
                    TORCH_CHECK(in_ptr0[x1] != 3, "index out of bounds: 0 <= tmp2 < 3L");
                    out_ptr0[x1] += 1;
                }
            }
        }
    }
}
"""


def test_a_bad_index_in_a_loop_of_several_threads_is_an_error():
    """And not the end of the process; the other turns are done."""
    batch, scope = batch_of([CppKernel(("const int64_t*", "float*", "const int64_t"), LOOKUP)])
    batch.finish()
    kernel: Any = scope["kernel_0"]
    for bad, found in ((9, "tmp1 < 5L"), (3, "tmp2 < 3L"), (0, None)):
        indices, result = torch.zeros(100, dtype=torch.int64), torch.zeros(100)
        indices[90] = bad
        with nullcontext() if found is None else pytest.raises(RuntimeError, match=found):
            kernel(indices, result, 100)
        assert result.sum() == (200 if found is None else 199)
