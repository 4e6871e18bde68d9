"""What one rank is about to run, as its peers compare it: steps, views of them, differences, verdicts.

A *step* is something that must be the same on peers: a collective, the registration of shared state, or its
first use. A *party* is a set of ranks that must run the same steps in the same order: the members of each
process group, and the ranks that two groups have in common, since these must also use the two groups in the
same order. A party's *view* of a rank's steps is the steps whose group contains the whole party.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from aotdist.errors import AotdistError, RankDivergence, RankLost, UnsupportedProgram
from aotdist.passes.collectives import Collective
from aotdist.runtime.ranks.board import Party, party_key, party_named, spell
from aotdist.torch_seam import groups


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, identified independently of its name, which may differ from rank to rank.

    Args:
        name: its name on this rank.
        party: its members.
        ordinal: its position among this rank's groups of the same members, in the order of creation.
    """

    name: str
    party: Party
    ordinal: int


Kind: TypeAlias = Literal["state", "read", "collective"]
"""The kind of a step: a parameter or buffer that ranks share, its first use, or a collective."""


@dataclass(frozen=True, slots=True)
class Shared:
    """State that ranks share.

    Args:
        kind: `state` for its registration, `read` for its first use in the program.
        text: its name, and for `state` what must be the same on all ranks.
        groups: names of the process groups that share it.
    """

    kind: Literal["state", "read"]
    text: str
    groups: tuple[str, ...]


Sequenced: TypeAlias = Shared | Collective


@dataclass(frozen=True, slots=True)
class Step:
    """One step of this rank.

    Args:
        key: what must be equal on every rank of the group.
        group: the ranks that it concerns.
        found: the collective or shared state.
    """

    key: str
    group: Group
    found: Sequenced


class Shown(NamedTuple):
    """A step as a witness posts it: JSON makes a list of it.

    Args:
        kind: of the step.
        key: as in `Step`.
        text: the step in words.
        place: node and line in the program, in words.
    """

    kind: Kind
    key: str
    text: str
    place: str


def groups_with_peers() -> dict[str, Group]:
    """This rank's process groups by name, without those that have no peers: of one rank, or fake."""
    found: dict[str, Group] = {}
    made = Counter[Party]()
    for name, party, backend in groups.held_process_groups():
        if len(party) > 1 and backend != "fake":
            found[name] = Group(name, party, made[party])
        made[party] += 1
    return found


def steps_of(sequence: Iterable[Sequenced], groups: Mapping[str, Group]) -> tuple[Step, ...]:
    """The steps in which this rank has peers, in order."""
    places = {name: f"{party_key(group.party)} {group.ordinal}" for name, group in groups.items()}
    return tuple(
        Step(f"{_key(found)} {places[name]}", groups[name], found)
        for found in sequence
        for name in sorted((name for name in groups_of(found) if name in groups), key=places.__getitem__)
    )


def groups_of(found: Sequenced) -> tuple[str, ...]:
    """The names of its process groups."""
    return found.groups if isinstance(found, Shared) else (found.group,)


def _key(found: Sequenced) -> str:
    return f"{found.kind} {found.text}" if isinstance(found, Shared) else str(found.fingerprint())


def parties_of(groups: Iterable[Group]) -> tuple[Party, ...]:
    """Every party that these groups make, larger ones first; the order is the same on all ranks."""
    parties = {group.party for group in groups}
    fresh = parties
    while fresh:
        shared = {tuple(sorted(set(a) & set(b))) for a, b in itertools.product(fresh, parties)}
        fresh = {party for party in shared if len(party) > 1} - parties
        parties = parties | fresh
    return tuple(sorted(parties, key=lambda party: (-len(party), party)))


def widest(parties: Iterable[Party]) -> tuple[Party, ...]:
    """The parties that are in no other."""
    found = [frozenset(party) for party in parties]
    return tuple(tuple(sorted(party)) for party in found if not any(party < other for other in found))


def view(steps: Sequence[Step], party: Party) -> tuple[Step, ...]:
    """The steps that every member of the party takes part in."""
    members = frozenset(party)
    groups = {id(step.group): step.group for step in steps}  # hashing 1,000 ranks takes 5 us a step
    wide = {key for key, group in groups.items() if members.issubset(group.party)}
    return tuple(step for step in steps if id(step.group) in wide)


def runs_alike(one: Sequence[Step], other: Sequence[Step], party: Party) -> bool:
    """Whether the party has the same view of both."""
    return [step.key for step in view(one, party)] == [step.key for step in view(other, party)]


def digest(steps: Iterable[Step]) -> str:
    """A hash of the steps' keys, in order."""
    return hashlib.sha256("\n".join(step.key for step in steps).encode()).hexdigest()[:32]


def shown_steps(steps: Iterable[Step]) -> list[Shown]:
    """Steps as a witness posts them."""
    return [
        Shown(step.found.kind, step.key, step.found.text, "")
        if isinstance(step.found, Shared)
        else Shown("collective", step.key, _text(step.found, step.group), _place(step.found))
        for step in steps
    ]


def describe_difference(sides: Mapping[int, Sequence[Sequence[Any]]]) -> str:
    """The first step that differs between two ranks, on both of them; state first. Empty if there is none.

    Args:
        sides: the `shown_steps` of each of the two.
    """
    by_rank = {rank: [Shown(*step) for step in steps] for rank, steps in sides.items()}
    by_kind = [
        (words, {rank: [step for step in steps if step.kind == kind] for rank, steps in by_rank.items()})
        for kind, words in _WORDS.items()
    ]
    keys = [[[step.key for step in steps] for steps in of_kind.values()] for _, of_kind in by_kind]
    differing = [each for each, (one, other) in zip(by_kind, keys, strict=True) if one != other]
    if not differing:
        return ""
    (noun, verb), of_kind = differing[0]
    left, right = of_kind.values()
    first = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a.key != b.key),
        min(len(left), len(right)),
    )
    after = f", after {left[first - 1].text}" if first else ""
    lines = [_side(rank, steps, first, verb) for rank, steps in of_kind.items()]
    return "\n".join([f"they part at {noun} {first + 1}{after}", *lines])


_WORDS: dict[Kind, tuple[str, str]] = {
    "state": ("shared parameter or buffer", "has"),
    "read": ("use of shared parameters and buffers", "reads"),
    "collective": ("collective", "runs"),
}
"""A noun and a verb for steps of each kind, in the order in which they are compared."""


def _side(rank: int, steps: Sequence[Shown], at: int, verb: str) -> str:
    if at == len(steps):
        return f"  rank {rank} {verb} none: its sequence ends after {len(steps)}"
    return f"  rank {rank} {verb} {steps[at].text}{steps[at].place}"


_NAMED = 8
"""How many parameters of a collective a message names."""


def _text(found: Collective, group: Group) -> str:
    reduction = f" {found.reduce_op}" if found.reduce_op else ""
    which = f", their group {group.ordinal + 1}" if group.ordinal else ""
    served = [f"`{path}`" for path in found.serves[:_NAMED]]
    served += ["..."] if len(found.serves) > _NAMED else []
    return (
        f"{found.op}{reduction} of {found.numel:,} {found.dtype} ({found.num_bytes:,} bytes) "
        f"over {spell(group.party)}{which}{' for ' if served else ''}{', '.join(served)}"
    )


def _place(found: Collective) -> str:
    return f" (node {found.node})" + (f"\n         at {found.source}" if found.source else "")


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
