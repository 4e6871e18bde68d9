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


# The other two say what they need: a model and what it is trained with.
AROUND_A_LOOP = """
import torch, aotdist
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
loss_fn = lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(3)]
loss = loss_fn(model, *loader[0])
{}
"""


def test_examples_are_short() -> None:
    assert len(EXAMPLES) == 5
    assert all(len(example.splitlines()) <= 16 for example in EXAMPLES)


@pytest.mark.slow
def test_plain(tmp_path: Path) -> None:
    assert "training" in run(EXAMPLES[0], tmp_path)


@pytest.mark.ranks
def test_fsdp2(tmp_path: Path) -> None:
    assert "reduce_scatter_tensor" in run(EXAMPLES[1], tmp_path, ranks=2)


@pytest.mark.sweep
@pytest.mark.ranks
def test_tensor_parallel(tmp_path: Path) -> None:
    example = EXAMPLES[2].replace("@aotdist.compile", "@fx")
    run(AROUND_TENSOR_PARALLEL.format(example), tmp_path, ranks=2)


def test_whole_step(tmp_path: Path) -> None:
    example = EXAMPLES[3].replace("clip=1.0", 'clip=1.0, backend="fx"')
    assert run(AROUND_A_LOOP.format(example + "print(step.explain())"), tmp_path).startswith("train_step")


def test_behind_dynamo(tmp_path: Path) -> None:
    example = EXAMPLES[4].replace("compile_backward()", 'compile_backward(backend="fx")')
    shown = "compiled(torch.ones(6, 4))\nprint([region.name for region in aotdist.dynamo.regions()])"
    printed = run(AROUND_A_LOOP.format(example + shown), tmp_path)
    assert "backward" in printed and "forward" in printed
