"""`aotdist cache`: lists, verifies and clears the compile cache."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aotdist.artifacts.cache.backend import folder_of
from aotdist.artifacts.cache.folder import Folder, Listed
from aotdist.errors import BadSettings, CacheCorrupt
from aotdist.settings import Settings

_DESCRIPTION = """\
What was compiled and kept for the next process. The folder is `Settings(cache_folder)`, which
AOTDIST_CACHE_FOLDER sets; see docs/cache.md."""


def add_to(subparsers: Any) -> None:
    """Add the subcommand to the parser of `aotdist`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "cache", help="list, check or clear what was compiled before", description=_DESCRIPTION
    )
    parser.add_argument("--folder", type=Path, help="default: that of the settings")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, action in (("ls", _list), ("verify", _verify), ("clear", _clear)):
        actions.add_parser(name, help=action.__doc__, description=action.__doc__).set_defaults(act=action)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    settings = Settings.from_environment()
    if options.folder is not None:
        settings = Settings(cache_folder=str(options.folder))
    folder = folder_of(settings)
    complaint = folder.complaint()
    if complaint is not None:
        raise BadSettings(complaint, fix="repair it, or name another one with AOTDIST_CACHE_FOLDER")
    act: Callable[[Folder], None] = options.act
    act(folder)


def _list(folder: Folder) -> None:
    """List what is kept, what was used last first."""
    for each in folder.listed():
        print(f"{each.key[:12]}  {each.num_bytes:>10,} bytes  {_age(each):>8}  {_about(folder, each)}")
    print(_total(folder, folder.listed()))


def _verify(folder: Folder) -> None:
    """Check that everything is whole; fails if something is not."""
    entries = folder.listed()
    damaged = [f"{each.key}: {fault}" for each in entries if (fault := _fault(folder, each)) is not None]
    for line in damaged:
        print(line)
    if damaged:
        raise CacheCorrupt(
            f"{len(damaged)} of {len(entries)} entries in {folder.path} are damaged",
            fix="nothing has to be done, they are ignored; `aotdist cache clear` removes everything",
        )
    print(f"all whole: {_total(folder, entries)}")


def _clear(folder: Folder) -> None:
    """Throw everything away; it is compiled again when it is needed."""
    entries = folder.listed()
    for each in entries:
        try:
            folder.remove(each.key)
        except OSError as error:
            raise BadSettings(
                str(error), fix="run this as the owner of the folder, where it can be written"
            ) from error
    print(f"removed: {_total(folder, entries)}")


def _fault(folder: Folder, each: Listed) -> str | None:
    try:
        folder.checked(each.key)
    except CacheCorrupt as error:
        return error.what
    except OSError as error:
        return str(error)
    return None


def _about(folder: Folder, each: Listed) -> str:
    try:
        about = folder.checked(each.key).about
    except (CacheCorrupt, OSError):
        return "damaged"
    return f"{about['what']} of {about['name']}, torch {about['torch']}"


def _age(each: Listed) -> str:
    hours = max(0.0, time.time() - each.used) / 3600
    return f"{hours:.0f} h ago" if hours < 48 else f"{hours / 24:.0f} d ago"


def _total(folder: Folder, entries: list[Listed]) -> str:
    count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
    return f"{count}, {sum(each.num_bytes for each in entries) / 1e6:.1f} MB, in {folder.path}"
