"""The folder that a run leaves behind, and the configuration in it."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from aotdist.errors import BadSettings
from aotdist.launch.config import JobOptions, RunOptions
from aotdist.launch.parallel import World

CONFIG_FILE = "config.json"
CURVE_FILE = "loss.png"


def make_run_folder(options: RunOptions) -> Path:
    """A new folder, called after the run or after the time.

    Raises:
        BadSettings: the name is taken, or the folder cannot be made.
    """
    name = options.name or time.strftime("%Y-%m-%d-%H%M%S")
    candidates = [name] if options.name else [name, *(f"{name}-{n}" for n in range(2, 100))]
    for candidate in candidates:
        folder = options.folder / candidate
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            what = f"the run folder {folder} cannot be made: {error.strerror}"
            raise BadSettings(what, fix="choose another place with --run.folder") from error
        return folder
    raise BadSettings(
        f"a run called {name!r} exists already in {options.folder}",
        fix="choose another --run.name, or remove that folder",
    )


def write_config(folder: Path, options: JobOptions, world: World) -> None:
    """Every option with its value, and where the run took place."""
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": _device_name(world.device),
        "ranks": world.place.world_size,
        "layout": str(world.layout),
        "compute_dtype": str(world.compute_dtype).removeprefix("torch."),
    }
    document = {"options": dataclasses.asdict(options), "environment": environment}
    (folder / CONFIG_FILE).write_text(json.dumps(document, indent=2, default=_jsonable) + "\n")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _jsonable(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no option's type")
