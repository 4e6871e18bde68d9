"""Loggers of a run's records: files in its folder, and optionally TensorBoard or Weights & Biases.

All of them write into the run's folder: nothing leaves the machine unless `WANDB_MODE` says so.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aotdist.errors import BadSettings
from aotdist.files import AS_USUAL, write_whole
from aotdist.launch.config import JobOptions
from aotdist.launch.curve import draw_curve
from aotdist.launch.metrics import (
    METRICS_FILE,
    CheckpointRecord,
    EndRecord,
    MetricsLog,
    Record,
    StepRecord,
    ValidationRecord,
)
from aotdist.launch.progress import Reporter
from aotdist.launch.run_folder import CURVE_FILE


def require_loggers(options: JobOptions) -> None:
    """Check that the packages of the loggers are installed, before anything is written.

    Raises:
        BadSettings: one is not.
    """
    for name in options.run.loggers:
        if importlib.util.find_spec(name) is None:
            raise BadSettings(
                f"--run.loggers {name}: the package {name} is not installed",
                fix="pip install 'aotdist[loggers]'",
            )


def make_loggers(options: JobOptions, folder: Path, first_step: int) -> list[Reporter]:
    """The loggers that the options name.

    Args:
        first_step: the step that training goes on from; what an earlier process logged after it is dropped.
    """
    return [
        TensorBoardLogger(folder, first_step) if name == "tensorboard" else WandbLogger(folder, options)
        for name in options.run.loggers
    ]


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record, by their names in TensorBoard and W&B."""
    match record:
        case StepRecord():
            return {
                "train/loss": record.loss,
                "train/grad_norm": record.grad_norm,
                "train/learning_rate": record.lr,
                "speed/tokens_per_s": record.tokens_per_s,
                "speed/memory_bytes": record.memory_bytes,
            }
        case ValidationRecord():
            return {"validation/loss": record.loss}
        case CheckpointRecord():
            return {"checkpoint/seconds": record.seconds, "checkpoint/waited_s": record.waited_s}
        case EndRecord():
            return {}


class RecordingReporter(Reporter):
    """Writes everything into the run's folder, and then passes it on to other reporters.

    Records go to the metrics file, each section to a text file of its title. Closing draws the curve, also of
    a run that was interrupted. What cannot be written (the disk is full) is a warning, and training goes on.
    """

    def __init__(self, folder: Path, others: Sequence[Reporter]) -> None:
        self._folder = folder
        self._others = others
        self._log = MetricsLog(folder / METRICS_FILE)

    def start(self, facts: Mapping[str, str], num_steps: int) -> None:
        for other in self._others:
            other.start(facts, num_steps)

    def record(self, record: Record) -> None:
        with _warning(METRICS_FILE):
            self._log.record(record)
        for other in self._others:
            other.record(record)

    def section(self, title: str, text: str) -> None:
        with _warning(f"{title}.txt"):
            write_whole(self._folder / f"{title}.txt", [text.encode(), b"\n"], mode=AS_USUAL)
        self._show(title, text)

    def close(self) -> None:
        self._log.close()
        curve = None
        with _warning(CURVE_FILE):
            curve = draw_curve(self._folder)
        if curve is not None:
            self._show("loss curve", str(curve))
        for other in self._others:
            other.close()

    def _show(self, title: str, text: str) -> None:
        for other in self._others:
            other.section(title, text)


@contextmanager
def _warning(name: str) -> Generator[None]:
    """Turn an `OSError` inside into a warning about the file of this name."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"aotdist: {name} of the run folder cannot be written: {error.strerror}", stacklevel=4)


class TensorBoardLogger(Reporter):
    """Event files in the run's folder: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, first_step: int) -> None:
        tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
        purge_step = first_step + 1 if first_step else None
        self._writer = tensorboard.SummaryWriter(folder / "tensorboard", purge_step=purge_step)

    def start(self, facts: Mapping[str, str], num_steps: int) -> None:
        for name, fact in facts.items():
            self._writer.add_text(name, fact)

    def record(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def section(self, title: str, text: str) -> None:
        self._writer.add_text(title, f"```\n{text}\n```")

    def close(self) -> None:
        self._writer.close()


class WandbLogger(Reporter):
    """A run of Weights & Biases in the run's folder, offline: `wandb sync` sends it.

    Its own step counter only rises, so each record has a field `step`, over which charts are drawn.
    """

    def __init__(self, folder: Path, options: JobOptions) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project="aotdist",
            name=folder.name,
            dir=folder,
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dataclasses.asdict(options),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def start(self, facts: Mapping[str, str], num_steps: int) -> None:
        self._run.config.update({"facts": dict(facts)})

    def record(self, record: Record) -> None:
        numbers = scalars(record)
        if numbers:
            self._run.log({"step": record.step, **numbers})

    def section(self, title: str, text: str) -> None:
        self._run.summary[title] = text

    def close(self) -> None:
        self._run.finish()
