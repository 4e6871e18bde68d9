"""Ranks agree before they run, fail together, and name a rank that is lost.

In the order of a compiled function's life:

- `failing_together` surrounds the compilation: a rank that cannot compile posts that, and its peers raise at
  once instead of waiting for it; or, with `Settings(unsupported="eager")`, they run that kind of call
  eagerly, as it does itself.
- `agree` comes before the first run: the ranks of each process group compare the collectives that they are
  about to run. A difference raises `RankDivergence` on every rank, never a hang. What they agreed on for an
  earlier call, a rank may run again without the others. `agreeing_on_backwards` does the same for backwards
  that are compiled on demand.
- `checks_of` gives the comparison before each run, which a `LossWatch` surrounds: when a collective breaks
  because a peer died, the survivors raise `RankLost` with its number.
- `board_of_this_process` is also used by reports, to compare ranks.

All messages go through the store in which the ranks met (`board.py`), never through a process group: a group
whose ranks have diverged could only hang.
"""

from aotdist.runtime.ranks.agreement import agree
from aotdist.runtime.ranks.board import board_of_this_process, poll
from aotdist.runtime.ranks.failing import failing_together, present
from aotdist.runtime.ranks.fingerprint import (
    agreeing_on_backwards,
    checks_of,
    fingerprint_of,
    fingerprint_of_state,
    number_of_its_kind,
)
from aotdist.runtime.ranks.loss import LossWatch
from aotdist.runtime.ranks.runs import RunCheck
from aotdist.runtime.ranks.sequence import Sequenced

__all__ = [
    "LossWatch",
    "RunCheck",
    "Sequenced",
    "agree",
    "agreeing_on_backwards",
    "board_of_this_process",
    "checks_of",
    "failing_together",
    "fingerprint_of",
    "fingerprint_of_state",
    "number_of_its_kind",
    "poll",
    "present",
]
