"""The time that a run may take; what does not fit is left out, and named."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds on a clock that all processes of the machine share.

    Args:
        deadline: when everything must have ended, as `time.monotonic` counts.
    """

    deadline: float

    @classmethod
    def of(cls, seconds: float) -> Budget:
        """A budget that begins now."""
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def holds(self, seconds: float, *, later: float = 0.0) -> bool:
        """Whether something fits.

        Args:
            seconds: that it is expected to take.
            later: what is to be kept for all that must still follow.
        """
        return seconds + later <= self.left()
