"""`aotdist doctor`: whether this machine has what aotdist needs."""

from __future__ import annotations

import argparse
from typing import Any

from aotdist.errors import BadSettings
from aotdist.launch.doctor import Finding, findings

_MARKS = {"fine": "ok", "limited": "--", "broken": "!!"}


def add_to(subparsers: Any) -> None:
    """Add the subcommand to the parser of `aotdist`."""
    description = "See what this machine has for aotdist, and what to do about what it lacks."
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="check this machine", description=description
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    found = list(findings())
    for finding in found:
        print(_line(finding))
    broken = [finding.subject for finding in found if finding.state == "broken"]
    if broken:
        raise BadSettings(f"this machine is not ready: {', '.join(broken)}", fix="see what is marked with !!")


def _line(finding: Finding) -> str:
    line = f"{_MARKS[finding.state]}  {finding.subject:<12}{finding.what}"
    return f"{line}\n{'':<16}fix: {finding.fix}" if finding.fix else line
