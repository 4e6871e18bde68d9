"""Draws runs side by side: `python -m aotdist.launch.comparison OUT.svg runs/dense runs/row ...`.

The first run is what the others are measured against. Made from the metrics files alone, like a single curve.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aotdist.errors import BadSettings
from aotdist.launch.curve import STYLE, smoothed
from aotdist.launch.metrics import METRICS_FILE, StepRecord, ValidationRecord, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#6b7785", "#2458a6", "#d1495b", "#3c8d5a", "#b07aa1", "#e08e0b")


@dataclass(frozen=True, slots=True)
class RunCurve:
    """What is drawn of a run.

    Args:
        name: its folder's.
        losses: of each step, smoothed, in nats per byte.
        held_out: the last loss on held-out files; None if it was never validated.
    """

    name: str
    losses: Sequence[float]
    held_out: float | None

    @classmethod
    def of(cls, folder: Path) -> RunCurve:
        """Read a run's metrics.

        Raises:
            BadSettings: it has not taken a step.
        """
        records = read_metrics(folder / METRICS_FILE)
        losses = [record.loss for record in records if isinstance(record, StepRecord)]
        if not losses:
            raise BadSettings(f"no step was recorded in {folder}", fix="train it first")
        held_out = [record.loss for record in records if isinstance(record, ValidationRecord)]
        return cls(folder.name, smoothed(losses), held_out[-1] if held_out else None)

    @property
    def label(self) -> str:
        """The name, and where it ended."""
        return self.name if self.held_out is None else f"{self.name}: {self.held_out:.3f} held out"


def draw_comparison(out: Path, folders: Sequence[Path]) -> Path:
    """Writes the picture, in the format that `out`'s suffix names, and returns its path.

    Raises:
        BadSettings: fewer than two runs, or one without a step.
    """
    # pyplot would choose a display and keep the figure alive; the object interface does neither.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if len(folders) < 2:
        raise BadSettings("there is nothing to compare", fix="name two run folders or more")
    curves = [RunCurve.of(folder) for folder in folders]
    with rc_context({**STYLE, "svg.hashsalt": "aotdist"}):
        figure = Figure(figsize=(8, 5.6), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        loss_axes, difference_axes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        _draw_losses(loss_axes, curves)
        _draw_differences(difference_axes, curves)
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    return out


def _draw_losses(axes: Axes, curves: Sequence[RunCurve]) -> None:
    for curve, colour in zip(curves, _COLOURS, strict=False):
        axes.plot(_steps(curve.losses), curve.losses, color=colour, linewidth=1.5, label=curve.label)
    axes.set_ylabel("training loss, smoothed (nats per byte)")
    axes.legend(loc="upper right")


def _draw_differences(axes: Axes, curves: Sequence[RunCurve]) -> None:
    first, *others = curves
    for curve, colour in zip(others, _COLOURS[1:], strict=False):
        shared = zip(curve.losses, first.losses, strict=False)  # as far as the shorter one came
        percent = [100 * (loss / reference - 1) for loss, reference in shared]
        axes.plot(_steps(percent), percent, color=colour, linewidth=1.2)
    axes.axhline(0, color=_COLOURS[0], linewidth=1.0)
    axes.set_ylabel(f"% above {first.name}")
    axes.set_xlabel("optimizer step")


def _steps(values: Sequence[float]) -> range:
    return range(1, len(values) + 1)


if __name__ == "__main__":
    try:
        picture, *runs = map(Path, sys.argv[1:])
    except ValueError:
        sys.exit("usage: python -m aotdist.launch.comparison OUT.svg RUN_FOLDER RUN_FOLDER ...")
    print(draw_comparison(picture, runs))
