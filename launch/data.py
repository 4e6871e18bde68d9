"""The text: Python files joined into two byte strings, and each rank's stream through them.

Whole files are held out for validation. The order of training windows depends on the seed alone, and the
position of a stream is one number, the windows that all ranks together have consumed: training may resume
there on any number of ranks.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from aotdist.errors import BadSettings
from aotdist.launch.config import DataOptions

SEPARATOR = b"\0"
"""Stands between files: a byte that no Python source contains."""

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
"""Not the library itself, and shipped by some distributions only."""


class Batch(NamedTuple):
    """Input bytes, and the byte that follows each of them.

    Shapes: both (B, T), int64.
    """

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and validation text; `sha256` is of both.

    Shapes: one dimension each, uint8.
    """

    training: Tensor
    validation: Tensor
    root: Path
    num_files: int
    sha256: str


def source_files(root: Path) -> list[Path]:
    """Every Python file of the library below `root`, relative to it, in one order on every machine."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found.extend(Path(folder, name).relative_to(root) for name in names if name.endswith(".py"))
    return sorted(found, key=lambda path: path.as_posix())


def is_held_out(path: Path, percent: int) -> bool:
    """Whether a file is for validation; this depends on its name alone, not on other files."""
    digest = hashlib.sha256(path.as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < percent


def load_corpus(options: DataOptions) -> Corpus:
    """The text that `options` describe; every rank reads it (12 MB of the standard library in 0.2 s).

    Raises:
        BadSettings: there is too little text, or it cannot be read.
    """
    root = options.root or Path(sysconfig.get_paths()["stdlib"])
    paths = source_files(root)
    halves, digest = list[Tensor](), hashlib.sha256()
    for held_out in (False, True):
        joined = _joined(root, [p for p in paths if is_held_out(p, options.validation_percent) == held_out])
        if len(joined) <= options.seq_len:
            raise BadSettings(
                f"{root} holds {len(joined)} bytes of {'validation' if held_out else 'training'} text, fewer "
                f"than one sequence of {options.seq_len + 1}",
                fix="choose a folder with more Python files (--data.root), or a smaller --data.seq-len",
            )
        halves.append(torch.frombuffer(joined, dtype=torch.uint8))
        digest.update(hashlib.sha256(joined).hexdigest().encode())
    return Corpus(halves[0], halves[1], root, len(paths), digest.hexdigest())


def _joined(root: Path, paths: Sequence[Path]) -> bytearray:
    try:
        return bytearray().join(part for path in paths for part in ((root / path).read_bytes(), SEPARATOR))
    except OSError as error:
        raise BadSettings(f"the text cannot be read: {error}", fix="choose another --data.root") from error


@dataclass(frozen=True, slots=True)
class Windows:
    """A text cut into sequences of `seq_len` bytes, each with the byte that follows it."""

    text: Tensor
    seq_len: int

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def batch(self, windows: Tensor) -> Batch:
        """The sequences with these numbers.

        Shapes: windows (B,) int64.
        """
        offsets = torch.arange(self.seq_len + 1)
        rows = self.text[windows[:, None] * self.seq_len + offsets].long()
        return Batch(tokens=rows[:, :-1].contiguous(), targets=rows[:, 1:].contiguous())


class ByteStream:
    """One data-parallel rank's endless stream of training batches.

    All ranks walk through one seeded order of the windows, a new one in each epoch; of every
    `num_ranks * batch_size` consecutive windows, a rank takes its own `batch_size`.

    Args:
        batch_size: sequences of one batch, per rank.
        rank: place among the data-parallel ranks.
        position: windows that all ranks together have consumed; the whole state of a stream.
    """

    def __init__(
        self, windows: Windows, *, batch_size: int, rank: int, num_ranks: int, seed: int, position: int = 0
    ) -> None:
        self.position = position
        self._windows = windows
        self._batch_size = batch_size
        self._rank = rank
        self._num_ranks = num_ranks
        self._seed = seed
        self._order = (-1, torch.empty(0, dtype=torch.int64))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        first = self.position + self._rank * self._batch_size
        windows = [self._window_at(first + offset) for offset in range(self._batch_size)]
        self.position += self._num_ranks * self._batch_size
        return self._windows.batch(torch.tensor(windows))

    def _window_at(self, position: int) -> int:
        epoch, place = divmod(position, len(self._windows))
        return int(self._epoch_order(epoch)[place])

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order[0] != epoch:
            digest = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            self._order = (epoch, torch.randperm(len(self._windows), generator=generator))
        return self._order[1]


def validation_batches(
    windows: Windows, *, num_batches: int, batch_size: int, rank: int, num_ranks: int
) -> Iterator[Batch]:
    """This rank's share of validation batches, the same ones every time, spread evenly over the text.

    With less text than asked for, windows repeat: every rank has `num_batches` in any case.
    """
    wanted = num_batches * num_ranks * batch_size
    spread = torch.arange(wanted) * len(windows) // wanted
    mine = spread.view(num_batches, num_ranks, batch_size)[:, rank]
    return (windows.batch(numbers) for numbers in mine)
