"""Checkpoints and going on from them, in one process: a resumed run is the uninterrupted one."""

import dataclasses
import errno
import json
import os
import pickle
import resource
import shutil
import signal

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from aotdist.files import with_checksum
from aotdist.launch import loggers, loop, metrics, run_folder, train
from aotdist.launch.checkpoints import writer
from aotdist.launch.checkpoints.manifest import facts_of, read_manifest
from aotdist.launch.metrics import CheckpointRecord, EndRecord
from tests.launch.harness import losses, step_records

EVERY_2 = ("--checkpoint.every=2",)


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    """Drawing takes longer than these runs do."""
    monkeypatch.setattr(loggers, "draw_curve", lambda folder: None)


def run(job, name, *options, **kinds):
    return train.main(job.arguments(name, *EVERY_2, *options, **kinds))


def resume(job, name, *options):
    return train.main(["--resume", str(job.folder / name), *options])


def checkpoints(job, name):
    return sorted(path.name for path in (job.folder / name / "checkpoints").iterdir())


def stop_after(monkeypatch, step, number=signal.SIGTERM):
    take_step = loop.Trainer._take_step

    def stopping(self, state):
        if state.step == step - 1:
            os.kill(os.getpid(), number)
        return take_step(self, state)

    monkeypatch.setattr(loop.Trainer, "_take_step", stopping)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("eager", []),
        ("fx", ["--model.no-tie-head"]),
        ("eager", ["--float8.recipe=delayed"]),
        ("eager", ["--sparse24.mask=transposable", "--sparse24.decay=2e-4", "--optim.accumulate=2"]),
    ],
)
def test_a_run_that_is_stopped_and_resumed_is_the_uninterrupted_one(job, monkeypatch, backend, options):
    options = [*options, "--run.validate-every=3"]
    assert run(job, "whole", *options, backend=backend, steps=8) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert run(job, "parts", *options, backend=backend, steps=8) == 128 + signal.SIGTERM
    assert checkpoints(job, "parts") == ["step-00000002", "step-00000003"]
    assert resume(job, "parts") == 0
    assert job.numbers("whole") == job.numbers("parts")
    ends = [record.status for record in job.records("parts") if isinstance(record, EndRecord)]
    assert ends == ["stopped", "finished"]


def test_random_numbers_go_on_where_they_stood(job, monkeypatch):
    loss = loop.Trainer._loss
    monkeypatch.setattr(loop.Trainer, "_loss", lambda self, *given: loss(self, *given) * torch.rand(()))
    assert run(job, "whole", steps=8) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        run(job, "parts", steps=8)
    assert resume(job, "parts") == 0
    assert job.numbers("whole") == job.numbers("parts")


def test_the_latest_are_kept_and_recorded(job):
    assert run(job, "kept", "--checkpoint.keep=2", steps=7) == 0
    assert checkpoints(job, "kept") == ["step-00000006", "step-00000007"]
    records = [record for record in job.records("kept") if isinstance(record, CheckpointRecord)]
    assert [record.step for record in records] == [2, 4, 6, 7]
    assert all(record.num_bytes > 1000 and not record.failure for record in records)
    assert all(0 <= record.waited_s <= record.seconds for record in records)


def test_all_are_kept_on_request(job):
    assert run(job, "all", "--checkpoint.keep=0", "--checkpoint.no-asynchronous", steps=5) == 0
    assert checkpoints(job, "all") == ["step-00000002", "step-00000004", "step-00000005"]


def test_a_manifest_says_what_a_checkpoint_is_of(job):
    run(job, "said", steps=4)
    manifest = read_manifest(job.folder / "said" / "checkpoints" / "step-00000004")
    assert (manifest.heading.step, manifest.heading.position) == (4, 16)
    assert manifest.tensors["model.blocks.0.attention.query.weight"] == "float32[32, 32]"
    assert manifest.tensors["optimizer.norm.weight.exp_avg"] == "float32[32]"
    assert set(manifest.files) == {".metadata", "__0_0.distcp"}


