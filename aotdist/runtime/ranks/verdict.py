"""The verdicts of a table, and how its leader decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from aotdist.errors import AotdistError, RankDivergence, RankLost, UnsupportedProgram
from aotdist.runtime.ranks.board import party_named, spell


@dataclass(frozen=True, slots=True)
class Differ:
    """The ranks of a party are about to run different steps.

    Args:
        party: the party whose views differ: the table's own, or one within it.
        sides: its ranks, grouped by what they are about to run; the largest group first.
    """

    party: Sequence[int]
    sides: Sequence[Sequence[int]]

    def witnesses(self) -> tuple[int, int]:
        """The two ranks that show their steps, one from each of the first two groups."""
        return self.sides[0][0], self.sides[1][0]

    def summary(self, label: str) -> str:
        """The difference in one sentence."""
        *most, last = [spell(side) for side in self.sides[:4]]
        return (
            f"{', '.join(most)} and {last} are about to run different programs "
            f"over {spell(self.party)} in `{label}`"
        )

    def refusal(self, label: str) -> Refused:
        """The verdict for other tables of these ranks."""
        one, other = self.witnesses()
        fix = f"the errors of ranks {one} and {other} have the details"
        return Refused("diverged", self.summary(label), fix)


@dataclass(frozen=True, slots=True)
class Refused:
    """A rank gave up on the table.

    Args:
        kind: `diverged` if ranks differ at another table, `lost` if a peer failed or never came,
            `unsupported` if one cannot compile its call, and all run such calls eagerly.
        what: the reason in one sentence.
        fix: what the user can do.
        call: the kind of call that is `unsupported`; ranks with another call go on to the next table.
    """

    kind: Literal["diverged", "lost", "unsupported"]
    what: str
    fix: str
    call: str | None = None

    def error(self) -> AotdistError:
        """The error to raise."""
        kinds = {"diverged": RankDivergence, "lost": RankLost, "unsupported": UnsupportedProgram}
        return kinds[self.kind](self.what, stage="runtime", fix=self.fix)


Verdict: TypeAlias = int | Differ | Refused
"""The verdict of a table; if all agree, it is the number of rounds of the table."""


def judge(entries: Mapping[int, Mapping[str, Any]]) -> int | Differ:
    """Compare the entries of all ranks of a table.

    A party that only some of its ranks have is a difference, too: the others run nothing in it.
    """
    for key in dict.fromkeys(key for entry in entries.values() for key in entry["digests"]):
        sides: dict[str | None, list[int]] = {}
        for rank in party_named(key):
            sides.setdefault(entries[rank]["digests"].get(key), []).append(rank)
        if len(sides) > 1:
            return Differ(party_named(key), sorted(sides.values(), key=lambda side: (-len(side), side)))
    return max(entry["reach"] for entry in entries.values())


def verdict_from_notice(notice: Any) -> Verdict | None:
    """The verdict that `_settle` posted, if there is one."""
    if isinstance(notice, dict):
        return Differ(**notice) if "sides" in notice else Refused(**notice)
    return notice
