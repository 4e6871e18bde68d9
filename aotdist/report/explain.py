"""`explain`: a report to print, or one HTML page that needs no network (data in JSON, shown by `page.js`)."""

from __future__ import annotations

import html
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import torch

from aotdist.files import AS_USUAL, path_of, refuse_unwritable, write_whole
from aotdist.report.details import (
    Details,
    comparable_facts,
    compare_ranks,
    details_of,
    differences_of_ranks,
)
from aotdist.report.summary import Report, report_of
from aotdist.runtime.artifact import Artifact, Artifacts


def render_page(programs: Sequence[Details]) -> str:
    """The HTML of a page; it opens on the first program that trains, which is the one used last."""
    programs = sorted(programs, key=lambda program: program.kind != "training")
    names = ", ".join(dict.fromkeys(program.name for program in programs)) or "nothing compiled yet"
    return Template(_part("page.html")).substitute(
        title=html.escape(f"aotdist: {names}"),
        style=_part("page.css"),
        script=_part("page.js"),
        data=embedded(programs),
    )


def embedded(value: object) -> str:
    """JSON for a `<script>` element: no text in it can end the element, or begin a comment."""
    return json.dumps(value, default=_members, separators=(",", ":")).replace("<", "\\u003c")


def _members(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _part(name: str) -> str:
    return (resources.files("aotdist.report") / name).read_text(encoding="utf-8")


class Explained(ABC):
    """A callable that is compiled when it is called, and can then be asked what was compiled."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run what was compiled for such a call; compile it if there is none."""

    @abstractmethod
    def _compiled_parts(self) -> Sequence[Artifacts]:
        """The artifacts of each part: of a training step, its programs are parts."""

    def _made_so_far(self) -> Sequence[Artifact]:
        return [artifact for part in self._compiled_parts() for artifact in part]

    @abstractmethod
    def reset(self) -> None:
        """Forget every artifact; the next call compiles again."""

    @property
    def source(self) -> str:
        """The printed Python that runs, one section for each artifact."""
        return "\n".join(artifact.source for artifact in self._made_so_far())

    @property
    def graphs(self) -> list[Mapping[str, torch.fx.GraphModule]]:
        """The FX graphs of every artifact, by name."""
        return [
            {name: graph.gm for name, graph in artifact.compilation.graphs().items()}
            for artifact in self._made_so_far()
        ]

    def explain(self, *, html: str | Path | None = None) -> Report:
        """What was compiled: graphs, collectives, saved bytes, writes, seconds; see `aotdist.explain`."""
        artifacts = self._made_so_far()
        reasons = dict.fromkeys(r for part in self._compiled_parts() for r in part.refused.values())
        if html is not None:
            html = path_of(html, "html")
            programs = [details_of(artifact) for artifact in artifacts]
            ranks = differences_of_ranks([comparable_facts(program) for program in programs])
            if ranks is not None:
                refused = tuple(("run as they were written", reason) for reason in reasons)
                pairs = zip(programs, ranks, strict=True)
                _write(
                    html, [replace(one, ranks=found, facts=(*one.facts, *refused)) for one, found in pairs]
                )
        return replace(report_of(artifacts), as_written=tuple(reasons))


def write_page(html: str | Path, by_rank: Sequence[Sequence[Artifact]]) -> None:
    """Write the page of rank 0's artifacts, with the differences to the other ranks', which are all here."""
    programs = [[details_of(artifact) for artifact in artifacts] for artifacts in by_rank]
    shown = [
        replace(here, ranks=compare_ranks(dict(enumerate(map(comparable_facts, (here, *others))))))
        for here, *others in zip(*programs, strict=True)
    ]
    _write(html, shown)


def _write(html: str | Path, programs: Sequence[Details]) -> None:
    refuse_unwritable(Path(html))
    write_whole(Path(html), [render_page(programs).encode()], mode=AS_USUAL)
