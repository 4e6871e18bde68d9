"""The command `aotdist`, of which each subcommand is a module that adds itself to the parser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from aotdist.errors import AotdistError, BadSettings
from aotdist.launch import build_command

_SUBCOMMANDS = (build_command,)
_DONE, _FAILED, _WRONG_USE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 0 done, 1 failed, 2 wrong options.

    Args:
        arguments: the words after the program's name; `sys.argv` when None.
    """
    parser = argparse.ArgumentParser(prog="aotdist", description="Compile training steps ahead of time.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for subcommand in _SUBCOMMANDS:
        subcommand.add_to(subparsers)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except AotdistError as error:
        print(f"aotdist: {type(error).__name__}: {error}", file=sys.stderr)
        return _WRONG_USE if isinstance(error, BadSettings) else _FAILED
    return _DONE


if __name__ == "__main__":
    sys.exit(main())
