"""`aotdist train`: the example trainer, alone, on ranks that it starts, or as one of a launcher's."""

from __future__ import annotations

import argparse
import os
import sys
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
    try:
        from aotdist.launch import resuming, train
    except ModuleNotFoundError as error:  # the other commands need none of these packages
        raise BadSettings(
            f"training needs the package {error.name}", fix="pip install 'aotdist[train]'"
        ) from error
    if options.help:
        print(options.parser.format_help(), flush=True)
        return train.main(["--help"], _PROGRAM)
    ranks: int | None = options.ranks
    if ranks is None and "RANK" not in os.environ:
        ranks = resuming.earlier_ranks(words, _PROGRAM)
    if ranks is None:
        if options.max_restarts is not None:
            raise BadSettings("--max-restarts says nothing without --ranks", fix="give both, or use torchrun")
        return train.main(words, _PROGRAM)
    if ranks < 1:
        raise BadSettings(f"--ranks is {ranks}", fix="give 1 or more")
    restarts = 3 if options.max_restarts is None else options.max_restarts
    if restarts < 0:
        raise BadSettings(f"--max-restarts is {restarts}", fix="give 0 or more")
    resuming.check_command(words, ranks, _PROGRAM)
    command = torchrun(ranks, restarts, words)
    os.execv(command[0], command)  # signals then reach torchrun, which hands them on


def torchrun(ranks: int, restarts: int, words: list[str]) -> list[str]:
    """The command that trains on ranks of this machine."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"),
        *("-m", "aotdist.launch.train"),
        *words,
    ]
