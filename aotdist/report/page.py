"""A report as one HTML page that needs no network: data in JSON, shown by `page.js`."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import fields
from importlib import resources
from string import Template
from typing import Any

from aotdist.report.details import Details


def render_page(programs: Sequence[Details]) -> str:
    """The page of these artifacts; it opens on the first that trains, the one used last."""
    programs = sorted(programs, key=lambda program: program.kind != "training")
    names = ", ".join(dict.fromkeys(program.name for program in programs)) or "nothing compiled yet"
    return Template(_part("page.html")).substitute(
        title=html.escape(f"aotdist: {names}"),
        style=_part("page.css"),
        script=_part("page.js"),
        data=embedded(programs),
    )


def embedded(value: object) -> str:
    """JSON that may stand in a `<script>`: no text of a program can end it, or begin a comment."""
    return json.dumps(value, default=_members, separators=(",", ":")).replace("<", "\\u003c")


def _members(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _part(name: str) -> str:
    return (resources.files("aotdist.report") / name).read_text(encoding="utf-8")
