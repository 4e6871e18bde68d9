"""How ranks agree on what they are about to run; two levels, so that 1,000 ranks cost a rank O(1).

Each party (`sequence.py`) sits at a *table*, and its lowest rank leads::

    every rank   lays its entry: the digests of its views, for this party and for those within it
    the leader   gathers the entries, compares, and settles the verdict:
                   Agreed | Differ (and which two ranks must show their steps) | Refused (and why)
    every rank   reads the verdict; on Differ the two witnesses post their steps and all read them

A verdict is settled by whoever writes first, so a rank that must give up (a peer failed, died or
never came) refuses on behalf of the whole table, and nobody is left behind. Nobody blocks on one
table while another needs it: one loop serves all the tables of a rank.

A rank that gives up at one table must not leave the others of its tables to run without it. So there
are as many *rounds* as a rank of the table has tables that stand in no other (two for a 2-D mesh):
each round carries a refusal one table further, which covers a mesh of that many axes.

A rank need not come to a table with what its party agreed on before: a smaller last batch on one rank
makes that rank compile, while its peers run what they have, and eager would go on as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from aotdist.errors import AotdistError, RankDivergence, RankLost, UnsupportedProgram
from aotdist.runtime.ranks.board import (
    Board,
    Party,
    StoreGone,
    board_of_this_process,
    party_key,
    poll,
    spell,
)
from aotdist.runtime.ranks.failing import farewell, refusal_topic, report
from aotdist.runtime.ranks.runs import RunCheck
from aotdist.runtime.ranks.sequence import (
    Sequenced,
    Step,
    describe_difference,
    digest,
    groups_of,
    groups_with_peers,
    parties_of,
    runs_alike,
    steps_from_notice,
    steps_of,
    steps_to_notice,
    view,
    widest,
)
from aotdist.runtime.ranks.verdict import (
    Agreed,
    Differ,
    Entry,
    Patience,
    Refused,
    Verdict,
    judge,
    verdict_from_notice,
    verdict_to_notice,
)
from aotdist.settings import Settings

_SHOW_TIMEOUT_S = 10.0
"""Seconds for the two witnesses to show their steps; they do so as soon as they read the verdict."""


class _OfAnotherCall(Exception):
    """What was refused at a table is another call than the one that this rank came for."""


@dataclass(frozen=True, slots=True)
class Table:
    """One meeting of one party: where its notices hang.

    Args:
        party: who sits here.
        place: key of the table; its number counts the party's meetings, alike on all of its ranks.
    """

    party: Party
    place: str

    def entry(self, round_no: int, rank: int) -> str:
        """Where a rank lays its entry."""
        return f"{self.place}/{round_no}/{rank}"

    def verdict(self, round_no: int) -> str:
        """Where the verdict of a round hangs."""
        return f"{self.place}/{round_no}/verdict"

    def steps(self, rank: int) -> str:
        """Where a witness shows its steps."""
        return f"{self.place}/steps/{rank}"


@dataclass(frozen=True, slots=True)
class Meeting:
    """One rank's part in one agreement.

    Args:
        board: this rank's view of the notices.
        label: what is to be run, for messages.
        steps: what this rank is about to run.
        parties: with whom.
        timeout_s: how long it waits for its peers.
        check: knows what peers run instead of coming, if they do.
        undecided: the kind of the call, if it runs as it was written where a peer's is refused.
        tables: where it sits: one for each of its parties.
    """

    board: Board
    label: str
    steps: tuple[Step, ...]
    parties: Sequence[Party]
    timeout_s: float
    check: RunCheck | None = None
    undecided: str | None = None
    tables: tuple[Table, ...] = ()


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

    Call it once for each artifact, on every rank, before the artifact first runs, also when the
    sequence is empty. A party that agreed on the same for an earlier artifact does not meet again: any of
    its ranks may be alone with a call of a new kind. Process groups without peers (of one rank, or
    fake) take no part.

    A rank whose program uses a group must meet all of that group's ranks. One that does not even know
    of the group cannot be told from one that is late, so it is named only after the timeout; give the
    groups that the program *might* use (those of its meshes) to have it named at once.

    Args:
        sequence: what the artifact has in common with its peers', see `fingerprint_of`.
        label: what is compiled, as the user knows it.
        settings: `rank_timeout_s` is how long to wait.
        groups: names of process groups to agree in even if the sequence has nothing in them.
        earlier: the sequences of the function's earlier artifacts, on which its ranks agreed.
        check: what stands before the first run: peers that run something else instead will not come.
        undecided: the kind of the call, if it is to run as it was written where a peer's is refused.

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
    check = check if parties else None
    meet(Meeting(board, label, steps, parties, settings.rank_timeout_s, check, undecided))


def meet(meeting: Meeting) -> None:
    """`agree` for a rank whose board, steps and parties are known."""
    board, label, parties, rounds = meeting.board, meeting.label, meeting.parties, None
    report(board, f"agreeing on `{label}`")
    while rounds is None:
        rounds = _held(replace(meeting, tables=tuple(_take_seat(board, party) for party in parties)))
    for table, num_rounds in rounds.items():
        _clear_before(board, table, num_rounds)
    met = f", agreed over {', '.join(map(spell, parties[:4]))}" if parties else ", which asks nobody"
    report(board, f"running `{label}`{met}", has_met=bool(parties))


def _held(meeting: Meeting) -> dict[Table, int] | None:
    """The number of rounds that each table held; None where another call was refused there."""
    # Of what may yet run as it was written nothing is announced: a peer may run other programs in it.
    if meeting.check is not None and meeting.undecided is None:
        meeting.check.announce()
    try:
        return _hold(meeting)
    except _OfAnotherCall:
        return None
    except BaseException:
        memory = meeting.board.memory
        memory.failures += 1
        # This rank came to these tables: at its next, a refusal is meant for it too.
        for table in meeting.tables:
            memory.failures_at[table.party] = memory.failures
        raise


def _take_seat(board: Board, party: Party) -> Table:
    """This rank's next table with the party.

    A rank that failed since its last meeting with them never came to the table at which they gave up
    on it; it passes that one by, so that all meet at the same table again.
    """
    memory, key = board.memory, party_key(party)
    missed = memory.failures - memory.failures_at[party]  # at most: they may not have met each time
    memory.failures_at[party] = memory.failures
    while True:
        table = Table(party, f"tables/{key}/{board.count(f'seats/{key}/{board.rank}')}")
        if missed == 0 or not _was_refused(board, table):
            return table
        missed -= 1


def _was_refused(board: Board, table: Table) -> bool:
    notice = board.read(table.verdict(1))
    return notice is not None and isinstance(verdict_from_notice(notice), Refused)


def _hold(meeting: Meeting) -> dict[Table, int]:
    """Every round of every table; the number of rounds that each held."""
    entries = {table: _entry(meeting, table) for table in meeting.tables}
    rounds = dict.fromkeys(meeting.tables, 1)
    round_no = 1
    while still := [table for table in meeting.tables if rounds[table] >= round_no]:
        found = _hold_round(meeting, {table: entries[table] for table in still}, round_no)
        rounds |= {table: verdict.rounds for table, verdict in found.items() if isinstance(verdict, Agreed)}
        for verdict in found.values():
            if not isinstance(verdict, Agreed):
                raise _break_up(meeting, rounds, found, round_no, verdict)
        round_no += 1
    return rounds


def _hold_round(meeting: Meeting, entries: Mapping[Table, Entry], round_no: int) -> dict[Table, Verdict]:
    """The verdicts of all tables, or those up to the first that is not `Agreed`."""
    for table, entry in entries.items():
        meeting.board.post(table.entry(round_no, meeting.board.rank), entry)
    found: dict[Table, Verdict] = {}
    patience = Patience(meeting.board, meeting.label, meeting.timeout_s)

    def look(waited: float) -> dict[Table, Verdict] | None:
        doubting = patience.doubts(waited)
        for table in [table for table in entries if table not in found]:
            verdict = _look(meeting.board, table, round_no)
            if verdict is None and doubting:
                reason = _refused_by_a_peer(meeting, table) or _gone_another_way(meeting, table, round_no)
                reason = reason or _lose_patience(patience, table, round_no, waited)
                verdict = None if reason is None else _settle(meeting.board, table, round_no, reason)
            if verdict is not None:
                found[table] = verdict
            if not isinstance(verdict, Agreed | None):
                return found
        return found if len(found) == len(entries) else None

    return poll(look)


def _entry(meeting: Meeting, table: Table) -> Entry:
    inside = [party for party in meeting.parties if set(party) <= set(table.party)]
    return {
        "digests": {party_key(party): digest(view(meeting.steps, party)) for party in inside},
        "reach": len(widest(meeting.parties)),
        "undecided": meeting.undecided,
    }


def _look(board: Board, table: Table, round_no: int) -> Verdict | None:
    """The verdict, if it is settled; the leader settles it as soon as all entries lie there."""
    notice = board.read(table.verdict(round_no))
    if notice is None and table.party[0] == board.rank:
        keys = [table.entry(round_no, rank) for rank in table.party]
        if board.has(keys):
            entries = dict(zip(table.party, board.read_all(keys), strict=True))
            verdict = _refused_before(board, table, entries) or judge(entries)
            return _settle(board, table, round_no, verdict)
    return None if notice is None else verdict_from_notice(notice)


def _settle(board: Board, table: Table, round_no: int, verdict: Verdict) -> Verdict:
    """The verdict of a table, which is this one unless there is one by now."""
    return verdict_from_notice(board.settle(table.verdict(round_no), verdict_to_notice(verdict)))


def _refused_before(board: Board, table: Table, entries: Mapping[int, Entry]) -> Refused | None:
    """Refuse the call that some have come for when others were refused it, and are at a later one."""
    kinds = {entry["undecided"] for entry in entries.values()}
    if len(kinds) == 1:
        return None
    refusals = (_unsupported(board, table.party, kind) for kind in sorted(kinds - {None}, key=str))
    return next((refused for refused in refusals if refused is not None), None)


def _unsupported(board: Board, ranks: Sequence[int], kind: str | None) -> Refused | None:
    """The refusal of a call of this kind by one of the ranks, which runs it as it was written."""
    reasons = {} if kind is None else board.said(refusal_topic(kind), ranks)
    fix = "what that rank says has the way out"
    return Refused("unsupported", next(iter(reasons.values())), fix, kind) if reasons else None


def _refused_by_a_peer(meeting: Meeting, table: Table) -> Refused | None:
    """Why to refuse on behalf of the table when a peer runs its call as it was written: it will not come.

    The leader looks for all; a peer that is known to run something else may do so in such a call.
    """
    if meeting.undecided is None:
        return None
    fault = None if meeting.check is None else meeting.check.fault()
    leads = table.party[0] == meeting.board.rank
    suspects = [*(table.party if leads else table.party[:1]), *([] if fault is None else [fault.peer])]
    return _unsupported(meeting.board, suspects, meeting.undecided)


def _gone_another_way(meeting: Meeting, table: Table, round_no: int) -> Refused | None:
    """Why to refuse on behalf of the table when a peer runs something else, so that it will not come."""
    board, check = meeting.board, meeting.check
    fault = None if check is None else check.fault()
    if check is None or fault is None or fault.peer not in table.party:
        return None
    if board.has([table.entry(round_no, fault.peer)]):
        return None  # it has come, and the table finds out what differs
    error = check.gives_up(fault)
    return Refused("diverged", error.what, error.fix or "")


def _lose_patience(patience: Patience, table: Table, round_no: int, waited: float) -> Refused | None:
    """Why to refuse on behalf of the table when a peer failed, died or is too late."""
    entries = {rank: table.entry(round_no, rank) for rank in table.party}
    return patience.refusal(entries, waited, round_no)


def _break_up(
    meeting: Meeting,
    rounds: Mapping[Table, int],
    found: Mapping[Table, Verdict],
    round_no: int,
    cause: Differ | Refused,
) -> AotdistError | _OfAnotherCall:
    """Tell every other table that this rank does not go on; what it raises.

    Each table ends up with this rank's refusal or with a verdict that this rank has read, so no
    table can call this rank as a witness after it has left.
    """
    if meeting.check is not None:
        meeting.check.retract()
    board, refusal = meeting.board, _as_refusal(cause, meeting.label)
    final = {table: found.get(table) for table in meeting.tables}
    for table, verdict in final.items():
        left = rounds[table]
        if verdict is None and round_no <= left:
            verdict = _settle(board, table, round_no, refusal)
            left = verdict.rounds if isinstance(verdict, Agreed) else left
        if isinstance(verdict, Agreed) and round_no < left:
            verdict = _settle(board, table, round_no + 1, refusal)
        final[table] = verdict
        _keep_for_later(board, table, round_no + 1)
    error = _error(meeting, final)
    if not isinstance(error, AotdistError) or isinstance(error, UnsupportedProgram):
        return error  # nobody leaves: all go on, those whose call this was as it was written
    with contextlib.suppress(StoreGone):
        farewell(board, _to_hear(meeting, error, round_no))
    return error


def _to_hear(meeting: Meeting, error: AotdistError, round_no: int) -> set[int]:
    """Peers that are to hear of an error before the store is gone: of a loss, those that have come."""
    seats = [(table, rank) for table in meeting.tables for rank in table.party]
    if isinstance(error, RankDivergence):
        return {rank for _, rank in seats}
    return {rank for table, rank in seats if meeting.board.has([table.entry(round_no, rank)])}


def _as_refusal(verdict: Differ | Refused, label: str) -> Refused:
    if isinstance(verdict, Refused):
        return verdict
    one, two = verdict.witnesses
    return Refused(
        "diverged", verdict.summary(label), f"the errors of ranks {one} and {two} have the details"
    )


def _error(meeting: Meeting, final: Mapping[Table, Verdict | None]) -> AotdistError | _OfAnotherCall:
    """What this rank raises: a difference at a table of its own rather than one that it heard of."""
    differing = {table: verdict for table, verdict in final.items() if isinstance(verdict, Differ)}
    for table, verdict in differing.items():
        if meeting.board.rank in verdict.witnesses:
            shown = steps_to_notice(view(meeting.steps, verdict.party))
            meeting.board.post(table.steps(meeting.board.rank), shown)
    for table, verdict in differing.items():
        return _divergence(meeting, table, verdict)
    refusals = [verdict for verdict in final.values() if isinstance(verdict, Refused)]
    # An error goes first, then what was refused of this call.
    refused = min(refusals, key=lambda one: (one.kind == "unsupported", one.call != meeting.undecided))
    if refused.kind == "unsupported" and refused.call != meeting.undecided:
        return _OfAnotherCall()
    kinds = {"diverged": RankDivergence, "lost": RankLost, "unsupported": UnsupportedProgram}
    return kinds[refused.kind](refused.what, stage="runtime", fix=refused.fix)


def _divergence(meeting: Meeting, table: Table, verdict: Differ) -> RankDivergence:
    keys = [table.steps(rank) for rank in verdict.witnesses]
    board = meeting.board
    shown = poll(lambda waited: board.has(keys) or (False if waited > _SHOW_TIMEOUT_S else None))
    details = "a rank left before it showed its collectives"
    if shown:
        sides = [steps_from_notice(notice) for notice in board.read_all(keys)]
        details = describe_difference(dict(zip(verdict.witnesses, sides, strict=True)))
    return RankDivergence(
        f"{verdict.summary(meeting.label)}: {details}",
        stage="runtime",
        fix="give every rank the same model, arguments' shapes and dtypes, and order of calls; "
        "a branch on the rank number, or parameters in the order of a set, are the usual causes",
    )


def _clear_before(board: Board, table: Table, num_rounds: int) -> None:
    """After an agreement: everyone has left the tables before this one, so their notices can go."""
    board.erase(board.memory.worn.pop(table.party, ()))
    _keep_for_later(board, table, num_rounds)


def _keep_for_later(board: Board, table: Table, num_rounds: int) -> None:
    """The notices of this table must hang until its ranks have read them: note what to take down."""
    rounds = range(1, num_rounds + 1)
    worn = board.memory.worn.setdefault(table.party, [])
    worn += [table.entry(round_no, board.rank) for round_no in rounds]
    worn.append(table.steps(board.rank))
    if table.party[0] == board.rank:
        worn += [table.verdict(round_no) for round_no in rounds]
