"""`aotdist train`: the example trainer, alone, on ranks that it starts, or as one of a launcher's."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from aotdist.errors import BadSettings

_PROGRAM = "aotdist train"
_DESCRIPTION = """\
Train the example model; every option that is not below is the trainer's (`aotdist train --help`).

Without --ranks it trains in this process, or as one rank of the launcher that started it (torchrun, SLURM);
with --ranks it starts that many processes on this machine, and starts them again from the last good
checkpoint when one of them dies. A run that goes on (--resume) does so on as many ranks as it had."""


def add_to(subparsers: Any) -> None:
    """Add the subcommand to the parser of `aotdist`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train the example model",
        description=_DESCRIPTION,
        allow_abbrev=False,  # `--run.name` is no `--ranks`
        add_help=False,
    )
    parser.add_argument("--help", "-h", action="store_true", help="show this and the trainer's options")
    parser.add_argument("--ranks", metavar="N", type=int, help="start N processes")
    parser.add_argument("--max-restarts", metavar="N", type=int, help="with --ranks (default: 3)")
    parser.set_defaults(run=_run, parser=parser, takes_more=True)


def _run(options: argparse.Namespace) -> int:
    words: list[str] = options.more
    if options.help:
        print(options.parser.format_help(), flush=True)
        return _train(["--help"])
    ranks: int | None = options.ranks
    if ranks is None and "RANK" not in os.environ:
        ranks = _ranks_before(words)
    if ranks is None:
        if options.max_restarts is not None:
            raise BadSettings("--max-restarts says nothing without --ranks", fix="give both, or use torchrun")
        return _train(words)
    if ranks < 1:
        raise BadSettings(f"--ranks is {ranks}", fix="give 1 or more")
    restarts = 3 if options.max_restarts is None else options.max_restarts
    if restarts < 0:
        raise BadSettings(f"--max-restarts is {restarts}", fix="give 0 or more")
    _require_sound(words, ranks)
    command = torchrun(ranks, restarts, words)
    os.execv(command[0], command)  # signals then reach torchrun, which hands them on


def _train(words: list[str]) -> int:
    with _naming_what_is_missing():
        from aotdist.launch import train
    return train.main(words, _PROGRAM)


def _ranks_before(words: list[str]) -> int | None:
    """The ranks that a run had which is to go on, if they were several."""
    if not any(word.partition("=")[0] == "--resume" for word in words):
        return None
    with _naming_what_is_missing():
        from aotdist.launch.config import parse_options
        from aotdist.launch.going_on import run_before
        from aotdist.launch.parallel import Place
    before = run_before(parse_options(words, speaks=True, program=_PROGRAM), Place())
    if before is None or before.ranks == 1:
        return None
    print(f"going on with {before.ranks} ranks, as the run had; --ranks says otherwise", flush=True)
    return before.ranks


def _require_sound(words: list[str], ranks: int) -> None:
    """Refuse here what every rank would: torchrun would start them again, and again.

    Raises:
        SystemExit: an option is unknown or does not parse, or help was asked for.
        BadSettings: the options contradict each other, do not fit the ranks, or name a run that is there.
        RunInUse: the run that is to go on is under way.
    """
    with _naming_what_is_missing():
        from aotdist.launch.config import parse_options
        from aotdist.launch.going_on import batch_ranks, run_before, says_batch_anew, with_same_batch
        from aotdist.launch.parallel import Layout, Place, require_even_split
        from aotdist.launch.run_folder import refuse_taken
    options = parse_options(words, speaks=True, program=_PROGRAM)
    layout, before = Layout.of(options.parallel, ranks), run_before(options, Place())
    require_even_split(options, layout.tp)
    refuse_taken(options)
    is_anew = says_batch_anew(words, options, Place())
    meant_for = batch_ranks(options, before, layout.num_dp_ranks, is_anew=is_anew)
    with_same_batch(options, meant_for, layout.num_dp_ranks)


@contextmanager
def _naming_what_is_missing() -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:  # the other commands need none of these packages
        raise BadSettings(
            f"training needs the package {error.name}", fix="pip install 'aotdist[train]'"
        ) from error


def torchrun(ranks: int, restarts: int, words: list[str]) -> list[str]:
    """The command that trains on ranks of this machine."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"),
        *("-m", "aotdist.launch.train"),
        *words,
    ]
