"""`aotdist build` and `aotdist explain`: compile a model ahead of time, into an artifact or a report.

Neither needs the GPU and the ranks that will run it, and nothing runs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import torch

from aotdist.artifacts.build import KNOWN_TARGETS, Made, build, compiled_ahead, refuse_maker
from aotdist.errors import BadSettings
from aotdist.files import refuse_unwritable
from aotdist.report.explain import write_page
from aotdist.report.summary import report_of
from aotdist.settings import Settings

_BUILD = """\
Compile one call of a model or function ahead of time and write it to a file, for `aotdist.load`.

MODEL names a function that makes, on the CPU, what to compile and what to call it with: it returns a module
or function, a tuple of arguments, and (if there are any) a dictionary of keyword arguments; a generator
yields several such. With several ranks it is called once for each, and may make meshes and shard. How to
compile is read from AOTDIST_* variables."""

_EXPLAIN = """\
Compile one call of a model or function, as `aotdist build` does (or, on CPUs, by another backend), and show
the result.

MODEL names a function that makes what to compile and what to call it with, see `aotdist build --help`. With
several ranks, rank 0's programs are shown, and the page tells how those of the others differ. How to compile
is read from AOTDIST_* variables."""


def add_to(subparsers: Any) -> None:
    """Add both subcommands to the parser of `aotdist`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "build", help="compile ahead of time, into a file", description=_BUILD
    )
    _add_model_to(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="default: FUNCTION.TARGET.aot")
    parser.set_defaults(run=_build)
    parser = subparsers.add_parser("explain", help="compile, and show the result", description=_EXPLAIN)
    _add_model_to(parser)
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with all details, too")
    parser.set_defaults(run=_explain)


def _add_model_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="package.module:function, or file.py:function")
    parser.add_argument("--target", default="cpu", help=f"{', '.join(KNOWN_TARGETS)} (default: %(default)s)")
    parser.add_argument("--world-size", metavar="N", type=int, default=1, help="ranks that will run it")
    parser.add_argument("--backend", help="default: that of the target, fx on CPUs and triton on GPUs")
    parser.add_argument("--inference", action="store_true", help="compile it as called under torch.no_grad()")


def _ahead(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments for compiling ahead of time, from the options and the environment."""
    return {
        "target": options.target,
        "world_size": options.world_size,
        "backend": options.backend,
        "settings": Settings.from_environment(),
    }


def _build(options: argparse.Namespace) -> None:
    make = maker_named(options.model)
    output: Path = options.output or Path(f"{options.model.rpartition(':')[2]}.{options.target}.aot")
    with torch.no_grad() if options.inference else nullcontext():
        built = build(make, output, **_ahead(options))
    print(built)


def _explain(options: argparse.Namespace) -> None:
    if options.html is not None:
        refuse_unwritable(options.html)
    make = maker_named(options.model)
    with torch.no_grad() if options.inference else nullcontext():
        by_rank = compiled_ahead(make, **_ahead(options))
    print(report_of(by_rank[0]))
    if options.html is not None:
        write_page(options.html, by_rank)
        print(f"{options.html}: open it in a browser")


def maker_named(name: str) -> Callable[[], Made]:
    """The function that MODEL names.

    Raises:
        BadSettings: there is none; the error lists those of the module.
    """
    place, colon, function = name.rpartition(":")
    if not colon:
        place, function = name, ""
    is_place = place.endswith(".py") or not place.startswith(".")  # nothing to be relative to
    module = _module(place) if place and is_place else None
    found: Any = getattr(module, function, None) if function.isidentifier() else None
    if not callable(found):
        makers = [] if module is None else list(_makers_of(module))
        there = f"; {place} has {', '.join(makers)}" if makers else ""
        raise BadSettings(
            f"MODEL is {name!r}, which names no function",
            fix=f"give package.module:function, or file.py:function{there}",
        )
    return cast("Callable[[], Made]", found)


def _makers_of(module: Any) -> Iterator[str]:
    """The functions that MODEL may name: defined in the module, and callable without arguments."""
    for name, one in inspect.getmembers(module, inspect.isfunction):
        if one.__module__ == module.__name__ and not name.startswith("_"):
            with suppress(BadSettings):
                refuse_maker(one)
                yield name


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
