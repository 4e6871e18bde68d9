"""What aotdist set out to reach, as data, and whether it did.

A target is written down before it is measured. Its prediction is what we expected to find, with the
reason; where there was none to give, the prediction is the limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.timing import Series

Verdict = Literal["met", "missed"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float


def spread_of(samples: Sequence[float]) -> Spread:
    """Of one sample, the sample three times over."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    return Spread(*statistics.quantiles(samples, n=4, method="inclusive"))


def ratio(ours: Series, peer: Series) -> Spread:
    """Ours to the peer's, round by round: what slowed a round down slowed both."""
    return spread_of([mine / theirs for mine, theirs in zip(ours.samples, peer.samples, strict=True)])


@dataclass(frozen=True, slots=True)
class Target:
    """At most `limit` times the best of `peers`.

    Args:
        cases: the cases that it speaks of; `plain*` for all that start so.
        quantity: what was measured.
        ours: the contender that has to reach it.
        peers: the contenders that it is held against; the one with the lowest median counts.
        limit: the ratio that is still good.
        prediction: the ratio that was expected.
        reason: where the prediction comes from.
    """

    cases: str
    quantity: str
    ours: str
    peers: tuple[str, ...]
    limit: float
    prediction: float
    reason: str = "the limit"

    def covers(self, series: Series) -> bool:
        """Whether `series` is our side of this target."""
        prefix = self.cases.removesuffix("*")
        same_case = series.case == self.cases if prefix == self.cases else series.case.startswith(prefix)
        return same_case and (series.quantity, series.contender) == (self.quantity, self.ours)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A target beside what was measured.

    Args:
        target: what was to be reached.
        case: where.
        peer: the best peer there.
        ratio: ours to that peer's.
        verdict: whether the median of the ratios is within the limit.
    """

    target: Target
    case: str
    peer: str
    ratio: Spread
    verdict: Verdict


def judge(targets: Sequence[Target], found: Sequence[Series]) -> list[Judgement]:
    """Every target in every case that it covers. A case is measured with all its contenders or not at all."""
    return [_judge_one(target, ours, found) for target in targets for ours in found if target.covers(ours)]


def _judge_one(target: Target, ours: Series, found: Sequence[Series]) -> Judgement:
    place = (ours.case, ours.quantity)
    peers = [
        other for other in found if (other.case, other.quantity) == place and other.contender in target.peers
    ]
    best = min(peers, key=lambda peer: statistics.median(peer.samples))
    measured = ratio(ours, best)
    verdict: Verdict = "met" if measured.median <= target.limit else "missed"
    return Judgement(target, ours.case, best.contender, measured, verdict)
