"""Cache entries on disk: written atomically, readable by their owner alone, limited in total size."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import stat
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aotdist.errors import CacheCorrupt
from aotdist.files import OWNER_ONLY, is_owners_alone, write_whole

_MAGIC = b"aotdist cache 1\n"
"""The number is increased with every change of what is written; entries of other formats are ignored."""

_DIGEST, _LENGTH = 32, 8


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept under a key.

    Args:
        key: its own key, so that a renamed file is no entry.
        about: what it was made of and with, for people.
        content: a JSON value.
        binaries: extension modules, in the order in which the content refers to them.
    """

    key: str
    about: Mapping[str, str]
    content: Any
    binaries: tuple[bytes, ...] = ()

    def packed(self) -> bytes:
        """The file of the entry."""
        sizes = [len(binary) for binary in self.binaries]
        fields = {"key": self.key, "about": dict(self.about), "content": self.content, "sizes": sizes}
        header = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
        body = b"".join((len(header).to_bytes(_LENGTH, "big"), header, *self.binaries))
        return _MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def unpacked(cls, key: str, data: bytes) -> Entry:
        """The entry that a file holds.

        Raises:
            CacheCorrupt: it holds none, or that of another key.
        """
        start = len(_MAGIC) + _DIGEST
        body = data[start:]
        if not data.startswith(_MAGIC):
            raise CacheCorrupt("it is no entry of this format", stage="cache")
        if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
            raise CacheCorrupt("it is damaged: its checksum is another", stage="cache")
        end = _LENGTH + int.from_bytes(body[:_LENGTH], "big")
        try:
            fields = json.loads(body[_LENGTH:end])
            ends = list(itertools.accumulate(fields["sizes"], initial=end))
            found = cls(fields["key"], fields["about"], fields["content"])
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise CacheCorrupt(f"it is written in another way ({error})", stage="cache") from error
        if found.key != key:
            raise CacheCorrupt("it is of another key", stage="cache")
        if ends[-1] != len(body):
            raise CacheCorrupt("it has more bytes, or less, than it says", stage="cache")
        return replace(found, binaries=tuple(body[low:high] for low, high in itertools.pairwise(ends)))


_SUFFIX = ".entry"
_NUM_LOCKS = 64
_ABANDONED_S = 3600.0
"""The age at which an unfinished file is taken for that of a writer that has died."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry in a list; it may be damaged.

    Args:
        key: of the entry.
        num_bytes: of its file.
        used: time of its last use, as by `time.time`.
    """

    key: str
    num_bytes: int
    used: float


