"""Records as markdown: the circumstances, the targets and their verdicts, then every median."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.record import Record
from benchmarks.timing import Series
from benchmarks.verdicts import Judgement, Spread, Target, judge, ratio, spread_of

HEAD = """# Results

Written by `make bench` (`python -m benchmarks.run`) from the JSON in `results/`; do not edit. Contenders of
a case took turns in the same processes; a ratio is the median of the rounds' ratios, with their quartiles
beside it. Absolute numbers are this machine's and hold nothing. [MODELS.md](MODELS.md) has real models.
"""


def page(sections: Sequence[str]) -> str:
    """The whole results page."""
    return "\n".join([HEAD, *sections])


def section(record: Record, purpose: str, targets: Sequence[Target]) -> str:
    """One bench.

    Args:
        record: what was measured.
        purpose: the bench in a sentence or two.
        targets: what was to be reached.
    """
    circumstances = ", ".join(
        f"{key} {value}" for key, value in {**record.versions, **record.machine}.items()
    )
    head = f"## {record.bench}\n\n{purpose}\n\n`{record.command}`, {record.date}; {circumstances}.\n"
    if record.failed:
        head += f"\n**Failed: {'; '.join(record.failed)}.**\n"
    judgements = judge(targets, record.series)
    return "\n".join([head, *_target_table(judgements), "", *_series_table(record.series), ""])


def _target_table(judgements: Sequence[Judgement]) -> Iterator[str]:
    if not judgements:
        return
    yield from header("case", "quantity", "ours / best peer", "predicted", "limit", "measured", "verdict")
    for found in judgements:
        target = found.target
        yield row(
            found.case,
            target.quantity,
            f"{target.ours} / {found.peer}",
            f"{target.prediction:.2f} ({target.reason})",
            f"{target.limit:.2f}",
            _ratio(found.ratio),
            found.verdict if found.verdict == "met" else f"**{found.verdict}**",
        )


def _series_table(found: Sequence[Series]) -> Iterator[str]:
    per_piece = any(series.work > 1 for series in found)
    share = ["a layer"] if per_piece else []
    yield from header("case", "quantity", "contender", "median", *share, "rounds", "ratio to the first")
    for series in found:
        first = next(each for each in found if (each.case, each.quantity) == (series.case, series.quantity))
        spread = spread_of(series.samples)
        yield row(
            series.case,
            series.quantity,
            series.contender,
            f"{_number(spread.median)} {series.unit} ({_number(spread.low)}-{_number(spread.high)})",
            *([f"{_number(spread.median / series.work)} {series.unit}"] if per_piece else []),
            str(len(series.samples)),
            _ratio(ratio(series, first)),
        )


def header(*names: str) -> Iterator[str]:
    """The first two lines of a table."""
    yield row(*names)
    yield row(*("---" for _ in names))


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _number(value: float) -> str:
    """Three significant digits, never in exponent form."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
