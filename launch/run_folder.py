"""The folder that a run leaves behind, and the configuration in it."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aotdist.errors import BadSettings
from aotdist.files import AS_USUAL, with_checksum, write_whole
from aotdist.launch.config import AUTO, CONFIG_FILE, JobOptions, RunOptions
from aotdist.launch.parallel import Place, World
from aotdist.launch.run_lock import LOCK_FILE, RunLock, is_locked, refuse_locked

CURVE_FILE = "loss.png"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run writes.

    Args:
        path: the folder.
        is_new: whether this process made it; otherwise the run that began there goes on.
    """

    path: Path
    is_new: bool


def claim_run_folder(options: JobOptions, place: Place, lock: RunLock) -> RunFolder:
    """Takes the folder of the run that the options mean: a new one, or that of a run that is to go on.

    Only rank 0 may do this.

    Raises:
        BadSettings: the name is taken, the folder cannot be made or written, or there is no such run.
        RunInUse: another process trains in it.
    """
    before = folder_of_run(options, place)
    folder = before or _new_folder(options.run)
    lock.take(folder)
    return RunFolder(folder, is_new=before is None)


def folder_of_run(options: JobOptions, place: Place) -> Path | None:
    """The folder of the run that is to go on; None for a new run.

    That is the one that `--resume` names, or the one that this torchrun made before it started the ranks
    again.

    Raises:
        BadSettings: it says that there may be one, and not which.
    """
    named = _folder_named(options)
    return _folder_of_launch(options.run, place.launch_id) if named is None and place.restarts else named


def _folder_named(options: JobOptions) -> Path | None:
    run = options.run
    if options.resume != AUTO:
        return None if options.resume is None else Path(options.resume)
    if run.name is None:
        fix = "give the run a name that the next start knows too: --run.name"
        raise BadSettings("--resume auto does not know which run is meant", fix=fix)
    return run.folder / run.name if (run.folder / run.name / CONFIG_FILE).exists() else None


def refuse_taken(options: JobOptions) -> None:
    """Refuse the name of a run that is there or that others train, before ranks are started; nothing is made.

    Raises:
        BadSettings: it is taken.
        RunInUse: another process of this machine trains in its folder.
    """
    run, before = options.run, _folder_named(options)
    if before is not None:
        refuse_locked(before)
    if options.resume is None and run.name is not None and (run.folder / run.name).exists():
        if not _died_at_birth(run.folder / run.name):
            raise _taken(run, run.name)


def _taken(options: RunOptions, name: str) -> BadSettings:
    return BadSettings(
        f"a run called {name!r} exists already in {options.folder}",
        fix="choose another --run.name, remove that folder, or go on with that run: --resume "
        f"{options.folder / name}",
    )


def _folder_of_launch(options: RunOptions, launch_id: str) -> Path | None:
    """The latest folder that this torchrun has made, of the run's name if it has one."""
    configs = options.folder.glob(f"{options.name or '*'}/{CONFIG_FILE}")
    for config in sorted(configs, key=lambda path: path.stat().st_mtime, reverse=True):
        if read_environment(config).get("launch_id") == launch_id:
            return config.parent
    return None


def read_environment(config: Path) -> dict[str, Any]:
    """Where a run took place, as `write_config` wrote it; empty when that cannot be read."""
    try:
        return dict(json.loads(config.read_bytes())["environment"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _new_folder(options: RunOptions) -> Path:
    """A new folder, called after the run or after the time."""
    name = options.name or time.strftime("%Y-%m-%d-%H%M%S")
    candidates = [name] if options.name else [name, *(f"{name}-{n}" for n in range(2, 100))]
    for candidate in candidates:
        folder = options.folder / candidate
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not _died_at_birth(folder):
                continue
        except OSError as error:
            what = f"the run folder {folder} cannot be made: {error.strerror}"
            raise BadSettings(what, fix="choose another place with --run.folder") from error
        return folder
    raise _taken(options, name)


def _died_at_birth(folder: Path) -> bool:
    """Whether a process made the folder and was gone before it had written down its options."""
    of_birth = (LOCK_FILE, f".{CONFIG_FILE}.")
    if not folder.is_dir() or any(not path.name.startswith(of_birth) for path in folder.iterdir()):
        return False
    return not is_locked(folder)


def write_config(folder: Path, options: JobOptions, world: World, batch_ranks: int) -> None:
    """Every option with its value, and where the run took place.

    Args:
        folder: of the run.
        options: as they were asked for.
        world: the ranks.
        batch_ranks: the data-parallel ranks that the options of the batch are meant for.
    """
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": _device_name(world.device),
        "ranks": world.place.world_size,
        "batch_ranks": batch_ranks,
        "layout": str(world.layout),
        "compute_dtype": str(world.compute_dtype).removeprefix("torch."),
        "launch_id": world.place.launch_id,
    }
    of_json = json.loads(json.dumps(dataclasses.asdict(options), default=str))  # paths
    text = with_checksum({"options": of_json, "environment": environment})
    write_whole(folder / CONFIG_FILE, [text.encode()], mode=AS_USUAL)  # a run can go on only if it is whole


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
