"""`aotdist build`: an artifact of a model, made on a machine that need not have the GPU, nor the ranks."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch

from aotdist.errors import BadSettings
from aotdist.settings import Settings
from aotdist.store.build import KNOWN_TARGETS, Made, build

_DESCRIPTION = """\
Compile one call of a model or function ahead of time and write it to a file, for `aotdist.load`.

MODEL names a function that makes, on the CPU, what to compile and what to call it with: it returns a module
or function, a tuple of arguments, and (if there are any) a dictionary of keyword arguments; a generator
yields several such. With several ranks it is called once for each, and may make meshes and shard. How to
compile is read from AOTDIST_* variables."""


def add_to(subparsers: Any) -> None:
    """Add the subcommand to the parser of `aotdist`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "build",
        help="compile ahead of time, into a file",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="package.module:function, or file.py:function")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="default: FUNCTION.TARGET.aot")
    parser.add_argument("--target", default="cpu", help=f"{', '.join(KNOWN_TARGETS)} (default: %(default)s)")
    parser.add_argument("--world-size", metavar="N", type=int, default=1, help="ranks that will run it")
    parser.add_argument("--inference", action="store_true", help="build it as called under torch.no_grad()")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    make = maker_named(options.model)
    output: Path = options.output or Path(f"{options.model.rpartition(':')[2]}.{options.target}.aot")
    settings = Settings.from_environment()
    with torch.no_grad() if options.inference else nullcontext():
        built = build(make, output, target=options.target, world_size=options.world_size, settings=settings)
    print(built)


def maker_named(name: str) -> Callable[[], Made]:
    """The function that MODEL names.

    Raises:
        BadSettings: there is none.
    """
    place, _, function = name.rpartition(":")
    is_place = place.endswith(".py") or (place and not place.startswith("."))  # nothing to be relative to
    found: Any = getattr(_module(place), function, None) if is_place and function.isidentifier() else None
    if not callable(found):
        raise BadSettings(
            f"MODEL is {name!r}, which names no function",
            fix="give package.module:function, or file.py:function",
        )
    return cast("Callable[[], Made]", found)


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # of something that it imports
            raise BadSettings(f"there is no module {place!r}", fix="run where it can be imported") from error
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise BadSettings(f"there is no file {place!r}", fix="name a file of Python's")
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
