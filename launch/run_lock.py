"""One process at a time trains in a run's folder: rank 0 locks a file in it.

The lock is the file system's (`flock`): it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from aotdist.errors import AotdistError, BadSettings

LOCK_FILE = "run.lock"
"""Stays in the folder, and names the process that trained there last."""

PATIENCE_S = 90.0
"""How long to wait for a lock of another machine, which may be gone: NFS 4 gives it up after 90 s."""


class RunInUse(AotdistError):
    """Another process trains in the folder of this run."""


class RunLock(ExitStack):
    """The lock that rank 0 takes before it writes into a run's folder; other ranks never take theirs.

    Leaving the context releases the lock.
    """

    def take(self, folder: Path) -> None:
        """Locks the folder; waits up to `PATIENCE_S` for a process of another machine to end.

        Raises:
            RunInUse: another process holds the lock.
            BadSettings: the folder cannot be written.
        """
        try:
            file = self.enter_context((folder / LOCK_FILE).open("a+"))
            _wait_for(file, folder)
            self.callback(_unlock, file)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}")
            file.flush()
        except OSError as error:
            raise unwritable(folder, error) from error


def _wait_for(file: TextIO, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not _locked(file, fcntl.LOCK_EX, folder):
        holder = _holder(file)
        if f" on {socket.gethostname()}," in holder or time.monotonic() > deadline:
            raise _in_use(folder, holder)
        time.sleep(min(1.0, PATIENCE_S))


def _locked(file: TextIO, kind: int, folder: Path) -> bool:
    """Whether the lock was free, and is now this process's."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        warnings.warn(
            f"aotdist: the file system of {folder} has no locks ({error.strerror}): see to it that no other "
            "process trains there",
            stacklevel=2,
        )
    return True


def _unlock(file: TextIO) -> None:
    """Release the lock explicitly: a process that was forked meanwhile holds it as well."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


def _holder(file: TextIO) -> str:
    file.seek(0)
    return file.read(1000) or "another process"


def _in_use(folder: Path, holder: str) -> RunInUse:
    return RunInUse(
        f"{holder}, trains in {folder}",
        stage="launch",
        fix="wait for its end, or end its launcher there (Ctrl-C or SIGTERM: it saves first), and start this "
        "again; a new run takes another --run.name",
    )


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the folder now."""
    try:
        refuse_locked(folder)
    except RunInUse:
        return True
    return False


def refuse_locked(folder: Path) -> None:
    """Refuse a folder in which a process trains now; writes nothing.

    Raises:
        RunInUse: naming the process.
    """
    try:
        file = (folder / LOCK_FILE).open()
    except OSError:
        return
    with file:
        if not _locked(file, fcntl.LOCK_SH, folder):
            raise _in_use(folder, _holder(file))


def unwritable(folder: Path, error: OSError) -> BadSettings:
    """The error for a run's folder in which nothing can be written."""
    return BadSettings(
        f"the run folder {folder} cannot be written: {error.strerror}",
        stage="launch",
        fix="make room, or go on with a copy of it in a place that can be written: --resume COPY",
    )