def test_what_is_saved_is_the_step_that_it_is_called_after(job, monkeypatch):
    """Training writes the parameters in place while the thread writes the file."""
    written = {}
    write_data = writer.AtomicWriter.write_data

    def late(self, *given):
        written[self._heading.step] = True
        while self._heading.step == 2 and not written.get("goes on"):
            pass
        return write_data(self, *given)

    take_step = loop.Trainer._take_step

    def told(self, state):
        if state.step == 3:
            written["goes on"] = True
        return take_step(self, state)

    monkeypatch.setattr(writer.AtomicWriter, "write_data", late)
    monkeypatch.setattr(loop.Trainer, "_take_step", told)
    assert run(job, "whole", "--checkpoint.keep=0", steps=4) == 0
    shutil.copytree(job.folder / "whole", job.folder / "again")
    shutil.rmtree(job.folder / "again" / "checkpoints" / "step-00000004")
    assert resume(job, "again") == 0
    assert job.numbers("whole") == job.numbers("again")


def test_options_that_are_given_override_those_of_the_run(job):
    run(job, "longer", steps=4)
    assert resume(job, "longer", "--optim.steps=6", "--run.log-every=2") == 0
    assert [record.step for record in step_records(job.records("longer"))] == [1, 2, 3, 4, 5, 6]
    document = json.loads((job.folder / "longer" / "config.json").read_text())
    assert document["options"]["optim"]["steps"] == 6
    assert document["options"]["model"]["dim"] == 32


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--optim.steps=2"], "--optim.steps 2 was reached already"),
        (["--optim.steps=6", "--profile.steps=1", "--profile.first-step=3"], "nothing is profiled"),
    ],
)
def test_what_is_not_done_any_more_is_said(job, capsys, options, said):
    run(job, "longer", steps=4)
    assert resume(job, "longer", *options) == 0
    assert said in " ".join(capsys.readouterr().out.split())


def test_auto_begins_a_run_and_goes_on_with_it(job, capsys):
    arguments = job.arguments("auto", *EVERY_2, "--resume=auto", steps=2)
    assert train.main(arguments) == 0
    assert "going on" not in capsys.readouterr().out
    assert train.main([*arguments, "--optim.steps=4"]) == 0
    assert "from step 2" in capsys.readouterr().out
    assert len(losses(job.records("auto"))) == 4


def test_auto_needs_a_name(job, capsys):
    arguments = [word for word in job.arguments("", "--resume=auto") if not word.startswith("--run.name")]
    assert train.main(arguments) == 2
    assert "--run.name" in capsys.readouterr().err


def test_a_run_that_died_before_its_first_checkpoint_begins_again(job, capsys):
    run(job, "young", steps=2)
    shutil.rmtree(job.folder / "young" / "checkpoints")
    assert resume(job, "young") == 0
    assert "from the beginning" in capsys.readouterr().out
    assert [record.step for record in step_records(job.records("young"))] == [1, 2]


