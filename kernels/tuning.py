"""Kernels with several configurations: the first launch measures each, and the quickest runs from then on.

The choice is kept in a folder, so that a kernel is measured once for a kind of GPU; kernels whose sources are
equal up to names count as one. Each configuration computes the same, so measuring has no effect; a kernel
that overwrites an input is measured on a copy.

Another configuration may sum in another order, and so differ in the last bits. Where several ranks run, or
results must be deterministic, kernels that reduce are not tuned (`Tuner.reductions`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from aotdist.files import write_whole
from aotdist.kernels import triton_seam
from aotdist.kernels.compilation import pointers_of
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.launching import Config
from aotdist.kernels.running import Runner, copied, on_device

_TENSOR = re.compile(r"\b(?:in|out)_\w+")


@dataclass(frozen=True, slots=True)
class Tuner:
    """How kernels are tuned.

    Args:
        choices: what was chosen before, and where it is kept.
        reductions: whether kernels that reduce are tuned.
        clock: tells how many seconds the GPU needs for what a function starts.
    """

    choices: Choices
    reductions: bool
    clock: Callable[[Callable[[], None]], float] = triton_seam.seconds_of_few

    def may_tune(self, emitted: EmittedKernel) -> bool:
        """Whether a kernel may run in any of its configurations."""
        return self.reductions or not emitted.kernel.r or emitted.kernel.is_tiled

    def known(self, source: str, ways: Sequence[Config], device: torch.device) -> Config | None:
        """The configuration that was chosen for a kernel before, if any.

        Args:
            source: the kernel, see `nameless_source`.
            ways: its configurations.
            device: where it runs.
        """
        with on_device(device):
            return self.choices.get(_key(source), ways)


class Tuned:
    """A kernel that chooses among configurations when it is first started.

    Args:
        ways: runners by configuration; the first runs where nothing can be measured.
        source: the kernel, see `nameless_source`.
        device: where it runs.
        overwritten: positions of the inputs that it writes.
        tuner: measures and keeps the choice.
    """

    def __init__(
        self,
        ways: Mapping[Config, Runner],
        source: str,
        device: torch.device,
        overwritten: frozenset[int],
        tuner: Tuner,
    ) -> None:
        self._ways = ways
        self._source = source
        self._device = device
        self._overwritten = overwritten
        self._tuner = tuner
        self._chosen: Runner | None = None

    @property
    def num_blocks(self) -> int:
        """See `Runner`: of the first way, until one is chosen."""
        first, *_ = self._ways.values()
        return first.num_blocks

    @property
    def registers(self) -> int | None:
        """See `Runner`."""
        return self._chosen.registers if self._chosen else None

    def __call__(self, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """See `Runner`."""
        way = self._chosen or self._choose(inputs, written)
        way(inputs, written)

    def _choose(self, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> Runner:
        first, *_ = self._ways
        if triton_seam.is_recording():
            return self._ways[first]  # a CUDA graph would hold all that is measured
        with on_device(self._device):
            key = _key(self._source)
            chosen = self._tuner.choices.get(key, tuple(self._ways))
            if chosen is None:
                seconds = self._measured(inputs, written)
                chosen = self._tuner.choices.keep(key, seconds) if seconds else first
        self._chosen = self._ways[chosen]
        self._ways = {chosen: self._chosen}
        return self._chosen

    def _measured(
        self, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> dict[Config, float]:
        """Seconds by configuration; none if there is no memory to measure in."""
        seconds: dict[Config, float] = {}
        try:
            arguments = [copied(x) if at in self._overwritten else x for at, x in enumerate(inputs)]
            for config, way in self._ways.items():
                start = functools.partial(way, arguments, written)
                with contextlib.suppress(triton_seam.too_large()):
                    seconds[config] = self._tuner.clock(start)
        except torch.OutOfMemoryError:
            return {}
        return seconds


def _key(source: str) -> str:
    """The name of the file of a choice for the current GPU."""
    parts = json.dumps([*triton_seam.gpu_and_version(), source])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def nameless_source(emitted: EmittedKernel) -> str:
    """The source of a kernel without tensor names, equal for kernels that differ only in these."""
    types = pointers_of(emitted)
    places = {name: f"t{at}" for at, name in enumerate(types)}
    lines = [_TENSOR.sub(lambda name: places[name[0]], line) for line in emitted.printed.body]
    return "\n".join([" ".join(types.values()), *lines])


# Choices and the folder that they are kept in.

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
        """The choices of a folder, one object for all kernels of a process."""
        return cls(folder)

    def get(self, key: str, ways: Sequence[Config]) -> Config | None:
        """The configuration that was chosen for a kernel, if it is one of `ways`.

        Args:
            key: of the kernel on the current GPU.
            ways: its configurations.
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
            entry = json.loads(file.read_text())
            if entry["version"] != _VERSION:
                return None
            chosen = entry["chosen"]
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
