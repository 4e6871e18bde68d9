"""Hands what a run records to tools that people look at runs with: TensorBoard, Weights & Biases.

Both are optional, and write into the run's folder: nothing leaves the machine unless `WANDB_MODE` says so.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotdist.errors import BadSettings
from aotdist.launch.config import JobOptions
from aotdist.launch.metrics import CheckpointRecord, EndRecord, Record, StepRecord, ValidationRecord
from aotdist.launch.progress import Reporter


def require_loggers(options: JobOptions) -> None:
    """Asks for the packages of the loggers before anything is written.

    Raises:
        BadSettings: one is not installed.
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
        options: the job's.
        folder: of the run.
        first_step: after which training goes on; what came later in an earlier process is taken back.
    """
    return [
        TensorBoardLogger(folder, first_step) if name == "tensorboard" else WandbLogger(folder, options)
        for name in options.run.loggers
    ]


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record, by the names under which both tools show them."""
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

    Its steps only rise, so each record says its own (`step`), and charts are drawn over that.
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
