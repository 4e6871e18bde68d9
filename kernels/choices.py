"""Which configuration of a kernel was the quickest: measured once for a GPU, and kept in a folder."""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from aotdist.files import write_whole
from aotdist.kernels.launching import Config

_VERSION = 1


class Choices:
    """Configurations by kernel, one small file for each: written whole or not at all, readable by the owner.

    A file that cannot be read or written is warned about once; what it is about is then measured again.

    Args:
        folder: where; made when something is first kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Config] = {}
        self._has_warned = False

    @classmethod
    @functools.cache
    def within(cls, folder: Path) -> Choices:
        """Those of a folder: the same for all kernels of a process."""
        return cls(folder)

    def get(self, key: str, ways: Sequence[Config]) -> Config | None:
        """What was chosen, if that is one of the ways there are.

        Args:
            key: of the kernel, see `key_of`.
            ways: configurations that it may have.
        """
        if key not in self._known:
            found = self._read(self._folder / f"{key}.json", ways)
            if found is None:
                return None
            self._known[key] = found
        return self._known[key]

    def keep(self, key: str, seconds: Mapping[Config, float]) -> Config:
        """Choose the quickest.

        Args:
            key: of the kernel.
            seconds: that it took, by configuration.
        """
        chosen = self._known[key] = min(seconds, key=seconds.__getitem__)
        measured = [{**asdict(config), "seconds": took} for config, took in seconds.items()]
        text = json.dumps({"version": _VERSION, "chosen": asdict(chosen), "measured": measured}, indent=1)
        try:
            self._write(self._folder / f"{key}.json", text)
        except OSError as error:
            self._warn(f"what was measured is not kept in {self._folder}: {error}")
        return chosen

    def _read(self, file: Path, ways: Sequence[Config]) -> Config | None:
        try:
            kept = json.loads(file.read_text())
            if kept["version"] != _VERSION:
                return None
            chosen = kept["chosen"]
            return next(config for config in ways if asdict(config) == chosen)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, LookupError, TypeError, StopIteration) as error:
            self._warn(f"{file} names no configuration of its kernel, which is measured again: {error!r}")
            return None

    def _write(self, file: Path, text: str) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(file, [text.encode()])

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"aotdist: {text}", stacklevel=2)


def key_of(*parts: object) -> str:
    """A name for a kernel on a GPU: equal for equal parts, in every process.

    Args:
        parts: all that its speed depends on, as JSON has it.
    """
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
