"""The examples run as a new user runs them, on one rank and on two."""

from collections.abc import Sequence
from importlib.metadata import entry_points

import pytest

from tests.house.tree import ROOT
from tests.scripts import run_python, run_script, torchrun

EXAMPLES = ROOT / "launch" / "examples"
ON_ONE_AND_ON_TWO = pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.sweep)])
IS_DECLARED = "aotdist" in entry_points(group="torch_dynamo_backends").names


def run(name: str, *options: str, ranks: int = 1, launcher: Sequence[str] = ()) -> list[str]:
    if ranks == 1 and "--eager" in options:  # what a new user's is compared with
        return run_script(EXAMPLES / name, *options).splitlines()
    return run_python(*launcher, *torchrun(ranks), str(EXAMPLES / name), *options).splitlines()


@pytest.mark.ranks
@ON_ONE_AND_ON_TWO
def test_train_step(ranks: int) -> None:
    *losses, graphs = run("train_step.py", ranks=ranks)
    assert losses == run("train_step.py", "--eager", ranks=ranks)
    assert len(losses) == 3 and graphs.startswith("2 graphs")


@pytest.mark.ranks
@ON_ONE_AND_ON_TWO
def test_experts(ranks: int) -> None:
    *losses, graphs = run("experts.py", ranks=ranks)
    assert losses == run("experts.py", "--eager", ranks=ranks)
    assert len(losses) == 3 and graphs == "1 graphs"


@pytest.mark.sweep
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.skipif(
    not IS_DECLARED, reason="aotdist was installed before it had the entry point: `make setup`"
)
def test_torch_compile(ranks: int) -> None:
    *losses, regions = run("torch_compile.py", ranks=ranks)
    assert losses == run("torch_compile.py", "--eager", ranks=ranks)
    assert len(losses) == 3 and regions.startswith("forward [") and regions.endswith(": 1")


@pytest.mark.sweep
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", [(), ("--dynamo",)], ids=["prepare", "dynamo"])
def test_accelerate_loop(ranks: int, way: tuple[str, ...]) -> None:
    lines = run("accelerate_loop.py", *way, ranks=ranks)
    assert lines == run("accelerate_loop.py", "--eager", *way, ranks=ranks)
    assert [line.split(":")[0] for line in lines[:3]] == ["epoch 0", "epoch 1", "epoch 2"]
    assert lines[3].startswith("gone on from the checkpoint: the same True")
    assert lines[4:] == ["16 weights to keep, the first of size [32, 2]"]


@pytest.mark.sweep
@pytest.mark.ranks
def test_accelerate_launch_shards_by_its_configuration() -> None:
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(EXAMPLES / "accelerate.yaml")]
    assert run("accelerate_loop.py", launcher=launcher) == run("accelerate_loop.py", "--eager", ranks=2)


@pytest.mark.sweep
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_hf_trainer(ranks: int) -> None:
    found = [line for line in run("hf_trainer.py", ranks=ranks) if not line.startswith("{")]
    eager = [line for line in run("hf_trainer.py", "--eager", ranks=ranks) if not line.startswith("{")]
    assert found == [*eager, "1 graphs"] and len(eager) == 3


@pytest.mark.sweep
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "options"), [(1, ()), (2, ()), (2, ("--shard",))], ids=["1", "2 with DDP", "2 with FSDP2"]
)
def test_fabric_loop(ranks: int, options: tuple[str, ...]) -> None:
    *losses, graphs = run("fabric_loop.py", *options, ranks=ranks)
    assert losses == run("fabric_loop.py", "--eager", *options, ranks=ranks)
    assert len(losses) == 3 and graphs.endswith("graphs")
