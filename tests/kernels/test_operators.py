"""Every operator of PyTorch's database gives eager's values and gradients through the emitter's kernels."""

import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import aotdist
from tests.kernels.reference import Emissions, assert_same
from tests.op_db.samples import Walk, operator_cases, operator_names

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="one version's database is enough"
)

CHUNKS = 10
RANDOM = {
    "nn.functional.rrelu",  # its decomposition draws other numbers than eager does, also for Inductor
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the database calls what is deprecated
        yield


def runs_here(program: Callable[..., Any], *args: Any) -> bool:
    """Whether a program runs eagerly."""
    try:
        program(*args)
    except Exception:
        return False
    return True


def check(
    chunk: int,
    dtype: torch.dtype,
    count: int,
    same: Callable[..., None] = assert_same,
    runs: Callable[..., bool] = runs_here,
) -> None:
    """The first samples of a chunk of the database's operators are the `same` as eager's, where it `runs`."""
    compared, faults = 0, list[str]()
    for name in operator_names()[chunk::CHUNKS]:
        cases = (case for case in operator_cases(name, Walk(dtype)) if not case.program.endswith("_"))
        for case in cases if name not in RANDOM else ():
            if case.number >= count:
                break
            scene = case.build()
            args, _ = scene.arguments()
            if not runs(scene.target, *args):
                continue
            compared += 1
            try:
                same(scene.target, *args)
            except aotdist.UnsupportedProgram:
                continue  # of the trace, the same for every backend
            except Exception:
                faults.append(f"{case}\n{traceback.format_exc()}")
    assert compared
    assert not faults, "\n\n".join(faults)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_first_samples(chunk: int) -> None:
    check(chunk, torch.float32, 1)


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_several_samples(chunk: int, dtype: torch.dtype) -> None:
    check(chunk, dtype, 4)


def test_most_operators_have_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    for name in ("softmax", "nn.functional.layer_norm", "nn.functional.gelu", "cat", "gather", "var_mean"):
        case = next(iter(operator_cases(name, Walk(torch.float32))))
        scene = case.build()
        assert_same(scene.target, *scene.arguments()[0])
    assert emissions.num_kernels() > 0
    assert {str(node.target) for fused in emissions.made for node in fused.reasons} == {
        "aten.index_put.default"  # the backward of `gather`, summed in one order
    }


def test_a_soft_margin_has_the_small_gradients_that_eager_has() -> None:
    x = torch.tensor([-1.0, 12.0, 20.0], requires_grad=True)
    assert_same(lambda x: torch.nn.functional.soft_margin_loss(x, torch.ones(3)), x, rtol=2e-6, atol=0)
