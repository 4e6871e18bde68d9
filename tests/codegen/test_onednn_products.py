"""Products by oneDNN: as exact as MKL's, of matrices that lie anyhow, and only where they are faster."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import aotdist
from aotdist.codegen import inductor_rewrites
from aotdist.codegen.inductor import InductorBackend
from aotdist.settings import Settings
from tests.codegen.captured import captured, emission

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

LAYOUTS = {
    "by rows": lambda rows, columns: torch.randn(rows, columns),
    "by columns": lambda rows, columns: torch.randn(columns, rows).t(),
    "every other row": lambda rows, columns: torch.randn(2 * rows, columns)[::2],
    "every other column": lambda rows, columns: torch.randn(rows, 2 * columns)[:, ::2],
    "a block": lambda rows, columns: torch.randn(rows + 3, columns + 5)[3:, 5:],
    "one row, expanded": lambda rows, columns: torch.randn(1, columns).expand(rows, columns),
    "overlapping rows": lambda rows, columns: torch.randn(3 * rows + columns).as_strided(
        (rows, columns), (3, 1)
    ),
}


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL is taken to be slow here."""
    monkeypatch.setattr(inductor_rewrites, "_mkl_is_slow", lambda: True)


@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_layouts(left, right):
    torch.manual_seed(0)
    a, b = LAYOUTS[left](24, 40), LAYOUTS[right](40, 16)
    found = torch.ops.aotdist.onednn_mm(a, b)
    assert found.is_contiguous()
    assert_close(found, a @ b)


def products(rows: int, dtype: torch.dtype = torch.float32) -> str:
    """What Inductor generates for a product of so many rows."""
    inputs = [torch.randn(rows, 256, dtype=dtype), torch.randn(256, 256, dtype=dtype)]
    graph = captured(lambda x, w: [x @ w.t()], inputs)
    emitted = InductorBackend().emit(graph, emission(graph))
    (found,) = emitted.call(list(inputs))
    assert_close(found, inputs[0] @ inputs[1].t(), rtol=1e-4, atol=1e-4)
    return emitted.source


@pytest.mark.usefixtures("preferred", "inductor_cache")
def test_large_products_only():
    assert "onednn_mm" in products(256)
    assert "onednn_mm" not in products(4)
    assert "onednn_mm" not in products(256, torch.float64)


@pytest.mark.usefixtures("preferred", "inductor_cache")
def test_who_switches_onednn_off():
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        assert "onednn_mm" not in products(256)
    finally:
        torch._C._set_mkldnn_enabled(before)


@pytest.mark.usefixtures("inductor_cache")
def test_where_mkl_is_fast(monkeypatch):
    monkeypatch.setattr(inductor_rewrites, "_mkl_is_slow", lambda: False)
    assert "extern_kernels.mm" in products(256)


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(param.grad for param in model.parameters())]


def layers(*, bias: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 192, bias=bias), nn.GELU(), nn.Linear(192, 256, bias=bias))


@pytest.mark.usefixtures("preferred", "inductor_cache")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_a_model_trains_as_in_eager(bias, dynamic):
    model, other = layers(bias=bias), layers(bias=bias)
    aotdist.compile(model, backend="inductor", settings=Settings(dynamic=dynamic))
    for rows in (256, 300):
        x = torch.randn(rows, 256)
        assert_close(results(model, x), results(other, x))
        model.zero_grad()
        other.zero_grad()
