"""`aotdist train`: what it takes for itself, and what it hands to the trainer."""

import os

import pytest

import aotdist
from aotdist.files import with_checksum
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


def went_before(folder, ranks):
    folder.mkdir()
    options = {"model": {"dim": 64}, "parallel": {"device": "cpu"}}
    environment = {"ranks": ranks, "batch_ranks": ranks}
    (folder / "config.json").write_text(with_checksum({"options": options, "environment": environment}))
    return str(folder)


@pytest.mark.parametrize("resume", ["folder", "auto"])
@pytest.mark.parametrize(("ranks", "given", "started"), [(2, [], 2), (1, [], None), (2, ["--ranks=1"], 1)])
def test_a_run_goes_on_with_as_many_ranks_as_it_had(
    trained, executed, tmp_path, capsys, ranks, given, started, resume
):
    folder = went_before(tmp_path / "first", ranks)
    named = {
        "folder": ["--resume", folder],
        "auto": [f"--run.folder={tmp_path}", "--run.name=first", "--resume=auto"],
    }
    assert main(["train", *given, *named[resume]]) in (None, 0, 143)
    assert trained == ([named[resume]] if started is None else [])
    assert [words[3] for words in executed] == ([] if started is None else [f"--nproc-per-node={started}"])
    assert ("going on with 2 ranks" in capsys.readouterr().out) == (started == 2)


def test_a_rank_of_a_launcher_goes_on_as_it_was_started(trained, executed, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    main(["train", "--resume", went_before(tmp_path / "first", 2)])
    assert len(trained) == 1 and executed == []


def test_a_batch_that_does_not_split_over_the_ranks_is_refused_before_they_start(executed, tmp_path, capsys):
    folder = went_before(tmp_path / "first", 2)
    assert main(["train", "--ranks=3", "--resume", folder]) == 2
    said = capsys.readouterr().err
    assert "takes 16 sequences, which do not split over 3 ranks" in said and "--data.batch-size" in said
    main(["train", "--ranks=3", "--resume", folder, "--data.batch-size=5"])
    assert len(executed) == 1


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
