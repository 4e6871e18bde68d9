"""What holds something of a rank is found by that rank alone; the rest is found by all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aotdist.artifacts.cache.key import key_of
from aotdist.settings import Settings
from tests.artifacts.cache import cases_ranks
from tests.artifacts.cache.of_a_rank import OF_A_RANK, Program
from tests.codegen.captured import captured
from tests.ranks.harness import World


def key_for(program: Program) -> str:
    graph = captured(lambda x: [program(x)], [torch.randn(4, 3)])
    mode = graph.placeholders()[0].meta["val"].fake_mode
    return key_of("inference", graph, mode, Settings())


@pytest.mark.parametrize("what", OF_A_RANK)
def test_keys_differ_by_what_is_of_a_rank(what: str) -> None:
    made = OF_A_RANK[what]
    assert key_for(made(0)) == key_for(made(0))
    assert key_for(made(0)) != key_for(made(1))


@pytest.mark.ranks
def test_ranks_that_share_a_cache_compute_what_is_theirs(world2: World, tmp_path: Path) -> None:
    for found in world2.run(cases_ranks.each_its_own, str(tmp_path), timeout=110.0):
        assert found == dict.fromkeys(found, "compiled") and len(found) == 3
