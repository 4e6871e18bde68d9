"""Measures rows, one after the other; runs in a process that may be lost, and hands in each row at once."""

from __future__ import annotations

import faulthandler
import gc
import pickle
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.compilers import WITH_GRAPHS, Compilers, Way
from benchmarks.gpu.place import Cpu, Gpu, Place
from benchmarks.gpu.rows import Row, rows
from benchmarks.gpu.workload import Workload
from benchmarks.timing import Contender, Series, as_series, take_turns

COPY = "copy"
WARM_UP = "warm-up"
"""The case in which compilers import what they need; nothing is measured."""
_COPIED = 2**30
_MIB = 2.0**20
_PATIENCE = 60.0  # seconds; and twice what a row is expected to take
_TOLERANCE = 0.05
"""How far an outcome may be from eager's, as a part of its norm: FP8's losses are within 3 percent."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a row.

    Args:
        case: the row.
        series: what was measured.
        notes: which contenders are missing, and why.
        errors: what ended them, whole, by contender.
    """

    case: str
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Job:
    """What a process is asked.

    Args:
        cases: names of the rows, in order.
        dry: whether a CPU stands in for the GPU.
        budget: what does not fit is left out.
        file: where answers go, each as soon as it is there.
        again: warm up first: the process that did is lost.
    """

    cases: tuple[str, ...]
    dry: bool
    budget: Budget
    file: Path
    again: bool = False


@dataclass(frozen=True, slots=True)
class Failures:
    """What failed in a row, contender by contender.

    Args:
        notes: a line for each.
        errors: the whole of each that was an error.
    """

    notes: list[str] = field(default_factory=list[str])
    errors: dict[str, str] = field(default_factory=dict[str, str])

    @contextmanager
    def kept(self, contender: str, finish: Callable[[], None]) -> Generator[None]:
        """Keep an error, and go on; one that lost the GPU ends the process: `finish` raises again."""
        try:
            yield
        except Exception as error:
            self.errors[contender] = traceback.format_exc()
            self.notes.append(f"{contender}: {_in_a_line(error)}")
            finish()


def measure(job: Job) -> None:
    """Measure the rows of a job."""
    place: Place = Cpu() if job.dry else Gpu()
    known = {row.case: row for row in rows(dry=job.dry)}
    needed = [known[case].needed if case in known else 0.0 for case in job.cases]
    if job.again:
        _warm_up(Compilers(dry=job.dry), place)
    with job.file.open("ab") as answers:
        for position, case in enumerate(job.cases):
            with _deadline(known.get(case)):
                if case == COPY:
                    answer = _copy(place, num_bytes=2**10 if job.dry else _COPIED)
                elif case == WARM_UP:
                    answer = _warm_up(Compilers(dry=job.dry), place)
                else:
                    answer = _measure(known[case], place, job.budget, sum(needed[position + 1 :]))
            hand_in(answers, answer)


