"""The cells that have been filled, in a JSON file, with what it takes to fill them again."""

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

from benchmarks.record import machine, versions
from benchmarks.zoo.vocabulary import Family, Found, Kernels, Layout, Outcome, Place, Precision

_FILE = "models.json"


@dataclass(frozen=True, slots=True)
class Cell:
    """A place in the table, and what was found there with which aotdist."""

    kernels: Kernels
    layout: Layout
    family: Family
    precision: Precision
    aotdist: str
    found: Found

    @property
    def place(self) -> Place:
        """Where it stands."""
        return self.kernels, self.layout, self.family, self.precision


@dataclass(frozen=True, slots=True)
class Cells:
    """All cells, and the circumstances of those that were filled last."""

    command: str = ""
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()

    def with_found(self, place: Place, found: Found) -> Cells:
        """The same with one cell filled anew, just now."""
        current = versions() | {"transformers": metadata.version("transformers")}
        others = tuple(cell for cell in self.cells if cell.place != place)
        return Cells(
            command=shlex.join(["python", "-m", "benchmarks.zoo.run", *sys.argv[1:]]),
            date=datetime.date.today().isoformat(),
            versions=current,
            machine=machine(),
            cells=(*others, Cell(*place, current["aotdist"], found)),
        )

    def at(self, *place: *Place) -> Found | None:
        """What stands at a place, if it was filled."""
        return next((cell.found for cell in self.cells if cell.place == place), None)

    def save(self, folder: Path) -> None:
        """Write the file into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Cells:
        """Read what `save` wrote; no cells if nothing was."""
        file = folder / _FILE
        if not file.exists():
            return cls()
        fields: dict[str, Any] = json.loads(file.read_text())
        fields["cells"] = tuple(map(_cell, fields["cells"]))
        return cls(**fields)


def _cell(fields: dict[str, Any]) -> Cell:
    found: dict[str, Any] = fields["found"]
    for name, outcome in found["outcomes"].items():
        series = {key: tuple(outcome[key]) for key in ("seconds", "eager_seconds")}
        found["outcomes"][name] = Outcome(**outcome | series)
    fields["found"] = Found(**found)
    return Cell(**fields)
