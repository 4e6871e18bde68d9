"""What a run keeps when it goes on, on as many ranks or on others."""

import dataclasses
import json

import pytest

from aotdist import BadSettings
from aotdist.files import with_checksum
from aotdist.launch import train
from aotdist.launch.config import DataOptions, JobOptions, OptimOptions, RunOptions, parse_options
from aotdist.launch.parallel import Place
from aotdist.launch.resuming import (
    EarlierRun,
    batch_ranks,
    command_sets_batch,
    earlier_run,
    sequences,
    with_same_batch,
)
from tests.launch.harness import losses, step_records


def options(batch_size=8, accumulate=1, **others):
    return JobOptions(
        data=DataOptions(batch_size=batch_size), optim=OptimOptions(accumulate=accumulate), **others
    )


@pytest.mark.parametrize("batch_size", [4, 6, 8])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(("was", "now"), [(2, 1), (1, 2), (2, 4), (4, 2), (6, 3), (3, 6), (8, 8), (6, 4)])
def test_a_step_takes_what_it_took(batch_size, accumulate, was, now):
    asked = options(batch_size, accumulate, run=RunOptions(validation_batches=6))
    found = with_same_batch(asked, was, now)
    assert sequences(found, now) == sequences(asked, was)
    assert found.data.batch_size <= batch_size
    validated = found.run.validation_batches * found.data.batch_size * now
    assert 0 <= validated - 6 * batch_size * was < found.data.batch_size * now
    assert (found == asked) == (was == now)


def test_a_step_that_does_not_split_is_refused():
    with pytest.raises(BadSettings, match="16 sequences, which do not split over 3 ranks"):
        with_same_batch(options(8), 2, 3)


@pytest.mark.parametrize(
    ("before", "sets_batch", "meant_for"),
    [
        (None, False, 3),
        (EarlierRun(options(), 2, 2), False, 2),
        (EarlierRun(options(), 2, 2), True, 3),
        (EarlierRun(options(4), 2, 2), False, 3),
        (EarlierRun(options(), 1, 2), False, 2),
    ],
)
def test_whom_a_batch_is_meant_for(before, sets_batch, meant_for):
    assert batch_ranks(options(), before, 3, sets_batch=sets_batch) == meant_for


@pytest.mark.parametrize(
    ("resume", "restarts", "sets_batch"),
    [("runs/first", 0, True), ("runs/first", 1, False), ("auto", 0, False), (None, 1, False)],
)
def test_the_command_that_began_a_run_says_nothing_anew(resume, restarts, sets_batch):
    place, words = Place(launched=True, restarts=restarts), ["--data.batch-size=8"]
    assert command_sets_batch(words, options(resume=resume), place) is sets_batch
    assert not command_sets_batch([], options(resume=resume), place)


def test_ranks_that_are_started_again_in_another_number_keep_the_batch(job):
    """What torchrun does when a machine is gone: the same command, which resumes nothing that it names."""
    command = job.arguments("first", "--data.batch-size=4")
    asked = parse_options(command, speaks=False)
    began = {"ranks": 2, "batch_ranks": 2, "launch_id": "a"}
    (job.folder / "first").mkdir()
    options = json.loads(json.dumps(dataclasses.asdict(asked), default=str))
    text = with_checksum({"options": options, "environment": began})
    (job.folder / "first" / "config.json").write_text(text)
    place = Place(launched=True, launch_id="a", restarts=1)
    before = earlier_run(asked, place)
    assert before is not None and earlier_run(asked, Place(launched=True, launch_id="a")) is None
    sets_batch = command_sets_batch(command, asked, place)
    found = with_same_batch(asked, batch_ranks(asked, before, 1, sets_batch=sets_batch), 1)
    assert (found.data.batch_size, found.optim.accumulate) == (4, 2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], False),
        (["--resume", "a", "--optim.steps=3", "--data.seq-len", "8"], False),
        (["--data.batch-size", "3"], True),
        (["--data.batch_size=3"], True),
        (["--optim.accumulate", "2"], True),
    ],
)
def test_whether_a_command_sets_the_batch(words, named):
    assert command_sets_batch(words, JobOptions(), Place()) is named


def pretend_two_ranks(folder):
    """The run had two ranks, each of which took half of what its only one took."""
    config = folder / "config.json"
    document = json.loads(config.read_text())
    document["options"]["data"]["batch_size"] //= 2
    document["environment"] |= {"ranks": 2, "batch_ranks": 2}
    config.write_text(with_checksum(document))


def test_another_number_of_ranks_is_said_and_tokens_go_on(job, capsys):
    train.main(job.arguments("first", "--checkpoint.every=2", steps=2))
    folder = job.folder / "first"
    pretend_two_ranks(folder)
    for steps in (4, 6):  # the second time, one rank goes on with what one rank has gone on with
        capsys.readouterr()
        assert train.main(["--resume", str(folder), f"--optim.steps={steps}"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        change = (
            "with 1 rank, not 2: a step still takes 4 sequences (--data.batch-size 2, --optim.accumulate 2)"
        )
        assert (change in said) == (steps == 4)
    records = step_records(job.records("first"))
    assert [record.tokens for record in records] == [128 * step for step in range(1, 7)]
    assert len(losses(job.records("first"))) == 6


def test_another_batch_is_taken_if_it_is_asked_for(job, capsys):
    train.main(job.arguments("first", "--checkpoint.every=2", steps=2))
    pretend_two_ranks(job.folder / "first")
    assert train.main(["--resume", str(job.folder / "first"), "--optim.steps=3", "--data.batch-size=2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "with 1 rank, not 2: a step takes 2 sequences, not 4 (--data.batch-size 2" in said
