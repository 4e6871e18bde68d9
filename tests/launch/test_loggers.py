"""Loggers are told what is recorded; stand-ins take the place of their packages."""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace

import pytest

from aotdist.launch import loggers, train
from tests.launch.harness import held_out_losses, losses


class StandIn:
    """Writes down every call of a method, and has attributes that do too."""

    def __init__(self, *arguments, **options):
        self.calls = [("made", arguments, options)]
        self.config = SimpleNamespace(update=lambda values: self.calls.append(("config", (values,), {})))
        self.summary = {}

    def __getattr__(self, name):
        return lambda *arguments, **options: self.calls.append((name, arguments, options))

    def named(self, name):
        return [arguments for called, arguments, _ in self.calls if called == name]


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    monkeypatch.setattr(loggers, "draw_curve", lambda folder: None)


def install(monkeypatch, name, **contents):
    """Puts a module in a package's place, and returns what it has made so far."""
    made = []

    def make(*arguments, **options):
        made.append(StandIn(*arguments, **options))
        return made[-1]

    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for attribute in contents:
        setattr(module, attribute, make)
    monkeypatch.setitem(sys.modules, name, module)
    return made


def run(job, name, *options):
    return train.main(job.arguments(name, "--checkpoint.every=2", *options, steps=3))


def test_tensorboard_has_every_step_and_validation(job, monkeypatch):
    install(monkeypatch, "tensorboard")
    made = install(monkeypatch, "torch.utils.tensorboard", SummaryWriter=None)
    assert run(job, "board", "--run.loggers", "tensorboard") == 0
    (writer,) = made
    assert writer.calls[0] == ("made", (job.folder / "board" / "tensorboard",), {"purge_step": None})
    written = writer.named("add_scalar")
    records = job.records("board")
    assert [value for name, value, _ in written if name == "train/loss"] == losses(records)
    assert [value for name, value, _ in written if name == "validation/loss"] == held_out_losses(records)
    assert [step for name, _, step in written if name == "checkpoint/seconds"] == [2, 3]
    assert writer.calls[-1][0] == "close"


def test_tensorboard_takes_back_what_is_recorded_again(job, monkeypatch):
    install(monkeypatch, "tensorboard")
    made = install(monkeypatch, "torch.utils.tensorboard", SummaryWriter=None)
    run(job, "again", "--run.loggers", "tensorboard")
    assert train.main(["--resume", str(job.folder / "again"), "--optim.steps=4"]) == 0
    assert made[1].calls[0][2] == {"purge_step": 4}


def test_wandb_is_offline_and_has_every_step(job, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    made = install(monkeypatch, "wandb", init=None)
    assert run(job, "bias", "--run.loggers", "wandb") == 0
    (logged,) = made
    options = logged.calls[0][2]
    assert (options["mode"], options["name"], options["dir"]) == ("offline", "bias", job.folder / "bias")
    assert options["config"]["model"]["dim"] == 32
    numbers = [values for (values,) in logged.named("log")]
    assert [n["train/loss"] for n in numbers if "train/loss" in n] == losses(job.records("bias"))
    assert [n["step"] for n in numbers if "validation/loss" in n] == [0, 3]
    assert logged.calls[-1][0] == "finish"


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_named_before_anything_is_written(job, monkeypatch, capsys, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert run(job, "missing", "--run.loggers", name) == 2
    assert f"the package {name} is not installed" in capsys.readouterr().err
    assert not (job.folder / "missing").exists()


@pytest.mark.filterwarnings("default")  # those of other libraries
def test_tensorboard_itself_reads_every_step(job):
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra `loggers`"
    )
    run(job, "real", "--run.loggers", "tensorboard")
    assert train.main(["--resume", str(job.folder / "real"), "--optim.steps=5"]) == 0
    read = events.EventAccumulator(str(job.folder / "real" / "tensorboard")).Reload().Scalars("train/loss")
    assert [each.value for each in read] == pytest.approx(losses(job.records("real")), rel=1e-6)


@pytest.mark.filterwarnings("default")
def test_wandb_itself_writes_a_run_offline(job, monkeypatch):
    pytest.importorskip("wandb", reason="needs the extra `loggers`")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run(job, "real", "--run.loggers", "wandb")
    assert len(list((job.folder / "real" / "wandb").glob("offline-run-*/run-*.wandb"))) == 1
