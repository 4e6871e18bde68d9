"""What a GPU replays is what it runs; `tests/codegen/test_cuda_graphs.py` says when it replays."""

from __future__ import annotations

import pytest
import torch

import aotdist
from tests.codegen.test_cuda_graphs import graphed, model, recordings, steps

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]


@pytest.mark.parametrize("backend", ["fx", "triton", "inductor"])
def test_training_is_recorded_at_the_second_step(backend: str, device: torch.device) -> None:
    plain, module = model().to(device), model().to(device)
    compiled = graphed(module, backend)
    found, expected = steps(compiled, module, 6), steps(aotdist.compile(plain, backend=backend), plain, 6)
    torch.testing.assert_close(found, expected)
    assert recordings(compiled, "forward").replays == 5
    assert recordings(compiled, "backward").replays == 5


def test_dropout_draws_what_eager_draws(device: torch.device) -> None:
    x = torch.ones(1000, device=device)
    drop = graphed(lambda x: torch.nn.functional.dropout(x, 0.5) * 2)
    torch.manual_seed(3)
    expected = [torch.nn.functional.dropout(x, 0.5) * 2 for _ in range(5)]
    torch.manual_seed(3)
    assert all(torch.equal(drop(x), out) for out in expected)


def test_recordings_share_a_pool_and_not_their_results(device: torch.device) -> None:
    one, other = graphed(lambda x: (x.sin() * 2).cumsum(0)), graphed(lambda x: (x.cos() + 1).cumsum(0))
    for number in range(5):
        x = torch.full((1 << 16,), float(number), device=device)
        mine, theirs = one(x), other(x)
        torch.testing.assert_close(mine, (x.sin() * 2).cumsum(0))
        torch.testing.assert_close(theirs, (x.cos() + 1).cumsum(0))
