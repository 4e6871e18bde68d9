"""One run at a time in a run's folder: a file that says who holds it, and that they still do.

Rank 0 takes the lease before it writes anything, and renews it from a thread. What a process that is gone has
left is taken over: on the same machine at once, since its number is no longer that of a process; on another
one when the file has not been renewed for `SILENT_S`, looked at by this machine's own clock.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from aotdist.errors import AotdistError, BadSettings
from aotdist.files import AS_USUAL, write_whole

LEASE_FILE = "lease.json"

BEAT_S = 5.0
"""Seconds between two renewals."""

SILENT_S = 60.0
"""How long a holder on another machine may be silent; file systems that machines share stall for less."""

_LONG_AGO_S = 3600.0
"""A renewal that is older by the clocks is not waited for: no two machines' clocks are so far apart."""

_PROC = Path("/proc")


class RunInUse(AotdistError):
    """Another process trains in the folder of this run."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds, or has held, a lease.

    Args:
        host: the name of its machine.
        machine: which machine that is, and which numbering of processes; names are given twice.
        pid: of the process.
        born: when the process began, in the machine's own count; a number may be given to another process.
        since: when it took the lease, as seconds since 1970.
        token: names this lease and no other.
    """

    host: str
    machine: str
    pid: int
    born: str
    since: float
    token: str

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, _born(pid) or "", time.time(), secrets.token_hex(8))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


_UNKNOWN = Holder("a machine that its damaged lease does not name", "", 0, "", 0.0, "")


def _machine() -> str:
    """This start of this machine, and the namespace that processes have their numbers in."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return socket.gethostname()


def _born(pid: int) -> str | None:
    """When a process of this machine began; None when there is none, or it has ended and is not yet buried.

    Empty where the machine does not say.
    """
    try:
        state, *fields = (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    except OSError:
        if (_PROC / "self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # somebody else's
        pass
    return ""


class Lease:
    """What rank 0 takes before it writes into a run's folder; the other ranks have one that is never taken.

    Leaving it gives the folder back.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._me: Holder | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_lost = False

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None or self._path is None:
            return
        self._ended.set()
        self._thread.join()
        with suppress(OSError), _one_at_a_time(self._path.parent):
            if self._is_mine(self._path):
                self._path.unlink()

    def take(self, folder: Path) -> str:
        """Takes the folder, and keeps it until the end; waits up to `SILENT_S` for one that may be gone.

        Returns:
            From whom it was taken over, as words after "going on"; empty when nobody had left a lease.

        Raises:
            RunInUse: another process holds it.
            BadSettings: the folder cannot be written.
        """
        self._path, self._me = folder / LEASE_FILE, Holder.here()
        try:
            left = _taken(self._path, self._me)
        except OSError as error:
            raise unwritable(folder, error) from error
        self._thread = threading.Thread(target=self._renew, args=(self._path,), name="lease", daemon=True)
        self._thread.start()
        return "" if left is None else f"; its lease was taken over from {left}, which is gone"

    def lost(self) -> RunInUse:
        """What ends a run whose folder another one has taken over; nothing more may be written."""
        folder = "the run's folder" if self._path is None else str(self._path.parent)
        return RunInUse(
            f"{folder} was taken over by another process while this one trained, or its {LEASE_FILE} removed",
            stage="launch",
            fix=f"leave the run to that process; this one may have been silent for over {SILENT_S:.0f} s",
        )

    def _renew(self, path: Path) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                if not self._is_mine(path):
                    self.is_lost = True
                    return
                os.utime(path)
            except OSError:  # the file system is not there for a while: others do not see it either
                continue

    def _is_mine(self, path: Path) -> bool:
        found = _found(path)
        return found is not None and found.holder == self._me


def unwritable(folder: Path, error: OSError) -> BadSettings:
    """What a run's folder in which nothing can be written is."""
    return BadSettings(
        f"the run folder {folder} cannot be written: {error.strerror}",
        stage="launch",
        fix="make room, or go on with a copy of it in a place that can be written: --resume COPY",
    )


@dataclass(frozen=True, slots=True)
class Found:
    """A lease that lies there: whose it is, and when it was last renewed, in seconds since 1970."""

    holder: Holder
    beat: float

    @property
    def is_elsewhere(self) -> bool:
        """Whether its holder is on another machine."""
        return self.holder.machine != _machine()

    @property
    def lives_here(self) -> bool:
        """Whether its holder is a living process of this machine."""
        return not self.is_elsewhere and _born(self.holder.pid) == self.holder.born

    def is_gone(self, watched_s: float) -> bool:
        """Whether its holder is, after it has lain there for so long and was not renewed."""
        if not self.is_elsewhere:
            return not self.lives_here
        return watched_s >= SILENT_S or time.time() - self.beat > _LONG_AGO_S


def _taken(path: Path, me: Holder) -> Holder | None:
    """Writes `me` into a lease that is there for the taking, and returns who has left it.

    Raises:
        RunInUse: somebody holds it.
    """
    first, since = _found(path), time.monotonic()
    if first is not None and first.is_elsewhere and not first.is_gone(0):
        print(f"{path.parent} was held by {first.holder}: is it still? Up to {SILENT_S:.0f} s", flush=True)
    while True:
        with _one_at_a_time(path.parent):
            found = _found(path)
            if found is None or found.is_gone(time.monotonic() - since if found == first else 0):
                write_whole(path, [json.dumps(asdict(me)).encode() + b"\n"], mode=AS_USUAL)
                return None if found is None else found.holder
        if found.lives_here or found != first:
            raise in_use(path.parent, found)
        time.sleep(min(1.0, SILENT_S / 4))


def in_use(folder: Path, found: Found) -> RunInUse:
    """What refuses a folder that somebody holds."""
    began, renewed = (max(0.0, time.time() - when) for when in (found.holder.since, found.beat))
    return RunInUse(
        f"{found.holder} trains in {folder}: since {began:.0f} s, and it was there {renewed:.0f} s ago",
        stage="launch",
        fix="wait for its end, or end its launcher there (Ctrl-C or SIGTERM: it saves first), and start this "
        "again; a new run takes another --run.name",
    )


def living(folder: Path) -> Found | None:
    """The lease of a folder that a living process of this machine holds."""
    found = _found(folder / LEASE_FILE)
    return found if found is not None and found.lives_here else None


def _found(path: Path) -> Found | None:
    """The lease that lies there, if one does."""
    try:
        with path.open("rb") as file:
            beat, written = os.fstat(file.fileno()).st_mtime, file.read(10_000)
    except FileNotFoundError:
        return None
    try:
        fields: dict[str, Any] = json.loads(written)
        pid, since = int(fields.pop("pid")), float(fields.pop("since"))
        holder = Holder(pid=pid, since=since, **fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        holder = _UNKNOWN
    return Found(holder, beat)


@contextmanager
def _one_at_a_time(folder: Path) -> Generator[None]:
    """Only one process looks at a lease and writes it, where the file system has locks.

    Where it has none, two may take it in the same millisecond: the one that finds the other's ends.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
