"""What has been seen, in a JSON file, with what it takes to see it again."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ranks.vocabulary import Row, Seen
from benchmarks.record import machine, versions

_FILE = "differences.json"


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows, and the circumstances of the last one that was run."""

    command: str = ""
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    machine: Mapping[str, str] = field(default_factory=dict[str, str])
    rows: tuple[Row, ...] = ()

    def with_row(self, row: Row) -> Rows:
        """The same with one row run anew, just now."""
        others = tuple(each for each in self.rows if (each.scenario, each.way) != (row.scenario, row.way))
        return Rows(
            command=shlex.join(["python", "-m", "benchmarks.ranks.run", *sys.argv[1:]]),
            date=datetime.date.today().isoformat(),
            versions=versions(),
            machine=machine() | {"threads": "1 a rank"},
            rows=(*others, row),
        )

    def save(self, folder: Path) -> None:
        """Write the file into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Rows:
        """Read what `save` wrote; no rows if nothing was."""
        file = folder / _FILE
        if not file.exists():
            return cls()
        fields: dict[str, Any] = json.loads(file.read_text())
        fields["rows"] = tuple(map(_row, fields["rows"]))
        return cls(**fields)


def _row(fields: dict[str, Any]) -> Row:
    for side in ("ours", "eager"):
        fields[side] = tuple(Seen(**seen) for seen in fields[side])
    return Row(**fields)
