"""What the person at the terminal sees: a live bar, or plain lines where there is no terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from aotdist.launch.metrics import CheckpointRecord, EndRecord, Record, StepRecord, ValidationRecord

_PLAIN_LINES = 50
"""Step lines that a whole run prints where there is no terminal."""


class Reporter:
    """Shows or keeps the progress of a run; this base class, for ranks other than 0, does nothing."""

    def start(self, facts: Mapping[str, str], num_steps: int) -> None:
        """The run begins; `facts` describe it."""

    def record(self, record: Record) -> None:
        """A new record."""

    def section(self, title: str, text: str) -> None:
        """A longer text: the compile summary."""

    def close(self) -> None:
        """Nothing more will come."""


def make_reporter(console: Console | None = None) -> Reporter:
    """The reporter that fits the console (standard output by default)."""
    console = console or Console()
    return LiveReporter(console) if console.is_terminal else PlainReporter()


def bits_per_byte(nats: float) -> float:
    """A loss in bits, to which an ideal coder would compress a byte."""
    return nats / math.log(2)


def describe_step(record: StepRecord) -> str:
    """The main numbers of a step in columns: 41 characters."""
    return (
        f"loss {record.loss:6.4f}  {record.tokens_per_s / 1e3:5.1f}k tok/s  "
        f"{record.seconds * 1e3:5.0f} ms  {record.memory_bytes / 2**20:5.0f} MiB"
    )


def describe_validation(record: ValidationRecord) -> str:
    """The held-out loss in both units."""
    return f"held-out loss {record.loss:6.4f} nats ({bits_per_byte(record.loss):.3f} bits) a byte"


def describe_checkpoint(record: CheckpointRecord) -> str:
    """Size and time of a save, or its failure."""
    if record.failure:
        return f"checkpoint FAILED, training goes on: {record.failure}"
    return (
        f"checkpoint, {record.num_bytes / 1e6:.1f} MB in {record.seconds:.2f} s, "
        f"{record.waited_s:.2f} s of it waited for"
    )


def describe_end(record: EndRecord) -> str:
    """Status, steps and time of a run."""
    return f"{record.status} after {record.step} steps, {record.seconds:.1f} s"


def _describe_slope(record: StepRecord) -> str:
    return f"norm {record.grad_norm:5.2f}  lr {record.lr:.1e}"


class PlainReporter(Reporter):
    """Lines for a log file: about `_PLAIN_LINES` lines for steps, and every validation."""

    def __init__(self) -> None:
        self._num_steps = 0

    def start(self, facts: Mapping[str, str], num_steps: int) -> None:
        self._num_steps = num_steps
        for name, value in facts.items():
            print(f"{name:>10}  {value}", flush=True)

    def record(self, record: Record) -> None:
        match record:
            case StepRecord(step=step):
                if step == 1 or step % -(-self._num_steps // _PLAIN_LINES) == 0:
                    self._print_step(step, f"{describe_step(record)}  {_describe_slope(record)}")
            case ValidationRecord():
                self._print_step(record.step, describe_validation(record))
            case CheckpointRecord():
                self._print_step(record.step, describe_checkpoint(record))
            case EndRecord():
                print(describe_end(record), flush=True)

    def section(self, title: str, text: str) -> None:
        print(f"--- {title} ---\n{text}\n", flush=True)

    def _print_step(self, step: int, text: str) -> None:
        print(f"step {step:>5}/{self._num_steps}  {text}", flush=True)


class LiveReporter(Reporter):
    """A progress bar at the bottom, with everything else scrolling above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            BarColumn(bar_width=14),  # the whole line then fits a terminal of 80 columns
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("steps", total=None, numbers="")

    def start(self, facts: Mapping[str, str], num_steps: int) -> None:
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(Text(name, style="dim"), Text(value))
        self._console.print(Panel(table, title="aotdist", title_align="left", expand=False))
        self._bar.update(self._task, total=num_steps, numbers="starting")
        self._bar.start()

    def record(self, record: Record) -> None:
        match record:
            case StepRecord():
                self._bar.update(self._task, completed=record.step, numbers=describe_step(record))
            case ValidationRecord():
                line = Text(f"step {record.step:>5}  {describe_validation(record)}")
                line.highlight_words([f"{record.loss:6.4f}".strip()], style="bold cyan")
                self._console.print(line)
            case CheckpointRecord():
                line = f"step {record.step:>5}  {describe_checkpoint(record)}"
                self._console.print(Text(line, style="bold red" if record.failure else "dim"))
            case EndRecord():
                self._bar.stop()
                self._console.print(Text(describe_end(record), style="bold"))

    def section(self, title: str, text: str) -> None:
        self._console.print(Panel(Text(text), title=title, title_align="left", expand=False))

    def close(self) -> None:
        self._bar.stop()
