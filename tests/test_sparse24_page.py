"""The examples in docs/sparse24.md run as they stand."""

from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.pages import python_blocks, run

FIRST, PACKED, ACTIVATIONS, SHARDED = python_blocks((ROOT / "docs" / "sparse24.md").read_text())


@pytest.mark.parametrize(
    "example, says",
    [(FIRST, "2:4 weight, row mask"), (PACKED, ""), (ACTIVATIONS, "")],
    ids=["first", "packed", "activations"],
)
def test_alone(example: str, says: str, tmp_path: Path) -> None:
    assert says in run(example, tmp_path)


@pytest.mark.sweep
@pytest.mark.ranks
def test_sharded(tmp_path: Path) -> None:
    assert "fully_shard" in SHARDED
    run(SHARDED, tmp_path, ranks=2)
