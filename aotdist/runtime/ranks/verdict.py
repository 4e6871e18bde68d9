"""What a table can conclude, and how a leader concludes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, assert_never

from aotdist.runtime.ranks.board import Party, party_key, party_named, spell


@dataclass(frozen=True, slots=True)
class Agreed:
    """Every rank of the table is about to run the same.

    Args:
        rounds: how many rounds this table holds.
    """

    rounds: int


@dataclass(frozen=True, slots=True)
class Differ:
    """The ranks of a party are about to run different steps.

    Args:
        party: whose views of the steps differ: the table's own, or one that stands in it.
        sides: its ranks by what they are about to run; the most common side first.
    """

    party: Party
    sides: tuple[Party, ...]

    @property
    def witnesses(self) -> tuple[int, int]:
        """The two ranks that show their steps, one of each of the first two sides."""
        return self.sides[0][0], self.sides[1][0]

    def summary(self, label: str) -> str:
        """The fault in one sentence."""
        *most, last = [spell(side) for side in self.sides[:4]]
        return (
            f"{', '.join(most)} and {last} are about to run different programs "
            f"over {spell(self.party)} in `{label}`"
        )


@dataclass(frozen=True, slots=True)
class Refused:
    """A rank gave up on the table.

    Args:
        kind: `diverged` when ranks differ at another table, `lost` when a peer failed or never came,
            `unsupported` when one cannot compile its call, and all run theirs as they were written.
        what: the reason in one sentence.
        fix: what the user can do.
        call: the kind of call that is `unsupported`; who came for another sits down at the next table.
    """

    kind: Literal["diverged", "lost", "unsupported"]
    what: str
    fix: str
    call: str | None = None


Verdict = Agreed | Differ | Refused


class Entry(TypedDict):
    """What a rank lays on the table.

    Args:
        digests: for each of its parties within the table's, the fingerprint of the steps, by party key.
        reach: how many of its tables stand in no other.
        undecided: the kind of call that it came for, if that runs as it was written where a peer refuses it.
    """

    digests: dict[str, str]
    reach: int
    undecided: str | None


def judge(entries: Mapping[int, Entry]) -> Agreed | Differ:
    """Compare the entries of all ranks of a table.

    A party that only some of its ranks know is a difference too: the others run nothing in it.
    """
    for party, sides in _sides(entries):
        if len(sides) > 1:
            ordered = sorted(sides.values(), key=lambda side: (-len(side), side))
            return Differ(party, tuple(tuple(side) for side in ordered))
    return Agreed(max(entry["reach"] for entry in entries.values()))


def _sides(entries: Mapping[int, Entry]) -> Iterator[tuple[Party, dict[str | None, list[int]]]]:
    """Each party that any rank knows, with its ranks by digest; the widest known to the first rank first."""
    for key in dict.fromkeys(key for entry in entries.values() for key in entry["digests"]):
        sides: dict[str | None, list[int]] = {}
        for rank in party_named(key):
            sides.setdefault(entries[rank]["digests"].get(key), []).append(rank)
        yield party_named(key), sides


def verdict_to_notice(verdict: Verdict) -> list[Any]:
    """A verdict as the board holds it."""
    match verdict:
        case Agreed(rounds):
            return ["agreed", rounds]
        case Differ(party, sides):
            return ["differ", party_key(party), sides]
        case Refused(kind, what, fix, call):
            return ["refused", kind, what, fix, call]
        case _:
            assert_never(verdict)


def verdict_from_notice(notice: list[Any]) -> Verdict:
    """The verdict that `verdict_to_notice` wrote."""
    match notice:
        case ["agreed", rounds]:
            return Agreed(rounds)
        case ["differ", key, sides]:
            return Differ(party_named(key), tuple(tuple(side) for side in sides))
        case ["refused", kind, what, fix, call]:
            return Refused(kind, what, fix, call)
        case _:
            raise AssertionError(f"not a verdict: {notice!r}")