class Folder:
    """The entries of a folder.

    Errors of the disk are warnings, once for a process: an entry that cannot be read counts as missing, and
    one that cannot be written is not kept.

    Args:
        path: of the folder, which is made when something is first kept.
        limit: bytes of entries to keep; the least recently used are removed first.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self._limit = limit
        self._has_warned = False

    @classmethod
    @functools.cache
    def within(cls, path: Path, limit: int) -> Folder:
        """The folder at a path, one object for all programs of a process."""
        return cls(path, limit)

    def get(self, key: str) -> Entry | None:
        """The entry of a key, if there is a whole one."""
        if self._complaint() is not None:
            return None
        try:
            found = self.checked(key)
        except FileNotFoundError:
            return None
        except (OSError, CacheCorrupt) as error:
            self.warn(f"{self._file(key)} is ignored: {_what(error)}")
            return None
        with contextlib.suppress(OSError):
            os.utime(self._file(key))
        return found

    def checked(self, key: str) -> Entry:
        """The entry of a key.

        Raises:
            OSError: it cannot be read.
            CacheCorrupt: it is damaged, or not ours.
        """
        with open(self._file(key), "rb", opener=_no_link) as file:
            known = os.fstat(file.fileno())
            if not stat.S_ISREG(known.st_mode):
                raise CacheCorrupt("it is no file", stage="cache")
            if not is_owners_alone(known):
                raise CacheCorrupt("others than you may have written it", stage="cache")
            return Entry.unpacked(key, file.read())

    def keep(self, entry: Entry) -> None:
        """Keep an entry, if it can be kept."""
        data = entry.packed()
        if len(data) > self._limit:
            return
        try:
            self._make()
            if self._complaint() is None:
                self._make_room(len(data))
                write_whole(self._file(entry.key), [data])
        except OSError as error:
            self.warn(f"what was compiled is not kept in {self.path}: {error}")

    def turn(self, key: str, patience_s: float) -> Turn | None:
        """The right to make the entry of a key, see `turn`."""
        with contextlib.suppress(OSError):
            self._make()
        if self._complaint() is not None:
            return None
        number = int(hashlib.sha256(key.encode()).hexdigest(), 16) % _NUM_LOCKS
        return turn(self.path / f"turns-{number}.lock", patience_s)

    def listed(self) -> list[Listed]:
        """All entries, damaged ones too, most recently used first."""
        found = [Listed(path.stem, known.st_size, known.st_mtime) for path, known in self._files(_SUFFIX)]
        return sorted(found, key=lambda each: -each.used)

    def remove(self, key: str) -> None:
        """Delete an entry.

        Raises:
            OSError: it cannot be deleted.
        """
        self._file(key).unlink(missing_ok=True)

    def complaint(self) -> str | None:
        """Why the folder cannot be used, if so."""
        try:
            known = self.path.lstat()
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            file = next(one for one in self.path.parents if one.exists())
            return f"the cache folder {self.path} cannot be made: {file} is a file"
        except OSError as error:
            return f"the cache folder {self.path} cannot be read: {error}"
        if not stat.S_ISDIR(known.st_mode):
            is_file = stat.S_ISREG(known.st_mode)
            return f"the cache folder {self.path} is {'a file' if is_file else 'no folder'}"
        if known.st_uid != os.geteuid():
            return f"the cache folder {self.path} belongs to another user"
        if not is_owners_alone(known):
            return f"the cache folder {self.path} can be written by others than you (`chmod 700` it)"
        return None

    def warn(self, text: str) -> None:
        """Warn, the first time; programs are compiled as if there were no cache."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"aotdist: {text}", stacklevel=2)

    def _complaint(self) -> str | None:
        complaint = self.complaint()
        if complaint is not None:
            self.warn(complaint)
        return complaint

    def _make(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least recently used entries, and unfinished files of writers that have died."""
        for path, known in self._files(""):
            if path.name.startswith(".") and time.time() - known.st_mtime > _ABANDONED_S:
                path.unlink(missing_ok=True)
        entries = self.listed()
        total = num_bytes + sum(each.num_bytes for each in entries)
        while entries and total > self._limit:
            oldest = entries.pop()
            self.remove(oldest.key)
            total -= oldest.num_bytes

    def _files(self, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
        """The files of the folder; other processes may remove some meanwhile."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in sorted(self.path.iterdir()):
                if path.name.endswith(suffix) and (not suffix or not path.name.startswith(".")):
                    with contextlib.suppress(FileNotFoundError):
                        known = path.lstat()
                        if not stat.S_ISDIR(known.st_mode):
                            yield path, known

    def _file(self, key: str) -> Path:
        return self.path / f"{key}{_SUFFIX}"


def _no_link(path: str, flags: int) -> int:
    """An opener for `open` that follows no link, and does not block."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _what(error: OSError | CacheCorrupt) -> str:
    return error.what if isinstance(error, CacheCorrupt) else str(error)


_POLL_S = 0.02
_held = threading.local()


class Turn:
    """The right of this process to make an entry: a file lock. It ends with `release`, or with this object.

    Args:
        descriptor: of the locked file.
    """

    def __init__(self, descriptor: int) -> None:
        self._close = weakref.finalize(self, _released, descriptor, threading.get_ident())
        _held.count = getattr(_held, "count", 0) + 1

    def release(self) -> None:
        """Let the next process have it. Idempotent."""
        self._close()


def _released(descriptor: int, thread: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may have the descriptor as well
    os.close(descriptor)
    if thread == threading.get_ident():
        _held.count -= 1


def turn(file: Path, patience_s: float) -> Turn | None:
    """Wait for the turn; None if it does not come in time, cannot be had, or this thread holds another.

    Args:
        file: the file to lock; made if it does not exist, and never removed.
        patience_s: how long to wait.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, OWNER_ONLY)
    except OSError:
        return None
    deadline = time.monotonic() + (0 if getattr(_held, "count", 0) else patience_s)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
        except OSError:  # a file system without locks
            pass
        else:
            return Turn(descriptor)
        os.close(descriptor)
        return None
