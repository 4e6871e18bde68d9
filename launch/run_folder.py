"""The folder of a run, and its configuration file."""

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
        is_new: whether this process made it; otherwise the run that began there goes on.
    """

    path: Path
    is_new: bool


def claim_run_folder(options: JobOptions, place: Place, lock: RunLock) -> RunFolder:
    """Make and lock the folder of a new run, or lock that of the run to resume; only on rank 0.

    Raises:
        BadSettings: the name is taken, the folder cannot be written, or there is no such run.
        RunInUse: another process trains in it.
    """
    before = folder_of_run(options, place)
    folder = before or _new_folder(options.run)
    lock.take(folder)
    return RunFolder(folder, is_new=before is None)


def folder_of_run(options: JobOptions, place: Place) -> Path | None:
    """The folder of the run to resume; None for a new run.

    It is named by `--resume`, or was made by this torchrun before it restarted the ranks.

    Raises:
        BadSettings: `--resume auto` without a name.
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
    """Refuse the name of a run that exists or is under way, before ranks are started; writes nothing.

    Raises:
        BadSettings: the name is taken.
        RunInUse: another process trains in the folder.
    """
    run, before = options.run, _folder_named(options)
    if before is not None:
        refuse_locked(before)
    if options.resume is None and run.name is not None and (run.folder / run.name).exists():
        if not _is_abandoned(run.folder / run.name):
            raise _taken(run, run.name)


def _taken(options: RunOptions, name: str) -> BadSettings:
    return BadSettings(
        f"a run called {name!r} exists already in {options.folder}",
        fix="choose another --run.name, remove that folder, or go on with that run: --resume "
        f"{options.folder / name}",
    )


def _folder_of_launch(options: RunOptions, launch_id: str) -> Path | None:
    """The latest folder that this torchrun has made, with the run's name if it has one."""
    configs = options.folder.glob(f"{options.name or '*'}/{CONFIG_FILE}")
    for config in sorted(configs, key=lambda path: path.stat().st_mtime, reverse=True):
        if read_environment(config).get("launch_id") == launch_id:
            return config.parent
    return None


def read_environment(config: Path) -> dict[str, Any]:
    """The environment of a run, as `write_config` wrote it; empty if it cannot be read."""
    try:
        return dict(json.loads(config.read_bytes())["environment"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _new_folder(options: RunOptions) -> Path:
    """A new folder, named after the run or the time."""
    name = options.name or time.strftime("%Y-%m-%d-%H%M%S")
    candidates = [name] if options.name else [name, *(f"{name}-{n}" for n in range(2, 100))]
    for candidate in candidates:
        folder = options.folder / candidate
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not _is_abandoned(folder):
                continue
        except OSError as error:
            what = f"the run folder {folder} cannot be made: {error.strerror}"
            raise BadSettings(what, fix="choose another place with --run.folder") from error
        return folder
    raise _taken(options, name)


def _is_abandoned(folder: Path) -> bool:
    """Whether a process has made the folder and has died before it wrote its configuration."""
    first_files = (LOCK_FILE, f".{CONFIG_FILE}.")
    if not folder.is_dir() or any(not path.name.startswith(first_files) for path in folder.iterdir()):
        return False
    return not is_locked(folder)


def write_config(folder: Path, options: JobOptions, world: World, batch_ranks: int) -> None:
    """Write all options and the environment of the run.

    Args:
        batch_ranks: number of data-parallel ranks that the options of the batch are meant for.
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
    write_whole(folder / CONFIG_FILE, [text.encode()], mode=AS_USUAL)  # atomically: it is needed to resume


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
