"""What is scattered is added up in one order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.reference import Emissions, assert_same


@given(st.integers(1, 3), st.data())
def test_sums_are_eagers(num_dims: int, data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 4)) for _ in range(num_dims)]
    parts = [data.draw(st.integers(0, size)) for size in sizes]
    dim = data.draw(st.integers(-num_dims, num_dims - 1))
    parts[dim] = data.draw(st.integers(0, 6))
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, sizes[dim], parts, generator=generator)
    more = data.draw(st.integers(0, 1))  # autograd wants a source of the size of the index
    source = torch.randn([part + more for part in parts], dtype=torch.float64, requires_grad=not more)
    assert_same(
        lambda x, source: x.scatter_add(dim, index, source),
        torch.randn(sizes, dtype=torch.float64, requires_grad=True),
        source,
    )


def test_none_are_left_to_atomic_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.tensor([[0, 0, 2], [1, 1, 1]])
    emissions = Emissions(monkeypatch)
    assert_same(lambda x: x.gather(1, index), torch.randn(2, 3, requires_grad=True))
    assert_same(lambda x: x.scatter_add(0, index[0], x.new_ones(3)), torch.tensor(4.0).expand(3).clone())
    left = {str(node.target) for fused in emissions.made for node in fused.reasons}
    assert "aten.index_put.default" in left
    assert not any("scatter_add" in name for name in left)


def test_sums_of_integers_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.tensor([0, 0, 2])
    emissions = Emissions(monkeypatch)
    assert_same(lambda x: x.scatter_add(0, index, x), torch.arange(3))
    assert {str(node.target) for fused in emissions.made for node in fused.reasons} == {
        "aten.scatter_add.default"
    }
