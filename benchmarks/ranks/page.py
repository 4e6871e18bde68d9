"""`docs/ranks.md`: what was seen, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.ranks.record import Rows
from benchmarks.ranks.scenarios import SCENARIOS, Scenario
from benchmarks.ranks.vocabulary import PATIENT_S, TIMEOUT_S, Row, Seen, Way, deadline_s, timeout_s
from benchmarks.record import ROOT
from benchmarks.tables import header, row

PAGE = ROOT.parent / "docs" / "ranks.md"

_HEAD = f"""# When ranks differ

Ranks that run different collectives hang, abort, or mix values of different steps. Ranks that aotdist has
compiled compare what they are about to run before they communicate, through the store that they met in: a
difference is `RankDivergence` on every rank, and a rank that is gone is `RankLost` on the others.
[design.md](design.md#ranks) says how, and [troubleshooting.md](troubleshooting.md) what to do.

This page has {{number}} ways in which ranks differ: what each rank sees, and after how many seconds, beside
eager FSDP2. `make ranks` runs them, in half an hour, and writes the page from
`benchmarks/results/differences.json`; do not edit. `make ranks ARGS="--scenarios killed barrier"` runs those
anew whose names have one of the words in them. Each is a function in `benchmarks/ranks/scenarios/`.

- **One rank does otherwise** what the first column says: rank 1 of 2, where no other is named. Every rank is
  a process of its own, on gloo; rank 0 hosts the store, unless the launcher is said to. Most models have two
  layers of 8 by 8, each a unit of FSDP2. Nobody catches errors: they end the process, as in a script.
- **aotdist** is `aotdist.compile(model, backend="fx")`, or another backend where one is named; **eager** is
  the same program with FSDP2 as it is. Each has a column for what **the others** see (of several, the last
  one to see it, and one that sees something else) and one for **that rank**.
- **ok**: the rank finishes, and the loss of each step, and the sum of its weights after it, are what this
  rank by itself would compute: its values in eager where all ranks do as it does, or, where eager can run
  ranks that differ so, its values there. With `fx` they are equal bit for bit, with `inductor` within 1e-4.
- **a class of error, and seconds**: what it raised, and the time since its last step began; a first step
  includes compiling, on a machine that had other work, too. Steps before are held to the same values.
- **other values**: it goes on, and its values are others. **abort**: a signal ended its process that it did
  not send itself. **hang**: it did not end within {deadline_s("fx"):g} s. **-**: it is still where it was.
- Process groups, and `rank_timeout_s`, have {TIMEOUT_S:g} s here, and {PATIENT_S:g} s with `inductor`, which
  compiles for long on a busy machine: what takes as long waits for them. By default groups have 30 minutes
  with gloo and 10 with NCCL, and `rank_timeout_s` is 300 s.
"""

_NOT_NOTICED = """## What is not noticed

Programs that communicate alike are alike to their peers, whatever their numbers mean. In eager and compiled,
values are mixed without an error where ranks

- sum two activations of one size in the other order, in one program or in two that have no parameters: what
  is sent has no name, and a rank that takes another line for its part of one sum (`if rank == 0: ... else:
  ...`) is right to do so;
- take two axes of a mesh in the other order, where no two ranks share both: each pair of ranks does the same;
- leave a whole step out: the next batch meets the one before it on the others.

A rank that dies before it calls `aotdist.compile` is known by its connection, which gloo sees close, within
three seconds. A default group of NCCL alone has none to ask: the others wait for `rank_timeout_s` (300 s).
One that dies before `init_process_group` leaves the others there. Under `torchrun` the launcher ends them.
"""

_IN_SHORT = "Rows by the worst that a rank sees which did not leave by itself; ours with those of `inductor`."

_SAID = "In one line each; the whole message has the source lines of both sides, and a way out."


def page(rows: Rows) -> str:
    """The whole page."""
    found = [each for name in SCENARIOS for each in rows.rows if each.scenario == name]
    circumstances = ", ".join(f"{key} {value}" for key, value in {**rows.versions, **rows.machine}.items())
    number = len({each.scenario for each in found})
    lines = [_HEAD.format(number=number), f"{rows.date}; {circumstances}."]
    lines += ["", "## In short", "", _IN_SHORT, "", *_summary(found)]
    for chapter in dict.fromkeys(scenario.chapter for scenario in SCENARIOS.values()):
        lines += ["", f"## {chapter}", ""]
        lines += _table([each for each in found if SCENARIOS[each.scenario].chapter == chapter])
    lines += ["", _NOT_NOTICED, "## What they say", "", _SAID, "", *_said(found)]
    return "\n".join(lines) + "\n"


def _summary(found: Sequence[Row]) -> Iterator[str]:
    """How many rows end how: a row counts once, as the worst that a rank sees."""
    yield from header("the worst that a rank sees", "aotdist", "eager")
    ours = [_worst(SCENARIOS[each.scenario], each.ours, each.way) for each in found]
    eager = [_worst(SCENARIOS[each.scenario], each.eager, "eager") for each in found if each.way == "fx"]
    for kind in _WORSE:
        yield row(kind, str(ours.count(kind)), str(eager.count(kind)))


_WORSE = (
    "ok",
    "an error within seconds",
    "an error after the timeout",
    "abort",
    "hang",
    "other values",
)


def _worst(scenario: Scenario, ranks: Sequence[Seen], way: Way) -> str:
    own = scenario.odd_rank if scenario.kind in ("leaves", "absent") else None
    return max((_kind(seen, way) for rank, seen in enumerate(ranks) if rank != own), key=_WORSE.index)


def _kind(seen: Seen, way: Way) -> str:
    if seen.silent:
        return "other values"
    if seen.end in ("finished", "absent"):
        return "ok"
    if seen.end == "hang":
        return "hang"
    if seen.was_ended:
        return "abort"
    return _WORSE[2 if seen.seconds >= timeout_s(way) - 1 else 1]


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield from header("", "aotdist: the others", "that rank", "eager: the others", "that rank")
    for each in rows:
        scenario = SCENARIOS[each.scenario]
        name = scenario.name if each.way == "fx" else f"{scenario.name} (`{each.way}`)"
        cells = [cell for ranks in (each.ours, each.eager) for cell in _cells(scenario, ranks)]
        yield row(name, *cells)


def _cells(scenario: Scenario, ranks: Sequence[Seen]) -> tuple[str, str]:
    others = [seen for rank, seen in enumerate(ranks) if rank != scenario.odd_rank]
    slowest = sorted(others, key=lambda seen: seen.seconds)
    by_end = {(seen.end, bool(seen.silent)): seen for seen in slowest}
    odd = ranks[scenario.odd_rank]
    return "; ".join(map(_cell, by_end.values())), _cell(odd, own_signal=scenario.killed_by)


def _cell(seen: Seen, own_signal: str = "") -> str:
    if seen.silent:
        return f"**other values** ({seen.silent})"
    match seen.end:
        case "finished":
            return "ok"
        case "absent":
            return "-"
        case "hang":
            return "**hang**"
        case end if seen.was_ended and end != own_signal:
            return f"**abort** ({end}), {seen.seconds:.1f} s"
        case end:
            return f"{end}, {seen.seconds:.1f} s"


def _said(found: Sequence[Row]) -> Iterator[str]:
    for each in found:
        if each.way != "fx":
            continue
        said = dict.fromkeys(seen.said for seen in each.ours if seen.end.startswith("Rank"))
        for line in said:
            yield f"- {each.scenario}: {_quoted(line)}"


def _quoted(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")
