"""The whole job in one process, without a launcher."""

import json
import math
import os
import signal

import pytest

from aotdist.launch import loop, train
from aotdist.launch.metrics import EndRecord, StepRecord, ValidationRecord
from tests.launch.harness import held_out_losses, losses, step_records


def run(job, name, *options, **kinds):
    return train.main(job.arguments(name, *options, **kinds))


def test_a_run_learns_and_leaves_everything_behind(job, capsys):
    assert run(job, "learns", "--optim.lr=1e-2", "--run.validate-every=10", steps=30) == 0
    records = job.records("learns")
    assert [r.step for r in step_records(records)] == list(range(1, 31))
    assert [r.step for r in records if isinstance(r, ValidationRecord)] == [0, 10, 20, 30]
    assert isinstance(records[-1], EndRecord)
    first, *_, last = held_out_losses(records)
    assert abs(first - math.log(256)) < 0.7
    assert last < 0.6 * first
    files = {path.name for path in (job.folder / "learns").iterdir()}
    assert files == {"config.json", "metrics.jsonl", "loss.png", "run.lock"}
    assert (job.folder / "learns" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "loss.png" in capsys.readouterr().out


def test_records_add_up(job):
    run(job, "sums", "--optim.accumulate=2", steps=3)
    for number, record in enumerate(step_records(job.records("sums")), start=1):
        assert record.tokens == number * 2 * 4 * 32
        assert record.tokens_per_s == pytest.approx(2 * 4 * 32 / record.seconds)
        assert record.memory_bytes > 2**20
        assert record.grad_norm > 0


def test_the_configuration_is_kept(job):
    run(job, "config", "--run.seed=7", steps=1)
    document = json.loads((job.folder / "config" / "config.json").read_text())
    assert document["options"]["run"]["seed"] == 7
    assert document["options"]["model"]["dim"] == 32
    assert document["environment"]["ranks"] == 1


def test_the_same_seed_repeats_every_loss_and_another_does_not(job):
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        run(job, name, f"--run.seed={seed}")
    assert losses(job.records("one")) == losses(job.records("again"))
    assert losses(job.records("one")) != losses(job.records("other"))


def test_reporting_seldom_changes_no_record(job):
    run(job, "often", steps=7)
    run(job, "seldom", "--run.log-every=3", steps=7)
    assert losses(job.records("often")) == losses(job.records("seldom"))


def test_accumulated_micro_steps_equal_one_large_step(job):
    run(job, "large", "--data.batch-size=8", steps=6)
    run(job, "micro", "--data.batch-size=4", "--optim.accumulate=2", steps=6)
    large, micro = step_records(job.records("large")), step_records(job.records("micro"))
    assert [r.loss for r in micro] == pytest.approx([r.loss for r in large], rel=1e-5)
    assert [r.grad_norm for r in micro] == pytest.approx([r.grad_norm for r in large], rel=1e-4)


@pytest.mark.parametrize(
    "option",
    ["--model.no-tie-head", "--parallel.precision=bf16", "--run.deterministic", "--sparse24.mask=row"],
)
def test_variants_train(job, option):
    assert run(job, "variant", option, "--optim.lr=1e-2", steps=10) == 0
    first, *_, last = losses(job.records("variant"))
    assert last < first


def test_sparse_blocks_train_compiled_as_eagerly_and_not_as_dense_ones(job):
    sparse = ("--sparse24.mask=transposable", "--sparse24.decay=2e-4")
    for name, options, backend in (("dense", (), "fx"), ("eager", sparse, "eager"), ("fx", sparse, "fx")):
        assert run(job, name, *options, backend=backend) == 0
    assert losses(job.records("fx")) == losses(job.records("eager"))
    assert losses(job.records("fx")) != losses(job.records("dense"))


def test_a_taken_name_is_refused_before_anything_is_written(job, capsys):
    assert run(job, "twice", steps=1) == 0
    written = (job.folder / "twice" / "metrics.jsonl").read_bytes()
    assert run(job, "twice", steps=1) == 2
    assert "'twice' exists already" in capsys.readouterr().err
    assert (job.folder / "twice" / "metrics.jsonl").read_bytes() == written


def test_unnamed_runs_do_not_collide(job):
    arguments = [word for word in job.arguments("", steps=1) if not word.startswith("--run.name")]
    assert [train.main(arguments) for _ in range(2)] == [0, 0]
    assert len([path for path in job.folder.iterdir() if path.name != "cache"]) == 2


def test_a_wrong_option_exits_with_2(job, capsys):
    assert run(job, "wrong", "--model.dmi=3") == 2
    assert "--model.dmi" in capsys.readouterr().err
    assert not (job.folder / "wrong").exists()


def test_a_lost_loss_ends_the_run_with_the_way_out(job, capsys):
    assert run(job, "lost", "--optim.lr=1e30", "--optim.clip-norm=0", "--optim.warmup-steps=0", steps=20) == 1
    message = capsys.readouterr().err
    assert "TrainingDiverged" in message
    assert "--optim.lr" in message
    assert (job.folder / "lost" / "loss.png").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step(job, monkeypatch, number):
    take_step = loop.Trainer._take_step

    def interrupted(self, state):
        if state.step == 2:
            os.kill(os.getpid(), number)
        return take_step(self, state)

    monkeypatch.setattr(loop.Trainer, "_take_step", interrupted)
    assert run(job, "signal", steps=50) == 128 + number
    records = job.records("signal")
    assert [r.step for r in records if isinstance(r, StepRecord)] == [1, 2, 3]
    assert records[-1].status == "stopped"
    assert (job.folder / "signal" / "loss.png").exists()
