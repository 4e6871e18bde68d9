"""What the table of differences consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["fx", "inductor", "eager"]
Odd = Literal["one", "none", "all"]
"""Which ranks do what the scenario says: one of them, or, for comparison, none or all."""

Kind = Literal["runs", "differs", "leaves", "absent"]
"""How a scenario has to end.

- `runs`: ranks may differ in this; every rank computes what it does in eager.
- `differs`: the ranks would run different programs, and are told.
- `leaves`: the odd rank raises or dies, and the others are told.
- `absent`: the odd rank lives and does not come, or waits elsewhere. Before the timeouts nobody can tell that
  from a slow one.
"""

StoreHost = Literal["rank 0", "launcher"]

TIMEOUT_S, PATIENT_S = 20.0, 120.0
"""Of process groups and `rank_timeout_s`, also in eager; `inductor` may take a minute to compile."""


def timeout_s(way: Way) -> float:
    """After how many seconds ranks no longer wait for each other."""
    return PATIENT_S if way == "inductor" else TIMEOUT_S


def deadline_s(way: Way) -> float:
    """After how many seconds what has not ended is a hang."""
    return 3.5 * timeout_s(way)


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of one rank.

    Args:
        end: `finished`, the class of what it raised, the signal that ended its process, an exit code, `hang`,
            or `absent` for a rank that was not waited for.
        said: the first line of what it raised.
        seconds: from the beginning of its last step to its end.
        num_steps: how many steps it finished.
        silent: the first value that is not what this rank by itself would compute; empty if there is none.
    """

    end: str
    said: str = ""
    seconds: float = 0.0
    num_steps: int = 0
    silent: str = ""

    @property
    def was_ended(self) -> bool:
        """Whether a signal ended the process."""
        return self.end.startswith("SIG")


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario in one way, beside eager.

    Args:
        scenario: its name.
        way: which backend.
        ours: by rank, compiled by aotdist.
        eager: by rank, with FSDP2 as it is.
    """

    scenario: str
    way: Way
    ours: tuple[Seen, ...]
    eager: tuple[Seen, ...]