@contextmanager
def _deadline(row: Row | None) -> Generator[None]:
    """End the process, and say where it was, if a row takes far longer than it should."""
    expected = sum(row.costs.values()) if row else 0.0
    faulthandler.dump_traceback_later(_PATIENCE + 2 * expected, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def read(file: Path) -> list[Answer]:
    """The answers that a process handed in."""
    found: list[Answer] = []
    with file.open("rb") as answers:
        while True:
            try:
                found.append(pickle.load(answers))
            except EOFError:
                return found


def hand_in(answers: BinaryIO, answer: Answer) -> None:
    """Write an answer where `read` finds it, whatever becomes of this process."""
    pickle.dump(answer, answers)
    answers.flush()


def _copy(place: Place, num_bytes: int) -> Answer:
    """What memory can do: the bandwidth that others are held against."""
    source = torch.ones(num_bytes, dtype=torch.int8, device=place.device)
    target = torch.empty_like(source)
    contender = Contender(COPY, lambda: target.copy_(source))
    seconds = sorted(place.seconds_of(contender, cold=True) for _ in range(20))
    return Answer(
        COPY, tuple(as_series({COPY: seconds}, case=COPY, quantity="time", unit="us", work=2 * num_bytes))
    )


def _warm_up(compilers: Compilers, place: Place) -> Answer:
    """Let each compiler import what it needs, so that no row pays for it."""
    failures = Failures()
    for way in ("torch.compile", "aotdist triton"):
        with failures.kept(way, place.finish):
            x = torch.ones(8, device=place.device, requires_grad=True)
            compilers.compiled(_little, way, graphs=False)(x).sum().backward()
            place.finish()
    return Answer(WARM_UP, (), tuple(failures.notes), failures.errors)


def _little(x: Tensor) -> Tensor:
    return x.sin() * x.exp()


def _measure(row: Row, place: Place, budget: Budget, later: float) -> Answer:
    _forget_the_last()
    if not budget.holds(row.needed):
        return Answer(row.case, (), (f"left out for want of time ({row.needed:.0f} s)",))
    failures = Failures()
    ready: dict[Way, Workload] = {}
    found: list[Series] = []
    reference: tuple[Way, Sequence[Tensor]] | None = None
    for way, cost in row.costs.items():
        if row.is_optional(way) and not budget.holds(cost, later=later):
            failures.notes.append(f"{way}: left out for want of time ({cost:.0f} s)")
            continue
        with failures.kept(way, place.finish):
            workload, outcome, seconds = _first_run(row, way, place)
            reference = reference or (way, outcome)
            distance = _distance(outcome, reference[1])
            if not distance <= _TOLERANCE:  # NaN is not
                failures.notes.append(f"{way}: computes something else, {distance:.2g} from {reference[0]}")
                continue
            ready[way] = workload
            found += as_series({way: [seconds]}, case=row.case, quantity="first run", unit="s")
    with failures.kept("all", place.finish):
        found += _timed(row, place, ready)
    return Answer(row.case, tuple(found), tuple(failures.notes), failures.errors)


def _forget_the_last() -> None:
    """Let go of what the row before compiled and allocated."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _first_run(row: Row, way: Way, place: Place) -> tuple[Workload, Sequence[Tensor], float]:
    """A workload, what it computes, and how long that took: it is compiled on the way."""
    workload = row.build(way, place)
    workload.prepare()
    place.finish()
    started = time.perf_counter()
    outcome = workload.outcome()
    place.finish()
    return workload, [tensor.detach().clone() for tensor in outcome], time.perf_counter() - started


def _timed(row: Row, place: Place, ready: dict[Way, Workload]) -> list[Series]:
    contenders = [Contender(way, workload.run, workload.prepare) for way, workload in ready.items()]
    if not contenders:
        return []
    seconds = take_turns(
        contenders, row.pace, seconds_of=lambda contender: place.seconds_of(contender, cold=row.cold)
    )
    work = row.work or next(iter(ready.values())).num_bytes
    found = as_series(seconds, case=row.case, quantity="time", unit="us" if row.cold else "ms", work=work)
    if row.memory:
        counted = {way: each for way, each in ready.items() if way not in WITH_GRAPHS}
        peaks = {way: place.peak_of(each.run) + each.resident() for way, each in counted.items()}
        found += [Series(row.case, way, "peak", "MiB", (peak / _MIB,)) for way, peak in peaks.items()]
    return found


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest of the tensors' distances, or NaN; each is a part of the norm of what was expected."""
    pairs = zip(found, expected, strict=True)
    parts = [float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)) for a, b in pairs]
    return float(torch.tensor(parts).amax())  # Python's `max` passes over NaN behind another number


def _in_a_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def what_ended(output: str) -> str:
    """The line of a process's output that says why it ended: the last, unless it is a dump of its threads."""
    lines = output.strip().splitlines()
    dumps = (line for line in lines if line.startswith(("Timeout (", "Fatal Python error")))
    return next(dumps, lines[-1] if lines else "")[:200]
