"""An index out of bounds under Inductor is an `IndexError` that names the line, and nothing else breaks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aotdist

pytestmark = pytest.mark.usefixtures("inductor_cache")


def loss(x: Tensor, table: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x + table[ids], labels)


@pytest.mark.parametrize("backend", ["inductor", "auto"])
def test_a_label_and_an_id_out_of_bounds(backend: str) -> None:
    compiled = aotdist.compile(loss, backend=backend)
    x, table = torch.randn(3, 5, requires_grad=True), torch.randn(4, 5)
    ids, labels = torch.tensor([0, 3, -1]), torch.tensor([4, -100, 1])
    for wrong in ("nothing", "an id", "a label", "nothing"):
        wrong_ids = torch.tensor([0, 4, 1]) if wrong == "an id" else ids
        wrong_labels = torch.tensor([4, 5, 1]) if wrong == "a label" else labels
        if wrong == "nothing":
            torch.testing.assert_close(compiled(x, table, ids, labels), loss(x, table, ids, labels))
            continue
        for call in (loss, compiled):
            with pytest.raises(IndexError):
                call(x, table, wrong_ids, wrong_labels)
        size = 4 if wrong == "an id" else 5
        with pytest.raises(
            aotdist.IndexOutOfBounds, match=rf"dimension of {size} elements(?s:.)*cross_entropy"
        ):
            compiled(x, table, wrong_ids, wrong_labels)
