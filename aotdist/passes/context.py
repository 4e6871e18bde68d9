"""What a graph pass is given beside its graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aotdist.settings import Settings

Stage = Literal["joint", "forward", "backward"]


@dataclass(frozen=True, slots=True)
class PassContext:
    """Where in the pipeline a pass runs, and under which settings.

    Args:
        stage: which graph it is given: `joint` before partitioning, one half after it.
        settings: of this compilation.
    """

    stage: Stage
    settings: Settings
