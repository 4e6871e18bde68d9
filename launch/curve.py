"""Draws a run's loss: `python -m aotdist.launch.curve runs/NAME`, and at the end of every run.

`python -m aotdist.launch.curve OUT.svg RUN RUN...` compares runs with the first of them. Pictures are made
from the metrics files alone, so they can be drawn for runs that were cut short.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aotdist.errors import BadSettings
from aotdist.launch.config import CONFIG_FILE
from aotdist.launch.metrics import METRICS_FILE, StepRecord, ValidationRecord, read_metrics
from aotdist.launch.run_folder import CURVE_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MUTED, _GRID = "#1f2933", "#6b7785", "#e4e8ec"
_RAW, _SMOOTH, _HELD_OUT = "#a9c4ea", "#2458a6", "#d1495b"
_SMOOTHING_STEPS = 5
"""Standard deviation, in steps, of the Gaussian mean drawn over the raw loss."""

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
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

    with rc_context(_STYLE):
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
        color=_MUTED,
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


# Several runs beside each other.

_COLORS = (_INK, "#2458a6", "#d1495b", "#2a9d8f", "#e09f3e", "#7b5ea7")
_BAND_PERCENT = 1.0
"""Half the height of the band around the first run that is marked."""


def compare(picture: Path, folders: Sequence[Path]) -> str:
    """Draws smoothed training losses of runs, and their difference from the first run's in percent.

    The same runs give the same bytes.

    Returns:
        a markdown table of the held-out losses.

    Raises:
        BadSettings: a folder holds no run that took a step and was validated.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    training, held_out = zip(*map(_losses, folders), strict=True)
    rows = [
        f"| `{folder.name}` | {loss:.4f} | {100 * (loss / held_out[0] - 1):+.2f}% |"
        for folder, loss in zip(folders, held_out, strict=True)
    ]
    with rc_context({**_STYLE, "svg.hashsalt": "aotdist"}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        left, right = figure.subplots(1, 2)
        right.axhspan(-_BAND_PERCENT, _BAND_PERCENT, color=_MUTED, alpha=0.15, linewidth=0)
        for folder, losses, color in zip(folders, training, _COLORS, strict=False):
            apart = differences(losses, training[0])
            left.plot(range(1, len(losses) + 1), losses, color=color, linewidth=1.1, label=folder.name)
            right.plot(range(1, len(apart) + 1), apart, color=color, linewidth=1.1)
        left.set_ylabel("training loss, smoothed (nats per byte)")
        right.set_ylabel(f"difference from {folders[0].name} (%)")
        for axes in (left, right):
            axes.set_xlabel("optimizer step")
        left.legend()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return "\n".join(["| run | held-out loss, nats a byte | difference |", "|---|---|---|", *rows])


def differences(losses: Sequence[float], first: Sequence[float]) -> list[float]:
    """Difference of a run's losses from those of the first run, step by step, in percent."""
    return [100 * (own / other - 1) for own, other in zip(losses, first, strict=False)]  # one may be shorter


def _losses(folder: Path) -> tuple[list[float], float]:
    """The smoothed training losses of a run, and its last held-out loss."""
    path = folder / METRICS_FILE
    records = read_metrics(path) if path.exists() else []
    training = [record.loss for record in records if isinstance(record, StepRecord)]
    held_out = [record.loss for record in records if isinstance(record, ValidationRecord)]
    if not training or not held_out:
        raise BadSettings(f"{folder} holds no run that took a step", fix="name the folders of finished runs")
    return smoothed(training), held_out[-1]


def main(words: Sequence[str]) -> int:
    """Draws what the words name, and returns the exit code."""
    paths = list(map(Path, words))
    if not paths or paths[0].suffix != ".svg":
        for folder in paths:
            print(draw_curve(folder) or f"{folder}: no step was recorded")
        return 0
    picture, *folders = paths
    if not 2 <= len(folders) <= len(_COLORS):
        print(f"usage: python -m aotdist.launch.curve OUT.svg RUN RUN... (2 to {len(_COLORS)})")
        return 2
    try:
        print(compare(picture, folders))
    except BadSettings as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
