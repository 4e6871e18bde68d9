"""Saves checkpoints during training: tensors are copied between two steps, and a thread writes them.

The saver has a process group of its own, so that its collectives do not mix with those of a step. A save
fails on all ranks or on none: PyTorch's save gathers the errors of all.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import async_save

from aotdist.errors import AotdistError, RankLost
from aotdist.launch.checkpoints.manifest import Heading, TextFacts, checkpoint_folder, read_manifest
from aotdist.launch.checkpoints.snapshot import NEVER, TrainState, tensors_of
from aotdist.launch.checkpoints.writer import AtomicWriter
from aotdist.launch.config import CheckpointOptions
from aotdist.launch.metrics import CheckpointRecord
from aotdist.launch.parallel import World


class CheckpointFailed(AotdistError):
    """The last checkpoint of a run could not be written; the one before it still exists."""


@dataclass(slots=True)
class _Save:
    """A save in progress.

    Args:
        started: its start, by `time.perf_counter`.
        waited_s: seconds that training has waited for it.
        ended: its end; 0 before.
    """

    step: int
    future: Future[Metadata]
    started: float
    waited_s: float
    ended: float = 0.0


class Saver:
    """Makes the checkpoints of a run; all ranks must call its methods in the same order.

    Leaving the context waits for the save in progress, unless a rank is lost, which would never end it.

    Args:
        options: when to save, and how many checkpoints to keep.
        text: that training reads, for the manifests.
        saved: the step of the checkpoint that training resumes from.
    """

    def __init__(
        self, root: Path, options: CheckpointOptions, world: World, text: TextFacts, saved: int = NEVER
    ) -> None:
        self._root = root
        self._options = options
        self._world = world
        self._text = text
        self._saved = saved
        self._group = _own_group(world) if options.every else None
        self._save: _Save | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._save is not None and not isinstance(error, RankLost | KeyboardInterrupt):
            wait([self._save.future])

    @property
    def has_save(self) -> bool:
        """Whether a save was started and not collected yet; the same on all ranks."""
        return self._save is not None

    @property
    def is_writing(self) -> bool:
        """Whether a save is in progress on this rank."""
        return self._save is not None and not self._save.future.done()

    def is_due(self, step: int) -> bool:
        """Whether to save after this step, if it is not the last."""
        return self._options.every > 0 and step % self._options.every == 0

    def start(self, state: TrainState) -> None:
        """Copies the state and starts to write it; no other save may be in progress."""
        started = time.perf_counter()
        writer = AtomicWriter(self._root, self._heading(state), self._options.keep)
        tensors = tensors_of(state, self._world.place.rank)
        answer = async_save(
            tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None
        )
        future = cast("Future[Metadata]", answer)  # a writer with `stage` gets the future alone
        self._save = save = _Save(state.step, future, started, time.perf_counter() - started)
        future.add_done_callback(lambda _: setattr(save, "ended", time.perf_counter()))
        if not self._options.asynchronous:
            self._wait(save)

    def collect(self) -> CheckpointRecord:
        """Waits for the save that was started, and records how it ended.

        Raises:
            Exception: a rank was lost, so that the others do not know how it ended.
        """
        save, self._save = self._save, None
        assert save is not None, "no save was started"
        self._wait(save)
        failure = _failure(save.future)
        num_bytes = 0
        if not failure:
            self._saved = save.step
            num_bytes = read_manifest(checkpoint_folder(self._root, save.step)).num_bytes
        seconds = max(save.ended - save.started, save.waited_s)  # the callback may run after `wait` returns
        return CheckpointRecord(save.step, num_bytes, seconds, save.waited_s, failure)

    def save_last(self, state: TrainState) -> CheckpointRecord | None:
        """Saves the final state, and waits for it; None if it is saved already, or checkpoints are off.

        Raises:
            CheckpointFailed: it could not be written.
        """
        if not self._options.every or self._saved == state.step:
            return None
        self.start(state)
        record = self.collect()
        if record.failure:
            raise CheckpointFailed(
                f"the checkpoint of step {record.step}, the last of this run, could not be written: "
                f"{record.failure}",
                stage="launch",
                fix="make room, or choose another place with --run.folder; `--resume` goes on from the "
                f"checkpoint before it{'' if self._saved == NEVER else f', of step {self._saved}'}",
            )
        return record

    def _wait(self, save: _Save) -> None:
        before = time.perf_counter()
        wait([save.future])
        save.waited_s += time.perf_counter() - before

    def _heading(self, state: TrainState) -> Heading:
        return Heading(
            step=state.step,
            position=state.stream.position,
            validated=state.validated,
            layout=self._world.layout.sizes,
            text=self._text,
        )


def _own_group(world: World) -> dist.ProcessGroup | None:
    if not world.place.launched:
        return None
    timeout = timedelta(seconds=world.timeout_s)
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))


def _failure(future: Future[Any]) -> str:
    """The rank and the error of a save that failed; empty if it did not."""
    try:
        future.result()
    except CheckpointException as error:
        rank, (fault, _) = min(error.failures.items())
        return f"rank {rank}: {type(fault).__name__}: {fault}"
    return ""
