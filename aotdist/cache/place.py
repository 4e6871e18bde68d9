"""Where one thing is kept: looked for, made in turn, filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from aotdist.cache.entry import Entry
from aotdist.cache.folder import Folder
from aotdist.cache.turns import Turn
from aotdist.errors import AotdistError

T = TypeVar("T")

_UNREADABLE = (AotdistError, OSError, ImportError, LookupError, TypeError, ValueError, AttributeError)
"""What reading an entry raises whose content is not what this aotdist writes."""


class Place:
    """A key of a folder, and the turn of this process to fill it.

    Args:
        folder: that it is in.
        key: see `key.key_of`.
        about: what is kept there, for people.
        patience_s: how long to wait for another process that is making it.
    """

    def __init__(self, folder: Folder, key: str, about: Mapping[str, str], patience_s: float) -> None:
        self._folder = folder
        self._key = key
        self._about = about
        self._patience_s = patience_s
        self._turn: Turn | None = None

    def look(self, read: Callable[[Entry], T]) -> T | None:
        """What is kept there; None if it is to be made, which is then this process's turn.

        Args:
            read: makes it of the entry.
        """
        found = self._read(read)
        if found is None:
            self._turn = self._folder.turn(self._key, self._patience_s)
            found = self._read(read)  # by whoever had the turn before
        if found is not None:
            self.leave()
        return found

    def fill(self, content: Any, binaries: tuple[bytes, ...]) -> None:
        """Keep what was made."""
        self._folder.keep(Entry(self._key, self._about, content, binaries))

    def leave(self) -> None:
        """Let the next one look. Idempotent."""
        if self._turn is not None:
            self._turn.release()

    def _read(self, read: Callable[[Entry], T]) -> T | None:
        entry = self._folder.get(self._key)
        if entry is None:
            return None
        try:
            return read(entry)
        except _UNREADABLE as error:
            self._folder.warn(f"the entry {self._key} is ignored: {type(error).__name__}: {error}")
            return None
