"""Resumes a run: finds the last good checkpoint, and loads it into the training state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aotdist.errors import BadSettings
from aotdist.launch.checkpoints.manifest import (
    BadCheckpoint,
    Manifest,
    TextFacts,
    complete_checkpoints,
    first_damage,
    read_manifest,
    step_of,
)
from aotdist.launch.checkpoints.snapshot import NEVER, CheckedReader, TrainState, load_tensors
from aotdist.launch.parallel import World

_TEXT_FLAGS = {
    "seq_len": "--data.seq-len",
    "seed": "--run.seed",
    "sha256": "--data.root and --data.validation-percent, and no file of it changed",
}


@dataclass(frozen=True, slots=True)
class Resumed:
    """How training was resumed.

    Args:
        step: of the checkpoint; `NEVER` if there was none.
        refused: later checkpoints that are damaged, each with the reason.
    """

    step: int
    refused: tuple[str, ...]

    def __str__(self) -> str:
        where = "from the beginning, without a checkpoint" if self.step == NEVER else f"from step {self.step}"
        return "; ".join([where, *self.refused])


def resume(state: TrainState, root: Path, world: World, text: TextFacts) -> Resumed:
    """Load the latest checkpoint that is not damaged; every rank must take part.

    Args:
        world: the ranks; another number than saved the checkpoint will do.

    Raises:
        BadCheckpoint: all checkpoints are damaged, or the latest good one is of another model.
        BadSettings: the run was trained on another text.
    """
    refused: list[str] = []
    for folder in world.from_rank_0(lambda: complete_checkpoints(root)):
        found = _checked(folder, world)
        if not isinstance(found, str):
            _restore(state, *found, world, text)
            return Resumed(state.step, tuple(refused))
        refused.append(f"{folder.name} is refused: {found}")
    if refused:
        raise BadCheckpoint(
            f"none of the checkpoints in {root} is good: {'; '.join(refused)}",
            stage="launch",
            fix="bring one back from a copy, or begin a new run",
        )
    return Resumed(NEVER, ())


def _checked(folder: Path, world: World) -> tuple[Manifest, CheckedReader] | str:
    """A checkpoint, or why it is damaged; each rank checks a share of its files."""
    good = None
    try:
        manifest = read_manifest(folder)
        if manifest.heading.step != step_of(folder):
            raise BadCheckpoint(f"it is of step {manifest.heading.step}, by its manifest")
        share = sorted(manifest.files)[world.place.rank :: world.place.world_size]
        damage = first_damage(folder, manifest.files, share)
        if damage is None:
            good = manifest, CheckedReader(folder)
    except BadCheckpoint as error:
        damage = error.what
    found = [reason for reason in world.gather(damage) if reason is not None]
    if found or good is None:
        return found[0]
    return good


def _restore(
    state: TrainState, manifest: Manifest, reader: CheckedReader, world: World, text: TextFacts
) -> None:
    heading = manifest.heading
    for name, flag in _TEXT_FLAGS.items():
        before, now = getattr(heading.text, name), getattr(text, name)
        if before != now:
            raise BadSettings(
                f"the run's place in its text is lost: {name} was {before} and is {now}",
                fix=f"give it the text that it began with: {flag}",
            )
    load_tensors(state, reader, manifest, rank=world.place.rank, layout=world.layout.sizes)
    state.step, state.stream.position, state.validated = heading.step, heading.position, heading.validated
