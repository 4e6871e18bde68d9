"""Steps that are profiled: phases, modules, process groups, and a trace to open."""

import functools
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import aotdist
from aotdist.report.profile import Profile
from tests.ranks.harness import World


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def model_of(num_layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_layers)))


def trained(model: nn.Module, backend: str = "fx") -> Any:
    aotdist.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, 8)

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def lanes_in(path: Path) -> dict[str, list[str]]:
    """Names of the spans in the trace's lanes of ours."""
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    ours = [event for event in events if event.get("pid") == "aotdist"]
    names = {event["tid"]: event["args"]["name"] for event in ours if event["name"] == "thread_name"}
    return {
        name: [event["name"] for event in ours if event["ph"] == "X" and event["tid"] == tid]
        for tid, name in names.items()
    }


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_phases_and_modules(tmp_path: Path, name: str):
    found = aotdist.profile(trained(model_of()), steps=2, path=tmp_path / name)
    assert len(found.steps) == 2 and found.path == tmp_path / name
    assert {"Sequential forward", "Sequential backward", "Optimizer.step#SGD.step"} <= found.phases.keys()
    assert sum(found.phases.values()) == pytest.approx(sum(found.steps) / 2)  # of one step, and all of it
    assert {"0", "0.up", "1.down", "1.down (backward)"} <= found.modules.keys()
    assert found.modules["0"] >= found.modules["0.up"]
    assert found.exposed_percent == 0 and found.groups == () and not found.waits
    lanes = lanes_in(tmp_path / name)
    assert lanes["steps"] == ["step 0", "step 1"] and lanes["exposed communication"] == []
    assert "Sequential forward" in lanes["phases"] and "aten::addmm" in lanes["compute"]
    text = str(found)
    for said in (
        f"2 steps, {500 * sum(found.steps):.1f} ms each",
        "exposed communication 0.0 %",
        "Sequential b",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("wrap", "are_shown"),
    [
        (lambda loss: loss, True),
        (lambda loss: (loss, "more"), True),
        (lambda loss: {"loss": loss}, True),
        (lambda loss: loss.item(), True),
        (lambda loss: None, False),
        (lambda loss: torch.ones(2), False),
        (lambda loss: {"logits": loss}, False),
    ],
)
def test_losses_are_shown(wrap: Any, are_shown: bool):
    step, twin = trained(model_of()), trained(model_of())
    losses = [twin().item() for _ in range(4)]
    expected = losses[2:]  # after one to compile, and one to print what shows modules
    found = aotdist.profile(lambda: wrap(step()), steps=2)
    assert list(found.losses) == (expected if are_shown else [])
    assert (f"loss {expected[0]:.4g}, {expected[1]:.4g}\n" in str(found)) == are_shown


def test_the_profiler_itself_says_nothing():
    program = "import torch, aotdist; aotdist.profile(lambda: torch.ones(2) + 1, steps=1)"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_whole_training_step_shows_both_directions():
    model = model_of()
    step = aotdist.train_step(
        model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters()), backend="fx"
    )
    found = aotdist.profile(lambda: step(torch.ones(4, 8)))
    assert {"model.0.up", "model.0.up (backward)"} <= found.modules.keys()


def test_nothing_is_different_while_somebody_looks():
    ours, eager = model_of(), model_of()
    steps = trained(ours)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    aotdist.profile(steps, steps=2, warmup=1)
    for _ in range(4):  # once to compile, once to print what shows modules, twice
        eager(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"steps": 0}, "steps=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"path": "trace.txt"}, "end it in .json"),
        ({"path": "no/such/folder/trace.json"}, "does not exist"),
        ({"path": ""}, "`path` is ''"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(wrong: dict[str, Any], word: str):
    ran = []
    with pytest.raises(aotdist.errors.BadSettings, match=word):
        aotdist.profile(lambda: ran.append(1), **wrong)
    assert not ran


def test_what_cannot_be_called_is_refused():
    with pytest.raises(aotdist.errors.BadSettings, match="cannot profile a int"):
        aotdist.profile(3)


def test_a_step_that_takes_a_batch_is_refused():
    model = torch.nn.Linear(2, 2)
    step = aotdist.train_step(model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters()))
    compiled = aotdist.compile(lambda x: x, backend="fx")
    for takes_batch, name in ((step, "TrainStep"), (compiled, "<lambda>"), (model, "Linear")):
        with pytest.raises(
            aotdist.errors.BadSettings, match=f"`{name}` is called without arguments: missing"
        ):
            aotdist.profile(takes_batch)
    aotdist.profile(functools.wraps(compiled)(lambda: compiled(torch.ones(2))), steps=1)


def test_one_profile_in_another_is_refused():
    ran = []
    with pytest.raises(aotdist.errors.BadSettings, match="a profiler is at work already"):
        aotdist.profile(lambda: aotdist.profile(lambda: ran.append(1)), warmup=0, steps=1)
    assert not ran


def test_an_error_of_the_step_is_the_users(tmp_path: Path):
    def step() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        aotdist.profile(step, path=tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


def sharded(folder: Path, backend: str) -> Profile:
    model = model_of()
    for layer in model:
        fully_shard(layer)
    found = aotdist.profile(trained(fully_shard(model), backend), path=folder / "trace.json")
    dist.barrier()
    return found


@pytest.mark.ranks
def test_process_groups_have_lanes_and_waits_have_names(world2: World, tmp_path: Path) -> None:
    for rank, found in enumerate(world2.run(sharded, tmp_path, "fx")):
        (group,) = found.groups
        assert group.name == "gloo" and group.collectives >= 4
        assert 0 <= group.exposed_seconds <= group.seconds
        assert 0 < found.exposed_percent < 100
        assert {"reduce_scatter_tensor of 0", "all_gather_into_tensor of 1"} <= found.waits.keys()
        assert found.path == tmp_path / f"trace-rank{rank}.json"
        assert len(lanes_in(found.path)[group.name]) == 3 * group.collectives
