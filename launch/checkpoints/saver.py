"""Saves checkpoints beside training: the copy is taken between two steps, the writing is done by a thread.

The ranks agree on what they write in a process group of the saver's own, so its collectives and those of a
step do not meet. A save that fails does so on all ranks alike: PyTorch's save gathers the faults of all.
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
    """The last checkpoint of a run could not be written; the one before it is still there."""


@dataclass(slots=True)
class _Save:
    """One that is under way.

    Args:
        step: of the checkpoint.
        future: done when the checkpoint is there, or has failed.
        started: when it began, by `time.perf_counter`.
        waited_s: seconds that training has stood still for it.
        ended: when it was done; 0 before.
    """

    step: int
    future: Future[Metadata]
    started: float
    waited_s: float
    ended: float = 0.0


class Saver:
    """Makes the checkpoints of a run; to be used in the same order on all ranks.

    Leaving it waits for the save that is under way, unless a rank is lost, whom it would wait for in vain.

    Args:
        root: the run's folder of checkpoints.
        options: when, and how many are kept.
        world: the ranks.
        text: what positions in the text count in; it stands in every manifest.
        saved: the step of the checkpoint that training goes on from.
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
        """Whether a save was started and not collected; the same on all ranks."""
        return self._save is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank has not heard yet how its save ended."""
        return self._save is not None and not self._save.future.done()

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be made after this step, which is not the last."""
        return self._options.every > 0 and step % self._options.every == 0

    def start(self, state: TrainState) -> None:
        """Copies the state and begins to write it; nothing else may be under way."""
        started = time.perf_counter()
        writer = AtomicWriter(self._root, self._heading(state), self._options.keep)
        tensors = tensors_of(state, self._world.place.rank)
        answer = async_save(
            tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None
        )
        future = cast("Future[Metadata]", answer)  # that alone, with a writer that stages
        self._save = save = _Save(state.step, future, started, time.perf_counter() - started)
        future.add_done_callback(lambda _: setattr(save, "ended", time.perf_counter()))
        if not self._options.asynchronous:
            self._wait(save)

    def collect(self) -> CheckpointRecord:
        """Waits for the save that was started, and says how it ended.

        Raises:
            Exception: the ranks could not agree on how it ended: one of them is gone.
        """
        save, self._save = self._save, None
        assert save is not None, "no save was started"
        self._wait(save)
        failure = _failure(save.future)
        num_bytes = 0
        if not failure:
            self._saved = save.step
            num_bytes = read_manifest(checkpoint_folder(self._root, save.step)).num_bytes
        seconds = max(save.ended - save.started, save.waited_s)  # who waits may wake before the callback runs
        return CheckpointRecord(save.step, num_bytes, seconds, save.waited_s, failure)

    def save_last(self, state: TrainState) -> CheckpointRecord | None:
        """Saves what training leaves behind, and waits for it; None when it is saved already, or not to be.

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
    """Why a save failed, on which rank; empty when it did not."""
    try:
        future.result()
    except CheckpointException as error:
        rank, (fault, _) = min(error.failures.items())
        return f"rank {rank}: {type(fault).__name__}: {fault}"
    return ""
