"""The README's examples run as they stand."""

from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.pages import python_blocks, run

EXAMPLES = python_blocks((ROOT / "README.md").read_text())

# The third example says "under torchrun" like the second, and leaves the process group to its reader.
AROUND_TENSOR_PARALLEL = """
import functools, torch, torch.distributed as dist, aotdist
dist.init_process_group("gloo")
fx = functools.partial(aotdist.compile, backend="fx")
{}
assert all(parameter.grad is not None for parameter in mlp.parameters())
dist.destroy_process_group()
"""


def test_examples_are_short() -> None:
    assert len(EXAMPLES) == 3
    assert all(len(example.splitlines()) <= 16 for example in EXAMPLES)


@pytest.mark.slow
def test_plain(tmp_path: Path) -> None:
    assert "training" in run(EXAMPLES[0], tmp_path)


@pytest.mark.ranks
def test_fsdp2(tmp_path: Path) -> None:
    assert "reduce_scatter_tensor" in run(EXAMPLES[1], tmp_path, ranks=2)


@pytest.mark.ranks
def test_tensor_parallel(tmp_path: Path) -> None:
    example = EXAMPLES[2].replace("@aotdist.compile", "@fx")
    run(AROUND_TENSOR_PARALLEL.format(example), tmp_path, ranks=2)
