"""How ranks agree on what they are about to run; two levels, so that 1,000 ranks cost a rank O(1).

Each party (`sequence.py`) meets at a *table*, and its lowest rank leads::

    every rank   posts its entry: the digests of its views, for this party and for those within it
    the leader   collects the entries, compares them, and settles the verdict:
                   agreed | Differ (and which two ranks must show their steps) | Refused (and why)
    every rank   reads the verdict; on Differ the two witnesses post their steps, and all read them

The first verdict that is written counts. So a rank that has to give up (a peer failed, died or never came)
refuses on behalf of the whole table, and no rank is left waiting. One loop serves all tables of a rank, so no
table waits for another.

If a rank gives up at one table, its other tables must not run without it. So there are as many *rounds* as a
rank of the table has tables that are in no other (two for a 2-D mesh): each round carries a refusal one table
further, which covers a mesh of that many axes.

A rank does not meet its party for what the party agreed on before: a smaller last batch makes one rank
compile while its peers run what they have, as in eager.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aotdist.errors import AotdistError, RankDivergence, UnsupportedProgram
from aotdist.runtime.ranks.board import (
    Board,
    Party,
    StoreGone,
    board_of_this_process,
    party_key,
    poll,
    spell,
)
from aotdist.runtime.ranks.failing import (
    deaths_of,
    failures_of,
    farewell,
    last_report,
    refusal_topic,
    report,
)
from aotdist.runtime.ranks.runs import RunCheck
from aotdist.runtime.ranks.sequence import (
    Differ,
    Refused,
    Sequenced,
    Step,
    Verdict,
    describe_difference,
    digest,
    groups_of,
    groups_with_peers,
    judge,
    parties_of,
    runs_alike,
    shown_steps,
    steps_of,
    verdict_from_notice,
    view,
    widest,
)
from aotdist.settings import Settings

log = logging.getLogger(__name__)

_FIRST_DOUBT_S, _LONGEST_DOUBT_S = 0.1, 2.0
"""Seconds between two checks whether peers failed or died: the first, and the limit of its doubling."""

_PROBE_AFTER_S = 1.0
"""Seconds of waiting before peers' processes are probed, which takes a connection to each of them."""

_SAY_SO_S = 10.0
"""Seconds of waiting after which a rank logs for whom it waits."""

_LEADER_FIRST_S = 1.0
"""Seconds that other ranks wait longer than the leader, which knows who is absent."""

_CAUSE_FIRST_S = 2.0
"""Seconds that each later round is waited for longer: absent ranks may be waiting in the round before."""

_SHOW_TIMEOUT_S = 10.0
"""Seconds for the two witnesses to show their steps; they do so as soon as they read the verdict."""

_NAMED = 4
"""How many ranks are named in a message with their last report, or what happened to them."""


def agree(
    sequence: Iterable[Sequenced],
    *,
    label: str,
    settings: Settings,
    groups: Iterable[str] = (),
    earlier: Iterable[Iterable[Sequenced]] = (),
    check: RunCheck | None = None,
    undecided: str | None = None,
) -> None:
    """Compare what this rank is about to run with its peers; return when all are about to run the same.

    It is called once for each artifact, on every rank, before the artifact first runs, even if the sequence
    is empty. A party that agreed on the same for an earlier artifact does not meet again, as one of its
    ranks may be the only one with a call of a new kind. Process groups without peers (of one rank, or fake)
    are ignored.

    A rank whose program uses a group must meet all of that group's ranks. A rank that does not know of the
    group looks like one that is late, so it is named only after the timeout; pass the groups that the
    program *might* use (those of its meshes) to have it named at once.

    Args:
        sequence: what the artifact has in common with its peers', see `fingerprint_of`.
        label: the name of what is compiled.
        settings: `rank_timeout_s` is how long to wait.
        groups: names of process groups to agree in even if the sequence has nothing in them.
        earlier: the sequences of the function's earlier artifacts, on which its ranks agreed.
        check: the check before the first run, which knows of peers that run something else and will not come.
        undecided: the kind of the call, if it is to run eagerly where a peer's is refused.

    Raises:
        UnsupportedProgram: a peer cannot compile its call of the kind `undecided`, and does not come.
        RankDivergence: the ranks would run different programs; the message has the first difference.
        RankLost: a peer failed to compile, died, or did not come within the timeout.
    """
    board = board_of_this_process()
    if board is None:
        return
    found = tuple(sequence)
    held = groups_with_peers()
    used = {*groups, *(name for each in found for name in groups_of(each))}
    steps = steps_of(found, held)
    before = [steps_of(each, held) for each in earlier]
    parties = [
        party
        for party in parties_of(held[name] for name in used if name in held)
        if not any(runs_alike(steps, each, party) for each in before)
    ]
    Meeting(board, label, steps, parties, settings.rank_timeout_s, check, undecided).hold()


