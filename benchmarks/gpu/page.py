"""The results as a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.gpu.measuring import COPY
from benchmarks.record import Record
from benchmarks.tables import header, row
from benchmarks.timing import PER_SECOND, Series
from benchmarks.verdicts import Judgement, Target, judge, ratio

_OURS = "aotdist triton"
_INDUCTOR = ("torch.compile", "torch.compile max-autotune")
_OF_COPY = 0.9
_STEPS = "Llama*"

_HEAD = """# On a GPU

Written by `make bench-gpu`; do not edit. """

_NOTHING = """There was no GPU where it ran last, so nothing was measured. On a
machine with one it takes less than nine minutes and fills this page: pointwise operators, norms, softmax,
cross-entropy, quantisation and AdamW as a part of the bandwidth of a copy, then a Llama's block and a step of
training of a billion parameters, in bf16 and FP8; beside eager, Liger, and `torch.compile` as it is and with
max-autotune. A test runs all of it on the CPU, with tiny tensors (`python -m benchmarks.gpu --dry-run`).
"""

_EXPLAINED = """Contenders of a row live in one process and take turns; times
are medians between two events of the GPU. Caches are empty before each run of a single kernel, and the GPU
waits until its launches are queued. A first run is made of compiling, for the most part; what the compilers
import is paid for before. A peak is what a step has in memory at once, weights and optimizer states counted.
"""


def nothing() -> str:
    """The page of a machine without a GPU."""
    return _HEAD + _NOTHING


def targets() -> list[Target]:
    """What is to be reached beside `torch.compile`."""
    return [
        Target("*", "time", _OURS, _INDUCTOR, limit=1.0, prediction=1.0),
        Target(_STEPS, "time", _OURS, ("torch.compile",), 0.91, 0.91, "1.1 times as many tokens a second"),
        Target("*", "first run", _OURS, ("torch.compile",), limit=0.5, prediction=0.5),
    ]


def page(record: Record) -> str:
    """The whole page of what was measured."""
    circumstances = ", ".join(
        f"{key} {value}" for key, value in {**record.versions, **record.machine}.items()
    )
    parts = [f"{_HEAD}{_EXPLAINED}", f"`{record.command}`, {record.date}; {circumstances}.", ""]
    bandwidth = _bandwidth(record.series)
    if record.failed:
        parts += ["## Missing", "", *(f"- {note}" for note in record.failed), ""]
    parts += ["## Goals", "", *_goals(record.series, bandwidth), ""]
    steps = [series for series in record.series if series.unit in ("ms", "MiB") or _is_step(series)]
    kernels = [series for series in record.series if series not in steps]
    parts += [
        "## Single kernels",
        "",
        f"A copy moves {bandwidth / 1e9:,.0f} GB/s.",
        "",
        *_kernels(kernels, bandwidth),
    ]
    parts += ["", "## Training", "", *_steps(steps)]
    return "\n".join([*parts, ""])


def _is_step(series: Series) -> bool:
    return series.case.startswith(_STEPS.removesuffix("*"))


def _bandwidth(found: Sequence[Series]) -> float:
    """Bytes a second that a copy reads and writes; 0 if it was not measured."""
    copies = [series for series in found if series.case == COPY]
    return max((series.work / _seconds(series) for series in copies), default=0.0)


def _seconds(series: Series) -> float:
    return statistics.median(series.samples) / PER_SECOND[series.unit]


def _goals(found: Sequence[Series], bandwidth: float) -> Iterator[str]:
    yield from header("case", "goal", "measured", "verdict")
    for series in found:
        if bandwidth and series.contender == _OURS and series.unit == "us":
            part = series.work / _seconds(series) / bandwidth
            yield _goal(series.case, f"at least {_OF_COPY} of a copy's bandwidth", part, part >= _OF_COPY)
    for judgement in _judgements(found):
        target = judgement.target
        goal = f"{target.quantity} at most {target.limit} of {judgement.peer}'s"
        yield _goal(judgement.case, goal, judgement.ratio.median, judgement.verdict == "met")


def _goal(case: str, goal: str, measured: float, is_met: bool) -> str:
    return row(case, goal, f"{measured:.2f}", "met" if is_met else "**missed**")


def _judgements(found: Sequence[Series]) -> list[Judgement]:
    """Verdicts of the cases that have a peer: contenders may be missing here."""
    judged: list[Judgement] = []
    for target in targets():
        places = {(each.case, each.quantity) for each in found if each.contender in target.peers}
        judged += judge([target], [each for each in found if (each.case, each.quantity) in places])
    return judged


def _kernels(found: Sequence[Series], bandwidth: float) -> Iterator[str]:
    yield from header("case", "contender", "us", "GB/s", "of a copy", "to eager", "first run, s")
    for series in found:
        if series.quantity != "time":
            continue
        rate = series.work / _seconds(series)
        yield row(
            series.case,
            series.contender,
            _number(statistics.median(series.samples)),
            _number(rate / 1e9),
            f"{rate / bandwidth:.2f}" if bandwidth else "-",
            _to_first(series, found),
            _beside(series, "first run", found),
        )


def _steps(found: Sequence[Series]) -> Iterator[str]:
    yield from header("case", "contender", "ms", "tokens/s", "peak, MiB", "to eager", "first run, s")
    for series in found:
        if series.quantity != "time":
            continue
        yield row(
            series.case,
            series.contender,
            _number(statistics.median(series.samples)),
            f"{series.work / _seconds(series):,.0f}",
            _beside(series, "peak", found),
            _to_first(series, found),
            _beside(series, "first run", found),
        )


def _to_first(series: Series, found: Sequence[Series]) -> str:
    first = next(each for each in found if (each.case, each.quantity) == (series.case, series.quantity))
    return f"{ratio(series, first).median:.2f}"


def _beside(series: Series, quantity: str, found: Sequence[Series]) -> str:
    """Another quantity of the same contender in the same case."""
    place = (series.case, series.contender, quantity)
    matching = [each for each in found if (each.case, each.contender, each.quantity) == place]
    return _number(statistics.median(matching[0].samples)) if matching else "-"


def _number(value: float) -> str:
    """Three significant digits, never in exponent form."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
