"""Ranks that compiled other things tell rank 0, which shows it; nobody waits for a collective."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import aotdist
from tests.ranks.harness import World

pytestmark = pytest.mark.ranks


def explained(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3))
    for layer in model:
        fully_shard(layer)
    aotdist.compile(fully_shard(model), backend="fx")
    model(torch.randn(5, 4)).sum().backward()
    if dist.get_rank() == 0:
        aotdist.explain(model, html=folder / "alone.html")
    dist.barrier()
    aotdist.explain(model, html=folder / "together.html")


def shown(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*)</script>', page)
    assert found
    (program,) = json.loads(found[1])
    return program


def test_rank_0_shows_how_the_others_differ(world2: World, tmp_path: Path) -> None:
    world2.run(explained, tmp_path)
    alone, program = (shown((tmp_path / f"{name}.html").read_text()) for name in ("alone", "together"))
    assert alone["ranks"] == {"others": [], "missing": [1], "differences": {}}
    assert program["ranks"]["others"] == [1] and program["ranks"]["missing"] == []
    differences = program["ranks"]["differences"]
    weight = differences["input 0.weight"]
    assert "around f32[2, 4]" in weight["0"] and "around f32[1, 4]" in weight["1"]
    gather = program["collectives"][0]
    assert gather["operator"].startswith("all_gather") and gather["bytes"] > 0 and gather["readers"]
