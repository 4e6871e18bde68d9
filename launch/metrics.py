"""The records of a run: one JSON object per line, written before the next step begins.

Floats read back as the same bits (`repr`), so two runs can be compared exactly.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from aotdist.errors import BadSettings
from aotdist.files import AS_USUAL, write_whole

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step.

    Args:
        step: its number, from 1.
        loss: mean over all ranks and micro steps, in nats per byte, before the step.
        grad_norm: of the whole gradient, before clipping.
        lr: learning rate.
        tokens: bytes that all ranks have trained on so far.
        seconds: wall time of the step.
        tokens_per_s: of all ranks together.
        memory_bytes: peak of this rank so far: allocated GPU memory, or resident memory on a CPU.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    tokens_per_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ValidationRecord:
    """The loss on held-out files after `step` steps, in nats per byte."""

    step: int
    loss: float
    tokens: int


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A save that has ended.

    Args:
        step: of the checkpoint.
        num_bytes: on disk, of all ranks.
        seconds: from the end of the step until the checkpoint was complete.
        waited_s: how long training waited for it.
        failure: why the save failed; empty if it did not.
    """

    step: int
    num_bytes: int
    seconds: float
    waited_s: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class EndRecord:
    """How the run ended, after `step` steps and `seconds` of wall time, start-up included."""

    status: Literal["finished", "stopped"]
    step: int
    seconds: float


Record: TypeAlias = StepRecord | ValidationRecord | CheckpointRecord | EndRecord

_KINDS: dict[str, Callable[..., Record]] = {
    "step": StepRecord,
    "validation": ValidationRecord,
    "checkpoint": CheckpointRecord,
    "end": EndRecord,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_line(record: Record) -> str:
    """One line of JSON; a number that JSON cannot write (inf, nan) becomes null."""
    fields = {name: _finite(value) for name, value in dataclasses.asdict(record).items()}
    return json.dumps({"kind": _NAMES[type(record)], **fields}, allow_nan=False)


_TYPES = {"int": int, "float": int | float}
"""Types of fields in JSON, by annotation; all others are strings."""


def from_line(line: str | bytes) -> Record:
    """The record in a line; null becomes nan.

    Raises:
        ValueError: the line contains no record.
    """
    try:
        fields: dict[str, Any] = dict(json.loads(line))
        make = _KINDS[fields.pop("kind")]
        record = make(**{name: math.nan if value is None else value for name, value in fields.items()})
    except (KeyError, TypeError) as error:
        raise ValueError(f"no record has {error}") from error
    for field in dataclasses.fields(record):
        if not isinstance(getattr(record, field.name), _TYPES.get(str(field.type), str)):
            raise ValueError(f"{field.name} is no {field.type}")
    return record


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """Appends records to a file, as its only writer.

    Each line is a single unbuffered write in append mode: a process that is killed leaves whole lines, and so
    does a disk that is full. A power failure may lose the records since the last validation, when the file is
    synced.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def record(self, record: Record) -> None:
        """Writes one line.

        Raises:
            OSError: it cannot be written; the file is as before.
        """
        line, length = (to_line(record) + "\n").encode(), os.fstat(self._descriptor).st_size
        written = os.write(self._descriptor, line)
        if written < len(line):
            os.ftruncate(self._descriptor, length)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not isinstance(record, StepRecord):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_metrics(path: Path) -> list[Record]:
    """All records of a file; damaged lines are skipped with a warning, a truncated last line without.

    Raises:
        BadSettings: it is a folder, or may not be read.
    """
    return _records(path)[0]


def _records(path: Path) -> tuple[list[Record], bool]:
    """The records of a file, and whether its last line is truncated."""
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except (IsADirectoryError, PermissionError) as error:
        raise BadSettings(
            f"{path} cannot be read: {error.strerror}",
            stage="launch",
            fix="move it away: a run goes on from its checkpoint without what it recorded before",
        ) from error
    found = [_record_or_none(line) for line in lines]
    records = [record for record in found if record is not None]
    if len(records) < len(lines):
        first, count = found.index(None) + 1, len(lines) - len(records)
        warnings.warn(f"aotdist: {path}: {count} damaged, the first in line {first}: left out", stacklevel=3)
    return records, bool(rest)


def _record_or_none(line: bytes) -> Record | None:
    try:
        return from_line(line)
    except ValueError:  # also for invalid UTF-8
        return None


def cut_metrics(path: Path, step: int, validated: int) -> None:
    """Rewrite a file atomically without the records that a resumed run will write again.

    Args:
        path: of the file.
        step: that training resumes from; later steps are dropped.
        validated: the last validation of the checkpoint; later validations are dropped.

    Raises:
        BadSettings: it is a folder, or may not be read.
        OSError: it cannot be written.
    """
    records, is_cut_short = _records(path) if path.exists() else ([], False)
    if is_cut_short:
        warnings.warn(f"aotdist: {path}: its last line was cut short: left out", stacklevel=2)
    kept = [r for r in records if r.step <= (validated if isinstance(r, ValidationRecord) else step)]
    write_whole(path, ((to_line(record) + "\n").encode() for record in kept), mode=AS_USUAL)