@dataclass(slots=True)
class Meeting:
    """One rank's part in one agreement.

    Args:
        board: this rank's access to the notices.
        label: what is to be run, for messages.
        steps: what this rank is about to run.
        parties: the parties that it meets.
        timeout_s: how long it waits for its peers.
        check: knows of peers that run something else instead of coming.
        undecided: the kind of the call, if it runs eagerly where a peer's is refused.

    Attributes:
        places: the key of each party's table; its number counts the party's meetings, the same on all ranks.
        has_said: whether this rank has logged for whom it waits.
    """

    board: Board
    label: str
    steps: tuple[Step, ...]
    parties: Sequence[Party]
    timeout_s: float
    check: RunCheck | None = None
    undecided: str | None = None
    places: dict[Party, str] = field(init=False, default_factory=dict[Party, str])
    has_said: bool = field(init=False, default=False)

    def hold(self) -> None:
        """Meet the parties; see `agree`."""
        board, parties, have_agreed = self.board, self.parties, False
        report(board, f"agreeing on `{self.label}`")
        while not have_agreed:  # a table may have refused another call than this rank's
            self.places = {party: _seat(board, party) for party in parties}
            have_agreed = self._held()
        met = f", agreed over {', '.join(map(spell, parties[:4]))}" if parties else ", which asks nobody"
        report(board, f"running `{self.label}`{met}", has_met=bool(parties))

    def _held(self) -> bool:
        """Whether all tables agreed; if not, one refused another call."""
        rounds, round_no = dict.fromkeys(self.parties, 1), 1
        try:
            while still := [party for party in self.parties if rounds[party] >= round_no]:
                found = self._round(still, round_no)
                rounds |= {party: verdict for party, verdict in found.items() if isinstance(verdict, int)}
                for verdict in found.values():
                    if not isinstance(verdict, int):
                        error = self._break_up(rounds, found, round_no, verdict)
                        if error is None:
                            return False
                        raise error
                round_no += 1
        except BaseException:
            memory = self.board.memory
            memory.failures += 1
            # This rank took part in these tables, so the next refusal there concerns it as well.
            for party in self.parties:
                memory.failures_at[party] = memory.failures
            raise
        return True

    def _round(self, parties: Sequence[Party], round_no: int) -> dict[Party, Verdict]:
        """The verdicts of all tables, or those so far when one is not an agreement."""
        for party in parties:
            self.board.post(self._key(party, round_no, self.board.rank), self._entry(party))
        found: dict[Party, Verdict] = {}
        doubts_at = min(_FIRST_DOUBT_S, self.timeout_s)

        def look(waited: float) -> dict[Party, Verdict] | None:
            nonlocal doubts_at
            in_doubt = waited >= doubts_at
            if in_doubt:
                doubts_at = min(waited + min(waited, _LONGEST_DOUBT_S), max(waited, self.timeout_s))
            for party in [party for party in parties if party not in found]:
                verdict = self._look(party, round_no)
                if verdict is None and in_doubt:
                    reason = self._reason(party, round_no, waited)
                    verdict = None if reason is None else self._settle(party, round_no, reason)
                if verdict is not None:
                    found[party] = verdict
                if not isinstance(verdict, int | None):
                    return found
            return found if len(found) == len(parties) else None

        return poll(look)

    def _entry(self, table: Party) -> Mapping[str, Any]:
        """This rank's entry at a table: digests by party, its number of tables, and the kind of its call."""
        inside = [party for party in self.parties if set(party) <= set(table)]
        return {
            "digests": {party_key(party): digest(view(self.steps, party)) for party in inside},
            "reach": len(widest(self.parties)),
            "undecided": self.undecided,
        }

    def _key(self, party: Party, *parts: object) -> str:
        """The key of a notice of a table: a rank's entry in a round, the verdict, a witness's steps."""
        return "/".join(map(str, (self.places[party], *parts)))

    def _look(self, party: Party, round_no: int) -> Verdict | None:
        """The verdict, if it is settled; the leader settles it as soon as all entries are posted."""
        board = self.board
        verdict = verdict_from_notice(board.read(self._key(party, round_no, "verdict")))
        if verdict is None and party[0] == board.rank:
            keys = [self._key(party, round_no, rank) for rank in party]
            if board.has(keys):
                entries = dict(zip(party, board.read_all(keys), strict=True))
                return self._settle(party, round_no, self._refused_before(entries) or judge(entries))
        return verdict

    def _settle(self, party: Party, round_no: int, verdict: Verdict) -> Verdict:
        """Settle the verdict of a table, unless another rank already has; returns what counts."""
        notice = verdict if isinstance(verdict, int) else asdict(verdict)
        settled = self.board.settle(self._key(party, round_no, "verdict"), notice)
        return verdict_from_notice(settled) or verdict

    def _refused_before(self, entries: Mapping[int, Mapping[str, Any]]) -> Refused | None:
        """The refusal of a call that some ranks have come for, and that others already run eagerly."""
        kinds = {entry["undecided"] for entry in entries.values()}
        if len(kinds) == 1:
            return None
        refusals = (self._unsupported(tuple(entries), kind) for kind in sorted(kinds - {None}, key=str))
        return next((refused for refused in refusals if refused is not None), None)

    def _unsupported(self, ranks: Sequence[int], kind: str | None) -> Refused | None:
        """The refusal of a call of this kind by one of the ranks, which runs it eagerly."""
        reasons = {} if kind is None else self.board.said(refusal_topic(kind), ranks)
        fix = "what that rank says has the way out"
        return Refused("unsupported", next(iter(reasons.values())), fix, kind) if reasons else None

    def _reason(self, party: Party, round_no: int, waited: float) -> Refused | None:
        """The reason to refuse on behalf of the table, if there is one.

        A peer runs this rank's call eagerly, or runs something else, so it will not come; or it failed,
        died or is too late. The leader watches all ranks, and the others watch the leader. Of these only
        the deputy probes its process, since a port that nobody serves answers a limited number of probes.
        These two log.
        """
        board, (leader, deputy, *_) = self.board, party
        leads = board.rank == leader
        fault = None if self.check is None else self.check.fault()
        if self.undecided is not None:
            # Who is known to run something else may do so in such a call.
            around = [*(party if leads else [leader]), *([] if fault is None else [fault.peer])]
            if (refused := self._unsupported(around, self.undecided)) is not None:
                return refused
        if self.check is not None and fault is not None and fault.peer in self._absent(party, round_no):
            error = self.check.gives_up(fault)
            return Refused("diverged", error.what, error.fix or "")
        grace = _CAUSE_FIRST_S * (round_no - 1) + (0 if leads else _LEADER_FIRST_S)
        if waited >= self.timeout_s + grace:
            return self._too_late(self._absent(party, round_no) or [leader])
        suspects = self._absent(party, round_no) if leads else [leader]
        reasons = failures_of(board, suspects)
        if not reasons and waited > _PROBE_AFTER_S and board.rank in (leader, deputy):
            reasons = deaths_of(board, suspects, [rank for rank in party if rank not in suspects])
            if waited > _SAY_SO_S and not self.has_said and (absent := self._absent(party, round_no)):
                self.has_said = True
                doing = self._doing(absent)
                log.warning("waiting for %s to agree on `%s` (%s)", spell(absent), self.label, doing)
        if not reasons:
            return None
        fix = f"see what {spell(reasons)} printed; `{self.label}` stops here so as not to wait for ever"
        return Refused("lost", "; ".join(list(reasons.values())[:_NAMED]), fix)

    def _absent(self, party: Party, round_no: int) -> list[int]:
        return [rank for rank in party if not self.board.has([self._key(party, round_no, rank)])]

    def _too_late(self, absent: Sequence[int]) -> Refused:
        return Refused(
            "lost",
            f"{spell(absent)} did not come to agree on `{self.label}` within {self.timeout_s:g} s "
            f"({self._doing(absent)})",
            "find out where it is (`py-spy dump` shows a hanging Python process), or raise "
            "`settings.rank_timeout_s` if it compiles for longer than the others; if it "
            "has other collectives than its peers from this call on, give all the same modules and flags",
        )

    def _doing(self, ranks: Sequence[int]) -> str:
        return "; ".join(last_report(self.board, rank) for rank in ranks[:_NAMED])

    def _break_up(
        self,
        rounds: Mapping[Party, int],
        found: Mapping[Party, Verdict],
        round_no: int,
        cause: Differ | Refused,
    ) -> AotdistError | None:
        """Refuse at all other tables; returns the error to raise, or None if the refusal is of another call.

        Each table then has this rank's refusal or a verdict that this rank has read, so no table can call it
        as a witness after it has left.
        """
        refusal = cause.refusal(self.label) if isinstance(cause, Differ) else cause
        final = dict[Party, Verdict | None](dict.fromkeys(self.parties)) | dict(found)
        for party, verdict in final.items():
            left = rounds[party]
            if verdict is None and round_no <= left:
                verdict = self._settle(party, round_no, refusal)
                left = verdict if isinstance(verdict, int) else left
            if isinstance(verdict, int) and round_no < left:
                verdict = self._settle(party, round_no + 1, refusal)
            final[party] = verdict
        error = self._error(final)
        if error is None or isinstance(error, UnsupportedProgram):
            return error  # no rank leaves: all go on, those with this call eagerly
        with contextlib.suppress(StoreGone):
            farewell(self.board, itertools.chain(*self.parties))
        return error

    def _error(self, final: Mapping[Party, Verdict | None]) -> AotdistError | None:
        """The error to raise: preferably a difference at one of this rank's tables, rather than a refusal."""
        board = self.board
        differing = {party: verdict for party, verdict in final.items() if isinstance(verdict, Differ)}
        for party, verdict in differing.items():
            if board.rank in verdict.witnesses():
                own = shown_steps(view(self.steps, tuple(verdict.party)))
                board.post(self._key(party, "steps", board.rank), own)
        for party, verdict in differing.items():
            return self._divergence(party, verdict)
        refusals = [verdict for verdict in final.values() if isinstance(verdict, Refused)]
        # Errors come first, then refusals of this call.
        refused = min(refusals, key=lambda one: (one.kind == "unsupported", one.call != self.undecided))
        is_another = refused.kind == "unsupported" and refused.call != self.undecided
        return None if is_another else refused.error()

    def _divergence(self, party: Party, verdict: Differ) -> RankDivergence:
        board, witnesses = self.board, verdict.witnesses()
        keys = [self._key(party, "steps", rank) for rank in witnesses]
        have_shown = poll(lambda waited: board.has(keys) or (False if waited > _SHOW_TIMEOUT_S else None))
        details = "a rank left before it showed its collectives"
        if have_shown:
            details = describe_difference(dict(zip(witnesses, board.read_all(keys), strict=True)))
        return RankDivergence(
            f"{verdict.summary(self.label)}: {details}",
            stage="runtime",
            fix="give every rank the same model, arguments' shapes and dtypes, and order of calls; "
            "a branch on the rank number, or parameters in the order of a set, are the usual causes",
        )


def _seat(board: Board, party: Party) -> str:
    """The key of this rank's next table with the party.

    If this rank failed since their last meeting, the others gave up on it at a table to which it never
    came. It skips that one, so that all meet at the same table again.
    """
    memory, key = board.memory, party_key(party)
    missed = memory.failures - memory.failures_at[party]  # at most: they need not have met each time
    memory.failures_at[party] = memory.failures
    while True:
        place = f"tables/{key}/{board.count(f'seats/{key}/{board.rank}')}"
        if missed == 0 or not isinstance(verdict_from_notice(board.read(f"{place}/1/verdict")), Refused):
            return place
        missed -= 1