@pytest.mark.parametrize("damage", ["cut", "changed", "no manifest", "no step", "partial"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(job, capsys, damage):
    run(job, "whole", steps=6)
    run(job, "torn", steps=6)
    folder = job.folder / "torn" / "checkpoints" / "step-00000006"
    file = folder / "__0_0.distcp"
    match damage:
        case "cut":
            os.truncate(file, 1000)
        case "changed":
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "no step":
            manifest = json.loads((folder / "manifest.json").read_text())
            manifest["heading"]["step"] = "6"
            (folder / "manifest.json").write_text(json.dumps(manifest))
        case "partial":
            folder.rename(folder.with_name("partial-00000006"))
    assert resume(job, "torn") == 0
    printed = capsys.readouterr().out
    assert "from step 4" in printed
    assert ("step-00000006 is refused: its " in printed) == (damage != "partial")
    assert job.numbers("whole") == job.numbers("torn")
    assert checkpoints(job, "torn") == ["step-00000004", "step-00000006"]


def test_what_lies_about_is_in_the_way_of_no_save_and_of_no_going_on(job, capsys):
    run(job, "whole", steps=8)
    run(job, "strewn", "--checkpoint.keep=0", steps=8)
    folder = job.folder / "strewn" / "checkpoints"
    for step in (6, 8):
        shutil.rmtree(folder / f"step-0000000{step}")
    for name in ("step-00000008", "step-00000099", "partial-00000006", "partial-x", "step-abc", "notes"):
        (folder / name).write_text("a file")
    for name in ("step-98", "step-99999999", "partial-y"):
        (folder / name).mkdir()
    (folder / "partial-00000008" / "deep").mkdir(parents=True)
    (folder / "step-00000009").symlink_to(folder / "nowhere")
    assert resume(job, "strewn", "--checkpoint.keep=1") == 0
    printed = capsys.readouterr().out
    assert "from step 4; step-99999999 is refused" in " ".join(printed.split())
    assert "FAILED" not in printed
    left = {"notes", "step-00000008", "step-00000009", "step-00000099", "step-98", "step-abc"}
    assert set(checkpoints(job, "strewn")) == left
    assert (folder / "step-00000008").is_dir()
    assert job.numbers("whole") == job.numbers("strewn")
    assert resume(job, "strewn", "--optim.steps=9") == 0


def test_checkpoints_that_were_refused_push_out_no_good_one_and_end_with_the_next(job, capsys):
    run(job, "left", "--checkpoint.keep=0", steps=8)
    for step in (6, 8):
        (job.folder / "left" / "checkpoints" / f"step-0000000{step}" / "manifest.json").write_text("{")
    assert resume(job, "left", "--checkpoint.keep=1", "--optim.steps=5") == 0
    assert checkpoints(job, "left") == ["step-00000005"]
    capsys.readouterr()
    assert resume(job, "left", "--optim.steps=6") == 0
    assert "from step 5" in capsys.readouterr().out


def test_a_folder_in_place_of_another_step_is_refused(job, capsys):
    run(job, "renamed", steps=4)
    folder = job.folder / "renamed" / "checkpoints"
    (folder / "step-00000004").rename(folder / "step-00000009")
    assert resume(job, "renamed", "--optim.steps=4") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "from step 2; step-00000009 is refused: it is of step 4, by its manifest" in said


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", ["a function", "bytes"])
def test_the_index_of_a_checkpoint_runs_nothing(job, tmp_path, capsys, kind):
    """With right checksums, as who wants that it runs would write them; bytes are a pickle of their own."""
    run(job, "evil", steps=2)
    folder, ran = job.folder / "evil" / "checkpoints" / "step-00000002", str(tmp_path / "ran")
    index = pickle.loads((folder / ".metadata").read_bytes())
    if kind == "a function":
        index.planner_data = Runs(ran)
    else:
        index.state_dict_metadata["model.norm.weight"] = BytesStorageMetadata()
        at = next(at for key, at in index.storage_data.items() if key.fqn == "model.norm.weight")
        at.offset, at.length = 0, len(pickle.dumps(Runs(ran)))
        (folder / at.relative_path).write_bytes(pickle.dumps(Runs(ran)))
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    manifest = read_manifest(folder)
    files = {name: facts_of(folder / name) for name in manifest.files}
    (folder / "manifest.json").write_text(dataclasses.replace(manifest, files=files).text())
    assert resume(job, "evil", "--optim.steps=3") == 1
    assert not os.path.exists(ran)
    assert "step-00000002 is refused: its index, .metadata, is not PyTorch's: " in capsys.readouterr().err


def test_a_folder_that_may_not_be_written_is_named(job, capsys, monkeypatch):
    run(job, "locked", steps=2)

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for module in (run_folder, metrics):
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_whole", read_only)
            assert resume(job, "locked", "--optim.steps=3") == 2
        message = capsys.readouterr().err
        assert "BadSettings: the run folder" in message and "cannot be written: Read-only" in message
    assert len(step_records(job.records("locked"))) == 2


def test_damaged_records_are_in_nobodys_way(job):
    run(job, "torn", steps=4)
    file = job.folder / "torn" / "metrics.jsonl"
    file.write_bytes(b"\xff\n[1,2]\n" + file.read_bytes())
    with pytest.warns(UserWarning, match="2 damaged, the first in line 1"):
        assert resume(job, "torn", "--optim.steps=6") == 0
    assert [record.step for record in step_records(job.records("torn"))] == [1, 2, 3, 4, 5, 6]


def test_a_folder_in_the_place_of_the_records_is_named(job, capsys):
    run(job, "torn", steps=2)
    (job.folder / "torn" / "metrics.jsonl").unlink()
    (job.folder / "torn" / "metrics.jsonl").mkdir()
    assert resume(job, "torn", "--optim.steps=3") == 2
    assert "metrics.jsonl cannot be read: Is a directory" in capsys.readouterr().err


def test_no_good_checkpoint_is_an_error_and_not_a_new_beginning(job, capsys):
    run(job, "lost", steps=2)
    (job.folder / "lost" / "checkpoints" / "step-00000002" / ".metadata").write_bytes(b"")
    assert resume(job, "lost") == 1
    message = capsys.readouterr().err
    assert "BadCheckpoint: none of the checkpoints" in message
    assert "step-00000002 is refused: its file .metadata has 0 bytes of" in message


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (
            "--model.hidden-dim=96",
            "its `model.blocks.0.mlp.gate.weight` is float32[64, 32], and float32[96",
        ),
        ("--model.num-layers=3", "it has no `model.blocks.2.attention_norm.weight`, which is float32[32]"),
        ("--model.num-layers=1", "its `model.blocks.1.attention_norm.weight`, float32[32], is not there"),
        ("--float8.recipe=delayed", "it has no `model.blocks.0.attention.query.amax_history`"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_first_difference(job, capsys, option, named):
    run(job, "other", steps=2)
    assert resume(job, "other", option) == 1
    assert f"the checkpoint is of another model: {named}" in capsys.readouterr().err


def test_another_text_is_refused(job, capsys, tmp_path):
    run(job, "text", steps=2)
    other = shutil.copytree(job.text, tmp_path / "other")
    for file in other.iterdir():
        file.write_text(file.read_text().replace("+", "-"))
    assert resume(job, "text", f"--data.root={other}") == 2
    assert "the run's place in its text is lost: sha256 was " in capsys.readouterr().err
    assert resume(job, "text", "--data.seq-len=16") == 2
    assert "seq_len was 32 and is 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, "cannot be read"),
        ("{", "is damaged"),
        ('{"options": {}}', "is damaged"),
        (with_checksum({"options": {"optim": {"lr": 0.1}}}).replace("0.1", "0.3"), "not as it was written"),
        (with_checksum({"options": {"model": {"width": 3}}}), "not those of this version"),
    ],
)
def test_a_folder_without_a_run_is_refused(job, capsys, config, reason):
    if config is not None:
        (job.folder / "config.json").write_text(config)
    assert train.main(["--resume", str(job.folder)]) == 2
    assert reason in capsys.readouterr().err


@pytest.fixture
def small_files():
    """The largest file that may be written is smaller than a checkpoint: a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_stops_no_run_but_its_last_checkpoint_is_missed(job, capsys, monkeypatch, small_files):
    take_step = loop.Trainer._take_step

    def filling(self, state):
        if state.step == 2:
            small_files(100_000)
        return take_step(self, state)

    monkeypatch.setattr(loop.Trainer, "_take_step", filling)
    assert run(job, "full", "--checkpoint.no-asynchronous", steps=6) == 1
    printed, message = capsys.readouterr()
    assert "checkpoint FAILED, training goes on: rank 0: " in printed
    assert "File too large" in printed
    assert "CheckpointFailed: the checkpoint of step 6" in message
    assert "the checkpoint before it, of step 2" in message
    records = job.records("full")
    assert [record.step for record in step_records(records)] == [1, 2, 3, 4, 5, 6]
    assert [bool(r.failure) for r in records if isinstance(r, CheckpointRecord)] == [False, True]
    small_files(resource.RLIM_INFINITY)
    monkeypatch.setattr(loop.Trainer, "_take_step", take_step)
    assert resume(job, "full") == 0
    assert checkpoints(job, "full") == ["step-00000004", "step-00000006"]


def test_a_disk_without_any_room_stops_no_run_either(job, capsys, monkeypatch, small_files):
    take_step = loop.Trainer._take_step

    def filling(self, state):
        if state.step == 2:
            small_files(1)
        return take_step(self, state)

    def draw_nothing(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(loop.Trainer, "_take_step", filling)
    monkeypatch.setattr(loggers, "draw_curve", draw_nothing)
    with (
        pytest.warns(UserWarning, match=r"metrics.jsonl of the run folder cannot be written: File too large"),
        pytest.warns(UserWarning, match=r"loss.png of the run folder cannot be written: No space left"),
    ):
        assert run(job, "full", steps=4) == 1
    assert "CheckpointFailed: the checkpoint of step 4" in capsys.readouterr().err
    small_files(resource.RLIM_INFINITY)
    assert [record.step for record in step_records(job.records("full"))] == [1, 2]
