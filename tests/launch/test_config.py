"""The command line: everything is listed, wrong options are named, once."""

import dataclasses

import pytest

from aotdist import BadSettings
from aotdist.launch.config import (
    CheckpointOptions,
    CompileOptions,
    DataOptions,
    Float8Options,
    JobOptions,
    ModelOptions,
    OptimOptions,
    ParallelOptions,
    ProfileOptions,
    RunOptions,
    Sparse24Options,
    parse_options,
)


def flags(options=JobOptions):
    """Every flag that the dataclasses define."""
    sections = {
        field.name: field.default_factory
        for field in dataclasses.fields(options)
        if field.default_factory is not dataclasses.MISSING
    }
    inside = [
        f"--{section}.{field.name.replace('_', '-')}"
        for section, kind in sections.items()
        for field in dataclasses.fields(kind)
    ]
    return [*inside, "--resume"]


def help_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as leaving:
        parse_options(["--help"], speaks=True)
    assert leaving.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_option(capsys, monkeypatch):
    shown = help_text(capsys, monkeypatch)
    assert [flag for flag in flags() if flag not in shown] == []


@pytest.mark.parametrize(
    "options",
    [
        ModelOptions,
        Sparse24Options,
        DataOptions,
        OptimOptions,
        ParallelOptions,
        Float8Options,
        CompileOptions,
        CheckpointOptions,
        ProfileOptions,
        RunOptions,
    ],
)
def test_every_option_is_explained(options):
    described = options.__doc__.split("Args:")[1]
    assert [f.name for f in dataclasses.fields(options) if f"\n        {f.name}: " not in described] == []


def test_nested_options_reach_their_place():
    words = "--model.dim 64 --compile.backend fx --parallel.no-reshard-after-forward".split()
    options = parse_options(words, speaks=True)
    assert (options.model.dim, options.compile.backend) == (64, "fx")
    assert not options.parallel.reshard_after_forward


def test_an_unknown_option_is_named_with_a_near_one(capsys):
    with pytest.raises(SystemExit) as leaving:
        parse_options(["--model.dmi", "3"], speaks=True)
    assert leaving.value.code == 2
    message = capsys.readouterr().err
    assert "--model.dmi" in message
    assert "--model.dim" in message


def test_other_ranks_leave_silently(capsys):
    with pytest.raises(SystemExit) as leaving:
        parse_options(["--model.dmi", "3"], speaks=False)
    assert leaving.value.code == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--model.dim 100", "dim 100"),
        ("--model.num-kv-heads 3", "3 key/value heads"),
        ("--model.num-layers 0", "--model.num-layers is 0"),
        ("--data.validation-percent 100", "--data.validation-percent is 100"),
        ("--optim.steps 0", "--optim.steps is 0"),
        ("--optim.min-lr-ratio 2", "--optim.min-lr-ratio is 2"),
        ("--optim.clip-norm -1", "--optim.clip-norm is -1"),
        ("--optim.lr nan", "--optim.lr is nan"),
        ("--parallel.dp-shard 0", "--parallel.dp-shard is 0"),
        (
            "--float8.recipe blockwise --float8.all-gather",
            "needs --float8.recipe delayed, not blockwise",
        ),
        ("--checkpoint.every -1", "--checkpoint.every is -1"),
        ("--profile.memory", "--profile.memory needs --profile.steps > 0"),
        ("--profile.steps 1 --profile.first-step 9 --optim.steps 2", "--profile.first-step 9 comes after"),
        ("--run.name a/b", "--run.name is 'a/b'"),
        ("--run.name ..", "--run.name is '..'"),
        ("--run.name=", "--run.name is ''"),
        ("--run.name= --resume auto", "--run.name is ''"),
        ("--run.validate-every -1", "--run.validate-every is -1"),
    ],
)
def test_values_out_of_range_are_named(words, named):
    with pytest.raises(BadSettings, match="fix: ") as caught:
        parse_options(words.split(), speaks=True)
    assert named in str(caught.value)


def test_every_backend_that_has_a_name_may_be_chosen():
    names = ("auto", "eager", "fx", "inductor", "triton")
    chosen = [parse_options(["--compile.backend", name], speaks=True).compile.backend for name in names]
    assert chosen == list(names)
