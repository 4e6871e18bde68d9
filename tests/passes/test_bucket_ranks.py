"""The passes on two real gloo ranks, one of which pads."""

import pytest
import torch

from tests.passes import cases_bucket
from tests.ranks.harness import World

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_and_reordered_collectives_give_the_same_bits(world2: World, dtype: torch.dtype) -> None:
    merged_a, merged_b = world2.run(cases_bucket.runs_alike, dtype)
    separate = 3 * sum(len(unit) for unit in cases_bucket.UNITS)
    assert merged_a == merged_b < separate
