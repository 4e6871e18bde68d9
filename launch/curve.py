"""Draws a run's loss: `python -m aotdist.launch.curve runs/NAME`, and at the end of every run.

The picture is made from the metrics file alone, so it can be drawn for a run that was cut short.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aotdist.launch.config import CONFIG_FILE
from aotdist.launch.metrics import METRICS_FILE, StepRecord, ValidationRecord, read_metrics
from aotdist.launch.run_folder import CURVE_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"
_RAW, _SMOOTH, _HELD_OUT = "#a9c4ea", "#2458a6", "#d1495b"
_SMOOTHING_STEPS = 5
"""Standard deviation, in steps, of the Gaussian mean drawn over the raw loss."""

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
}


def smoothed(values: Sequence[float]) -> list[float]:
    """Gaussian mean around each value, truncated at the ends; unlike a running mean, it does not lag."""
    import numpy as np

    reach = 3 * _SMOOTHING_STEPS
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / _SMOOTHING_STEPS) ** 2)
    sums, weights = (
        np.convolve(np.asarray(each, float), kernel)[reach : reach + len(values)]
        for each in (values, np.ones(len(values)))
    )
    return (sums / weights).tolist()


def draw_curve(folder: Path) -> Path | None:
    """Writes the run's `loss.png` and returns its path; None when the run has not taken a step."""
    records = read_metrics(folder / METRICS_FILE)
    steps = [record for record in records if isinstance(record, StepRecord)]
    if not steps:
        return None
    validations = [record for record in records if isinstance(record, ValidationRecord)]
    # pyplot would choose a display and keep the figure alive; the object interface does neither.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(8, 5.6), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        loss_axes, speed_axes = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        _draw_loss(loss_axes, steps, validations)
        _draw_speed(speed_axes, steps)
        figure.suptitle(_title(folder), x=0.012, ha="left", fontsize=11, fontweight="bold")
        figure.savefig(folder / CURVE_FILE)
    return folder / CURVE_FILE


def _draw_loss(axes: Axes, steps: list[StepRecord], validations: list[ValidationRecord]) -> None:
    numbers, losses = [record.step for record in steps], [record.loss for record in steps]
    axes.plot(numbers, losses, color=_RAW, linewidth=0.9, label="training, each step")
    axes.plot(numbers, smoothed(losses), color=_SMOOTH, linewidth=1.8, label="training, smoothed")
    held_out = [record.loss for record in validations]
    axes.plot(
        [record.step for record in validations],
        held_out,
        color=_HELD_OUT,
        linewidth=1.0,
        linestyle=":",
        marker="o",
        markersize=4.5,
        label="held-out files",
    )
    for record in validations[-1:]:
        axes.annotate(
            f"{record.loss:.3f}",
            (record.step, record.loss),
            xytext=(0, 7),
            textcoords="offset points",
            ha="right",
            color=_HELD_OUT,
            fontweight="bold",
        )
    axes.set_ylabel("loss (nats per byte)")
    axes.secondary_yaxis("right", functions=(_bits, _nats)).set_ylabel("bits per byte")
    axes.legend(loc="upper right")


def _draw_speed(axes: Axes, steps: list[StepRecord]) -> None:
    steady = [record for record in steps if record.step > 1] or steps  # the first step compiles
    axes.plot(
        [record.step for record in steady],
        [record.tokens_per_s / 1e3 for record in steady],
        color=MUTED,
        linewidth=0.9,
    )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("kB / s")
    axes.set_xlabel("optimizer step")


def _title(folder: Path) -> str:
    document = json.loads((folder / CONFIG_FILE).read_text())
    options, environment = document["options"], document["environment"]
    model = options["model"]
    shape = f"{model['num_layers']} layers x {model['dim']}"
    return f"{folder.name}: {shape}, {environment['layout']}, {options['compile']['backend']}"


def _bits(nats: Any) -> Any:
    return nats / math.log(2)


def _nats(bits: Any) -> Any:
    return bits * math.log(2)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(draw_curve(Path(argument)) or f"{argument}: no step was recorded")
