"""A report as one HTML page that needs no network: data in JSON, shown by `page.js`."""

from __future__ import annotations

import html
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import torch

from aotdist.files import AS_USUAL, path_of, refuse_unwritable, write_whole
from aotdist.program import Graph
from aotdist.report.details import Details, Told, compared, details_of, meet
from aotdist.report.summary import Report, format_bytes, report_of
from aotdist.runtime.artifact import Artifact
from aotdist.runtime.kinds import Kinds


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


# `explain`: a report to print, and a page to look at.


class GraphsByName(Mapping[str, torch.fx.GraphModule]):
    """The graphs of an artifact as FX modules; one that is held is the same each time."""

    def __init__(self, graphs: Mapping[str, Graph]) -> None:
        self._graphs = graphs

    def __getitem__(self, name: str) -> torch.fx.GraphModule:
        return self._graphs[name].gm

    def __iter__(self) -> Iterator[str]:
        return iter(self._graphs)

    def __len__(self) -> int:
        return len(self._graphs)


class Explained(ABC):
    """What is compiled when it is called, and can be looked at then."""

    @abstractmethod
    def _made_so_far(self) -> Sequence[Artifact]:
        """The artifacts that there are."""

    @abstractmethod
    def _decided(self) -> Sequence[Kinds]:
        """What was decided about kinds of calls."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every artifact; the next call compiles again."""

    @property
    def source(self) -> str:
        """The printed Python that runs, one section an artifact."""
        return "\n".join(artifact.source for artifact in self._made_so_far())

    @property
    def graphs(self) -> list[Mapping[str, torch.fx.GraphModule]]:
        """The FX graphs of every artifact, by name; each is unpacked when it is looked at."""
        return [GraphsByName(artifact.compilation.graphs()) for artifact in self._made_so_far()]

    def explain(self, *, html: str | Path | None = None) -> Report:
        """What was compiled: graphs, collectives, saved bytes, writes, seconds; see `aotdist.explain`."""
        reasons = dict.fromkeys(reason for kinds in self._decided() for reason in kinds.refused.values())
        return _explained(self._made_so_far(), tuple(reasons), html)


def _explained(artifacts: Sequence[Artifact], as_written: tuple[str, ...], html: str | Path | None) -> Report:
    """The report of a list of artifacts.

    Args:
        artifacts: what was compiled.
        as_written: why other calls run as they were written.
        html: where to write it as a page too. Of several ranks, rank 0 writes it, and it says how those
            differ that call this as well.
    """
    if html is not None:
        html = path_of(html, "html")
        programs = [details_of(artifact) for artifact in artifacts]
        ranks = meet([told_by(program) for program in programs])
        if ranks is not None:
            reasons = tuple(("run as they were written", reason) for reason in as_written)
            pairs = zip(programs, ranks, strict=True)
            _write(html, [replace(one, ranks=found, facts=(*one.facts, *reasons)) for one, found in pairs])
    return replace(report_of(artifacts), as_written=as_written)


def write_page(html: str | Path, by_rank: Sequence[Sequence[Artifact]]) -> None:
    """Write the page of rank 0's artifacts, and how those of the others differ; all are here."""
    programs = [[details_of(artifact) for artifact in artifacts] for artifacts in by_rank]
    shown = [
        replace(here, ranks=compared({rank: told_by(one) for rank, one in enumerate([here, *others])}))
        for here, *others in zip(*programs, strict=True)
    ]
    _write(html, shown)


def _write(html: str | Path, programs: Sequence[Details]) -> None:
    refuse_unwritable(Path(html))
    write_whole(Path(html), [render_page(programs).encode()], mode=AS_USUAL)


def told_by(program: Details) -> Told:
    """What a rank tells of an artifact, for others to compare."""
    told = {"backend": program.backend}
    told |= {f"operations of the {graph.name} graph": f"{graph.num_operations:,}" for graph in program.graphs}
    told |= {name: text for name, text in program.facts if name == "saved for backward"}
    for role, tensors in (("input", program.inputs), ("output", program.outputs)):
        told |= {f"{role} {one.name}": f"{one.type} ({', '.join(one.facts)})" for one in tensors}
    for position, one in enumerate(program.collectives):
        text = f"{one.operator}, {format_bytes(one.bytes)}, beside {one.beside} operators"
        told[f"collective {position} of the {one.graph} graph"] = text
    return told | {f"seconds of {stage}": f"{seconds:.2f}" for stage, seconds in program.seconds.items()}
