"""`aotdist explain`: compiles a model and reports the result, as text or a page; nothing runs."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from aotdist.artifacts.build import compiled_ahead
from aotdist.files import refuse_unwritable
from aotdist.launch.commands.build import add_model_to, ahead, maker_named
from aotdist.report.explain import write_page
from aotdist.report.summary import report_of

_DESCRIPTION = """\
Compile one call of a model or function, as `aotdist build` does (or, on CPUs, by another backend), and show
the result.

MODEL names a function that makes what to compile and what to call it with, see `aotdist build --help`. With
several ranks, rank 0's programs are shown, and the page tells how those of the others differ. How to compile
is read from AOTDIST_* variables."""


def add_to(subparsers: Any) -> None:
    """Add the subcommand to the parser of `aotdist`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain", help="compile, and show the result", description=_DESCRIPTION
    )
    add_model_to(parser)
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with all details, too")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.html is not None:
        refuse_unwritable(options.html)
    make = maker_named(options.model)
    with torch.no_grad() if options.inference else nullcontext():
        by_rank = compiled_ahead(make, **ahead(options))
    print(report_of(by_rank[0]))
    if options.html is not None:
        write_page(options.html, by_rank)
        print(f"{options.html}: open it in a browser")
