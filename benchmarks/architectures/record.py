"""What has been found, in a JSON file, with what it takes to find it again."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.architectures.vocabulary import Found, Half, Rounded, Way
from benchmarks.record import machine, versions

_FILE = "zoo.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """A model run in one way, and with which aotdist."""

    model: str
    way: Way
    aotdist: str
    found: Found


@dataclass(frozen=True, slots=True)
class Entries:
    """All that has been found, and the circumstances of what was found last."""

    command: str = ""
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()

    def with_found(self, model: str, way: Way, found: Found) -> Entries:
        """The same with one entry found anew, just now."""
        current = versions() | {"transformers": metadata.version("transformers")}
        others = tuple(entry for entry in self.entries if (entry.model, entry.way) != (model, way))
        return Entries(
            command=shlex.join(["python", "-m", "benchmarks.architectures.run", *sys.argv[1:]]),
            date=datetime.date.today().isoformat(),
            versions=current,
            machine=machine() | {"threads": "1"},
            entries=(*others, Entry(model, way, current["aotdist"], found)),
        )

    def at(self, model: str, way: Way) -> Found | None:
        """What was found about a model run in one way, if it was."""
        return next((each.found for each in self.entries if (each.model, each.way) == (model, way)), None)

    def save(self, folder: Path) -> None:
        """Write the file into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Entries:
        """Read what `save` wrote; no entries if nothing was."""
        file = folder / _FILE
        if not file.exists():
            return cls()
        fields: dict[str, Any] = json.loads(file.read_text())
        fields["entries"] = tuple(map(_entry, fields["entries"]))
        return cls(**fields)


def _entry(fields: dict[str, Any]) -> Entry:
    found: dict[str, Any] = fields["found"]
    for part in ("training", "told", "generation", "told_generation"):
        half = found[part]
        found[part] = None if half is None else Half(**half | {"breaks": tuple(half["breaks"])})
    for series in ("seconds", "eager_seconds"):
        found[series] = tuple(found[series])
    rounded = found.get("rounded")
    found["rounded"] = None if rounded is None else Rounded(**rounded | {"told": tuple(rounded["told"])})
    fields["found"] = Found(**found)
    return Entry(**fields)
