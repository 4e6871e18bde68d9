"""What the launcher's tests share: a small text, a small job, and torchrun around it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aotdist.launch.metrics import METRICS_FILE, Record, StepRecord, ValidationRecord, read_metrics
from tests.ranks.harness import RanksFailed, fresh_world

REPOSITORY = Path(__file__).resolve().parents[2]

SMALL_MODEL = (
    "--model.dim=32",
    "--model.num-layers=2",
    "--model.num-heads=4",
    "--model.num-kv-heads=2",
    "--model.hidden-dim=64",
    "--data.seq-len=32",
    "--data.batch-size=4",
    "--optim.warmup-steps=2",
    "--run.validation-batches=2",
    "--run.validate-every=0",
    "--parallel.device=cpu",
    "--checkpoint.every=0",
)


@dataclass(frozen=True, slots=True)
class Job:
    """Where a test's runs read and write."""

    text: Path
    folder: Path

    def arguments(self, name: str, *options: str, backend: str = "eager", steps: int = 4) -> list[str]:
        """The small job's options, then `options`, which may override them."""
        return [
            *SMALL_MODEL,
            f"--data.root={self.text}",
            f"--run.folder={self.folder}",
            f"--run.name={name}",
            f"--compile.backend={backend}",
            f"--optim.steps={steps}",
            *options,
        ]

    def records(self, name: str) -> list[Record]:
        """What a run recorded so far."""
        return read_metrics(self.folder / name / METRICS_FILE)

    def numbers(self, name: str) -> list[tuple[object, ...]]:
        """What a run recorded of steps and validations, to the bit, but for times and memory."""
        return [
            (type(record).__name__, record.step, record.loss.hex(), getattr(record, "grad_norm", None))
            for record in self.records(name)
            if isinstance(record, StepRecord | ValidationRecord)
        ]


@dataclass(frozen=True, slots=True)
class GoesOn:
    """A job that goes on with a copy of another one.

    Args:
        name: of the other one, which has run before.
        step: of the checkpoint to go on from; later ones are not in the copy.
        options: that differ.
    """

    name: str
    step: int
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Batch:
    """Jobs by name that the same ranks do."""

    num_ranks: int
    jobs: Mapping[str, Sequence[str] | GoesOn]


class Runs:
    """Many small jobs; each batch of them runs when its first is asked for, after those that come before it.

    Args:
        text: what they train on.
        folder: where they write.
        batches: the jobs.
    """

    def __init__(self, text: Path, folder: Path, batches: Sequence[Batch]) -> None:
        self.job = Job(text, folder)
        self._batches = batches
        self._ended: list[tuple[Mapping[str, int], str]] = []

    def __getitem__(self, name: str) -> list[Record]:
        """What a job recorded.

        Raises:
            AssertionError: it failed; the message is all that its ranks printed.
        """
        (at,) = (at for at, batch in enumerate(self._batches) if name in batch.jobs)
        while len(self._ended) <= at:
            self._ended.append(self._run(self._batches[len(self._ended)]))
        codes, printed = self._ended[at]
        assert codes.get(name) == 0, f"{name} failed\n{printed}"
        return self.job.records(name)

    def _run(self, batch: Batch) -> tuple[Mapping[str, int], str]:
        """The exit codes of its jobs, and what its ranks printed."""
        with fresh_world(batch.num_ranks) as world:
            try:
                codes, *_ = world.run("tests.launch.run_jobs:run", self.job, batch.jobs, timeout=250)
            except RanksFailed as failed:
                return {}, str(failed)
            return codes, world.printed()


def run_torchrun(
    *words: str, num_ranks: int, max_restarts: int = 0, timeout_s: float = 100
) -> subprocess.CompletedProcess[str]:
    """`torchrun` with a free port; what it left running after `timeout_s` is ended with it."""
    process = start_torchrun(*words, num_ranks=num_ranks, max_restarts=max_restarts)
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun passes it on to its ranks
        stdout, stderr = process.communicate()
        raise AssertionError(f"torchrun hung for {timeout_s} s\n{stdout}\n{stderr}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def start_torchrun(*words: str, num_ranks: int, max_restarts: int = 0) -> subprocess.Popen[str]:
    """`torchrun` under way, its output piped."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}",
        f"--max-restarts={max_restarts}", *words,
    ]  # fmt: skip
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY
    )


def wait_for_steps(job: Job, name: str, count: int, timeout_s: float = 90) -> None:
    """Returns when a run has recorded `count` steps."""
    path = job.folder / name / METRICS_FILE
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists() and len(step_records(read_metrics(path))) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"{name} did not record {count} steps within {timeout_s} s")


def step_records(records: list[Record]) -> list[StepRecord]:
    """The records of steps."""
    return [record for record in records if isinstance(record, StepRecord)]


def losses(records: list[Record]) -> list[float]:
    """The loss of each step."""
    return [record.loss for record in step_records(records)]


def exactly(values: list[float]) -> list[str]:
    """Floats so that only the same bits are equal."""
    return [value.hex() for value in values]


def held_out_losses(records: list[Record]) -> list[float]:
    """The loss of each validation."""
    return [record.loss for record in records if isinstance(record, ValidationRecord)]
