"""What one rank is about to run, as its peers can check it: steps, views of them, differences.

A *step* is one collective. A *party* is a set of ranks that must run the same steps in the same
order: the members of each process group, and, where two groups share some ranks, those too, because
ranks that meet in two groups must also take the groups in the same order. A party's *view* of a
rank's steps is those whose group contains the whole party.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aotdist.passes.collectives import Collective
from aotdist.runtime.ranks.board import Party, party_key, spell
from aotdist.torch_seam import groups


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, by what all of its ranks know of it: names may differ from rank to rank.

    Args:
        name: what this rank calls it.
        party: its members.
        ordinal: its place among this rank's groups of the same members, in the order of creation.
    """

    name: str
    party: Party
    ordinal: int


@dataclass(frozen=True, slots=True)
class Step:
    """One collective of this rank.

    Args:
        key: what must be equal on every rank of its group.
        group: where it takes place.
        found: the collective as the graph has it.
    """

    key: str
    group: Group
    found: Collective


@dataclass(frozen=True, slots=True)
class Shown:
    """A step of any rank, as a witness shows it.

    Args:
        key: as in `Step`.
        text: the same for a person.
        node: the graph node that starts it.
        source: the user's line, if known.
    """

    key: str
    text: str
    node: str
    source: str | None


def groups_with_peers() -> dict[str, Group]:
    """This rank's process groups by name, without those that have no peers: of one rank, or fake."""
    found: dict[str, Group] = {}
    made = Counter[Party]()
    for name, party, backend in groups.held_process_groups():
        if len(party) > 1 and backend != "fake":
            found[name] = Group(name, party, made[party])
        made[party] += 1
    return found


def steps_of(sequence: Iterable[Collective], groups: Mapping[str, Group]) -> tuple[Step, ...]:
    """The steps in which this rank has peers, in order."""
    places = {name: f"{party_key(group.party)} {group.ordinal}" for name, group in groups.items()}
    return tuple(
        Step(f"{found.fingerprint()} {places[found.group]}", groups[found.group], found)
        for found in sequence
        if found.group in groups
    )


def parties_of(groups: Iterable[Group]) -> tuple[Party, ...]:
    """Every party that these groups make, the larger ones first; all ranks sort them alike."""
    parties = {group.party for group in groups}
    fresh = parties
    while fresh:
        shared = {_common(a, b) for a, b in itertools.product(fresh, parties)}
        fresh = {party for party in shared if len(party) > 1} - parties
        parties = parties | fresh
    return tuple(sorted(parties, key=lambda party: (-len(party), party)))


def widest(parties: Iterable[Party]) -> tuple[Party, ...]:
    """The parties that stand in no other."""
    found = [frozenset(party) for party in parties]
    return tuple(tuple(sorted(party)) for party in found if not any(party < other for other in found))


def view(steps: Sequence[Step], party: Party) -> tuple[Step, ...]:
    """The steps that every member of the party takes part in."""
    members = frozenset(party)
    groups = {id(step.group): step.group for step in steps}  # hashing 1,000 ranks takes 5 us a step
    wide = {key for key, group in groups.items() if members.issubset(group.party)}
    return tuple(step for step in steps if id(step.group) in wide)


def runs_alike(one: Sequence[Step], other: Sequence[Step], party: Party) -> bool:
    """Whether a rank that runs one is, for the party, as one that runs the other."""
    return [step.key for step in view(one, party)] == [step.key for step in view(other, party)]


def digest(steps: Iterable[Step]) -> str:
    """A fingerprint of the steps' keys, in order."""
    return hashlib.sha256("\n".join(step.key for step in steps).encode()).hexdigest()[:32]


def steps_to_notice(steps: Iterable[Step]) -> list[Any]:
    """Steps as a witness posts them."""
    return [[step.key, _text(step), step.found.node, step.found.source] for step in steps]


def steps_from_notice(notice: Iterable[Any]) -> tuple[Shown, ...]:
    """The steps that a witness posted."""
    return tuple(Shown(*fields) for fields in notice)


def describe_difference(sides: Mapping[int, Sequence[Shown]]) -> str:
    """The first step at which two ranks part, with each side's collective and source line."""
    (one, left), (two, right) = sides.items()
    first = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a.key != b.key),
        min(len(left), len(right)),
    )
    lines = [f"they part at collective {first + 1}"]
    if first:
        lines[0] += f", after {left[first - 1].text}"
    lines += [_side(one, left, first), _side(two, right, first)]
    return "\n".join(lines)


def _side(rank: int, steps: Sequence[Shown], at: int) -> str:
    if at == len(steps):
        return f"  rank {rank} runs none: its sequence ends after {len(steps)}"
    step = steps[at]
    place = f"\n         at {step.source}" if step.source else ""
    return f"  rank {rank} runs {step.text} (node {step.node}){place}"


def _text(step: Step) -> str:
    found, group = step.found, step.group
    reduction = f" {found.reduce_op}" if found.reduce_op else ""
    which = f", their group {group.ordinal + 1}" if group.ordinal else ""
    return (
        f"{found.op}{reduction} of {found.numel:,} {found.dtype} ({found.num_bytes:,} bytes) "
        f"over {spell(group.party)}{which}"
    )


def _common(a: Party, b: Party) -> Party:
    return tuple(sorted(set(a) & set(b)))
