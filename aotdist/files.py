"""Files that others see whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from aotdist.errors import BadSettings

OWNER_ONLY = 0o600
AS_USUAL = 0o666
"""Less what the process's umask takes away, as for any new file."""


def path_of(given: Any, name: str = "path") -> Path:
    """The path that a user passed.

    Args:
        given: what the user passed.
        name: of the argument.

    Raises:
        BadSettings: it is no path.
    """
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise BadSettings(f"`{name}` is {given!r}", fix=f'name a file: `{name}="folder/file"`')
    return Path(os.fsdecode(given))


def refuse_unwritable(path: Path) -> None:
    """Refuse the path of a file that cannot be written, before the work whose result it is to hold.

    Args:
        path: of the file.

    Raises:
        BadSettings: it is a folder, its own folder does not exist, or nobody here may write it.
    """
    if path.is_dir():
        raise BadSettings(f"`{path}` is a folder", fix="name a file")
    if not path.parent.is_dir():
        raise BadSettings(f"the folder of `{path}` does not exist", fix="make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadSettings(f"`{path}` may not be written", fix="name a file that may")


def is_owners_alone(known: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, and nobody else may write it."""
    return known.st_uid == os.geteuid() and not known.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def with_checksum(document: Mapping[str, Any]) -> str:
    """A JSON document as text, with the SHA-256 of its other fields as the last one.

    A file is undamaged if this function returns its text for the document in it.
    """
    rest = {name: value for name, value in document.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(rest).encode()).hexdigest()
    return json.dumps({**rest, "sha256": digest}, indent=1) + "\n"


def write_whole(path: Path, chunks: Iterable[bytes], *, mode: int = OWNER_ONLY) -> None:
    """Write a file; an existing one is replaced once everything is written.

    Several processes may write the same file at once: each writes a file of its own, and the last to finish
    wins. A process that is killed leaves a file behind whose name begins with a dot.

    Args:
        path: of the file, in an existing folder.
        chunks: what to write, piece by piece.
        mode: its permissions.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(chunks)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
