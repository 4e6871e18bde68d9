"""Taking turns: contenders timed in rotation, so that their ratios survive a noisy machine."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

Unit = Literal["s", "ms", "us", "MiB"]

PER_SECOND: dict[Unit, float] = {"s": 1.0, "ms": 1e3, "us": 1e6}


def nothing() -> None:
    """Do nothing: the preparation of a contender that needs none."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the work.

    Args:
        name: as the tables show it.
        run: the work; timed.
        prepare: brings back the state that `run` expects, before each run; not timed.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = nothing


@dataclass(frozen=True, slots=True)
class Series:
    """What one contender measured: one sample a round, so that series of one case can be divided.

    Args:
        case: what the contenders had in common: `fsdp2, 2 ranks`.
        contender: who.
        quantity: what was measured: `step`, `cold compile`.
        unit: of the samples.
        samples: one a round, in order.
        work: pieces of work in one sample (layers), when a share per piece is worth showing.
    """

    case: str
    contender: str
    quantity: str
    unit: Unit
    samples: tuple[float, ...]
    work: int = 1


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to measure.

    Args:
        rounds: turns that each contender gets.
        calls: runs in one turn; the sample is their mean.
        warmup: runs of each contender before the first round, not measured.
    """

    rounds: int
    calls: int = 1
    warmup: int = 3


def take_turns(
    contenders: Sequence[Contender],
    pace: Pace,
    *,
    together: bool = False,
    pause_gc: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    seconds_of: Callable[[Contender], float] | None = None,
) -> dict[str, list[float]]:
    """Time `contenders` in rotation.

    Args:
        contenders: names are unique.
        pace: rounds, calls a turn, warm-up runs.
        together: every rank of the default group is here: runs start together, and the slowest
            rank's time counts.
        pause_gc: collect garbage between rounds instead of whenever it falls due. After one
            `torch.compile` a collection walks 490,000 objects in 0.4 s (2 busy cores, torch 2.13), and
            that pause would hit whoever is running. Else it is collected before each turn, too: a contender
            pays for its own garbage, and not for that of the one before.
        clock: in seconds; `time.process_time` leaves out what else the machine is busy with.
        seconds_of: prepares and times one run where no clock of the CPU's can: by events of a GPU.

    Returns:
        Seconds, one sample a round, by contender.
    """
    for contender in contenders:
        for _ in range(pace.warmup):
            contender.prepare()
            contender.run()
    timed = seconds_of or functools.partial(_seconds_of, together=together, clock=clock)
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    with _paused_gc() if pause_gc else contextlib.nullcontext():
        for _ in range(pace.rounds):
            if pause_gc:
                gc.collect()
            for contender in contenders:
                if not pause_gc:
                    gc.collect()
                samples[contender.name].append(sum(timed(contender) for _ in range(pace.calls)) / pace.calls)
    return _slowest_rank(samples) if together else samples


def _seconds_of(contender: Contender, *, together: bool, clock: Callable[[], float]) -> float:
    contender.prepare()
    if together:
        dist.barrier()
    start = clock()
    contender.run()
    return clock() - start


@contextlib.contextmanager
def _paused_gc() -> Generator[None]:
    is_frozen = gc.get_freeze_count() > 0  # as in the tests, which leave out what they imported
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not is_frozen:
            gc.unfreeze()


def _slowest_rank(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    everyone: list[dict[str, list[float]]] = [samples] * dist.get_world_size()
    dist.all_gather_object(everyone, samples)
    turns = {name: zip(*(rank[name] for rank in everyone), strict=True) for name in samples}
    return {name: [max(turn) for turn in each] for name, each in turns.items()}


def as_series(
    samples: dict[str, list[float]], *, case: str, quantity: str, unit: Unit, work: int = 1
) -> list[Series]:
    """Samples in seconds as series in `unit`."""
    scale = PER_SECOND[unit]
    return [
        Series(case, name, quantity, unit, tuple(second * scale for second in seconds), work)
        for name, seconds in samples.items()
    ]
