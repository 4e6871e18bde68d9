"""The command `aotdist`; modules of subcommands add these to its parser."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import aotdist
from aotdist.errors import AotdistError, BadSettings
from aotdist.launch.commands import bench, build, cache, doctor, train

_SUBCOMMANDS = (train, build, bench, cache, doctor)
_DONE, _FAILED, _WRONG_USE = 0, 1, 2
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 0 done, 1 failed, 2 wrong options, or what training says.

    If the reader of its output is gone (`| head`), the code is that of a program ended by SIGPIPE.

    Args:
        arguments: the words after the program's name; `sys.argv` when None.
    """
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at the end
        return 128 + signal.SIGPIPE


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="aotdist", description="Compile training steps ahead of time.")
    parser.add_argument("--version", action="version", version=f"aotdist {aotdist.__version__}")
    parser.set_defaults(takes_more=False)
    as_written: Any = partial(argparse.ArgumentParser, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=as_written)
    for subcommand in _SUBCOMMANDS:
        subcommand.add_to(subparsers)
    options, more = parser.parse_known_args(arguments)
    if more and not options.takes_more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    options.more = more
    try:
        code: int | None = options.run(options)
    except AotdistError as error:
        print(f"aotdist: {type(error).__name__}: {error}", file=sys.stderr)
        return _WRONG_USE if isinstance(error, BadSettings) else _FAILED
    except OSError as error:
        if error.errno not in _FULL:
            raise
        print(f"aotdist: {error}\n  fix: free some of it, or write elsewhere", file=sys.stderr)
        return _FAILED
    return _DONE if code is None else code
