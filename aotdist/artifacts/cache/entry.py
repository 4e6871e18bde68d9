"""One entry: JSON and binaries in one file, with a checksum over all of it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aotdist.errors import CacheCorrupt

_MAGIC = b"aotdist cache 1\n"
"""The number goes up with every change of what is written; entries of another format are none."""

_DIGEST, _LENGTH = 32, 8


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept under a key.

    Args:
        key: the entry knows its own, so that a file under another name is no entry.
        about: what it is of and was made with, for people.
        content: as JSON has it.
        binaries: in an order that the content knows.
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
