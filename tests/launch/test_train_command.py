"""`aotdist train`: what it takes for itself, and what it hands to the trainer."""

import os

import pytest

import aotdist
from aotdist.launch import train
from aotdist.launch.commands.main import main


@pytest.fixture
def trained(monkeypatch):
    """The words that the trainer was given."""
    given = []
    monkeypatch.setattr(train, "main", lambda words, program: given.append(words) or 143)
    return given


@pytest.fixture
def executed(monkeypatch):
    """The commands that took this process's place."""
    given = []
    monkeypatch.setattr(os, "execv", lambda program, words: given.append(words[1:]))
    return given


def test_alone_it_is_the_trainer_with_its_exit_code(trained):
    words = ["--run.name", "a", "--resume", "auto", "--model.no-tie-head"]
    assert main(["train", *words]) == 143
    assert trained == [words]


def test_ranks_are_started_by_torchrun(trained, executed):
    main(["train", "--ranks", "4", "--max-restarts=2", "--run.name", "a"])
    assert trained == []
    assert executed == [
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--max-restarts=2"]
        + ["-m", "aotdist.launch.train", "--run.name", "a"]
    ]


def test_restarts_without_ranks_are_refused(trained, capsys):
    assert main(["train", "--max-restarts", "2"]) == 2
    assert "--ranks" in capsys.readouterr().err
    assert trained == []


@pytest.mark.parametrize("words", [["--ranks", "0"], ["--ranks", "2", "--max-restarts=-1"]])
def test_numbers_of_nothing_are_refused(words, trained, executed, capsys):
    assert main(["train", *words]) == 2
    assert " or more" in capsys.readouterr().err
    assert (trained, executed) == ([], [])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--parallel.tp", "3"], "tp 3 does not fit 2 ranks"),
        (["--parallel.tp", "2", "--data.seq-len", "33"], "--data.seq-len 33 does not split over 2 TP ranks"),
        (["--optim.steps", "0"], "--optim.steps is 0"),
        (["--run.name", "there"], "a run called 'there' exists already"),
        (["--resume", "nowhere"], "nowhere/config.json cannot be read"),
    ],
)
def test_what_every_rank_would_refuse_is_refused_before_they_start(
    words, named, executed, tmp_path, monkeypatch, capsys
):
    (tmp_path / "runs" / "there" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--ranks", "2", *words]) == 2
    assert named in capsys.readouterr().err
    assert executed == []


@pytest.mark.parametrize("ranks", [(), ("--ranks", "2")])
def test_unknown_options_name_the_command(ranks, executed, capsys):
    try:
        assert main(["train", *ranks, "--model.dmi", "3"]) == 2
    except SystemExit as leaving:
        assert leaving.code == 2
    message = capsys.readouterr().err
    assert "aotdist train --help" in message and "aotdist.launch.train" not in message
    assert executed == []


def test_help_shows_both(trained, capsys):
    main(["train", "--help"])
    assert "--ranks N" in capsys.readouterr().out
    assert trained == [["--help"]]


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"aotdist {aotdist.__version__}\n"


def test_other_commands_take_no_more_than_they_know(capsys):
    with pytest.raises(SystemExit):
        main(["build", "a.py:b", "--optim.steps", "3"])
    assert "unrecognized arguments: --optim.steps 3" in capsys.readouterr().err
