"""Draws the losses of several runs side by side: `python -m aotdist.launch.comparison OUT.svg RUN RUN...`.

The others are compared with the first run: on the left the smoothed training losses, on the right their
difference from the first, in percent. A table of the held-out losses is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aotdist.errors import BadSettings
from aotdist.launch.curve import INK, MUTED, STYLE, smoothed
from aotdist.launch.metrics import METRICS_FILE, StepRecord, ValidationRecord, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#2458a6", "#d1495b", "#2a9d8f", "#e09f3e", "#7b5ea7")
_BAND_PERCENT = 1.0
"""Half the height of the band that the right side marks."""


@dataclass(frozen=True, slots=True)
class RunLosses:
    """What a run recorded.

    Args:
        name: of its folder.
        training: loss of each step, in nats per byte.
        held_out: loss on the held-out files at the end, in nats per byte.
    """

    name: str
    training: tuple[float, ...]
    held_out: float


def read_losses(folder: Path) -> RunLosses:
    """The losses of a run.

    Raises:
        BadSettings: the folder holds no run that took a step and was validated.
    """
    path = folder / METRICS_FILE
    records = read_metrics(path) if path.exists() else []
    training = tuple(record.loss for record in records if isinstance(record, StepRecord))
    held_out = [record.loss for record in records if isinstance(record, ValidationRecord)]
    if not training or not held_out:
        raise BadSettings(f"{folder} holds no run that took a step", fix="name the folders of finished runs")
    return RunLosses(folder.name, training, held_out[-1])


def differences(run: RunLosses, first: RunLosses) -> list[float]:
    """Difference of a run's smoothed training loss from that of the first run, step by step, in percent."""
    pairs = zip(smoothed(run.training), smoothed(first.training), strict=False)  # a run may be shorter
    return [100 * (mine / theirs - 1) for mine, theirs in pairs]


def table(runs: Sequence[RunLosses]) -> str:
    """A markdown table: held-out loss of each run, and its difference from the first one's."""
    first = runs[0]
    rows = [
        f"| `{run.name}` | {run.held_out:.4f} | {100 * (run.held_out / first.held_out - 1):+.2f}% |"
        for run in runs
    ]
    return "\n".join(["| run | held-out loss, nats a byte | difference |", "|---|---|---|", *rows])


def draw_comparison(picture: Path, runs: Sequence[RunLosses]) -> None:
    """Writes the picture; the same runs give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context({**STYLE, "svg.hashsalt": "aotdist"}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        losses, distances = figure.subplots(1, 2)
        _draw_losses(losses, runs)
        _draw_differences(distances, runs)
        figure.savefig(picture, format="svg", metadata={"Date": None})


def _draw_losses(axes: Axes, runs: Sequence[RunLosses]) -> None:
    for run, color in zip(runs, (INK, *_COLORS), strict=False):
        axes.plot(_steps(run), smoothed(run.training), color=color, linewidth=1.1, label=run.name)
    axes.set_ylabel("training loss, smoothed (nats per byte)")
    axes.set_xlabel("optimizer step")
    axes.legend()


def _draw_differences(axes: Axes, runs: Sequence[RunLosses]) -> None:
    axes.axhspan(-_BAND_PERCENT, _BAND_PERCENT, color=MUTED, alpha=0.15, linewidth=0)
    for run, color in zip(runs[1:], _COLORS, strict=False):
        axes.plot(_steps(run)[: len(runs[0].training)], differences(run, runs[0]), color=color, linewidth=1.1)
    axes.set_ylabel(f"difference from {runs[0].name} (%)")
    axes.set_xlabel("optimizer step")


def _steps(run: RunLosses) -> range:
    return range(1, len(run.training) + 1)


def main(words: Sequence[str]) -> int:
    """Draws the picture, prints the table, and returns the exit code."""
    picture, *folders = map(Path, words) if words else [Path()]
    if picture.suffix != ".svg" or not 2 <= len(folders) <= 1 + len(_COLORS):
        print(f"usage: python -m aotdist.launch.comparison OUT.svg RUN RUN... (2 to {1 + len(_COLORS)})")
        return 2
    try:
        runs = [read_losses(folder) for folder in folders]
    except BadSettings as error:
        print(error)
        return 2
    draw_comparison(picture, runs)
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
