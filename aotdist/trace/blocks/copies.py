"""Which calls of modules were copied rather than traced; and why others were traced."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copies:
    """Which calls of modules were copied, and which were not.

    Args:
        instances: the path of each module that was called, with that of the one whose call was recorded.
        reasons: why calls of other modules were traced, by path.
    """

    instances: Sequence[tuple[str, str]]
    reasons: Mapping[str, str]

    def by_model(self) -> Mapping[str, int]:
        """For each module that was recorded, how many calls of others were copied of it."""
        return Counter(model for _, model in self.instances)

    def traced(self) -> Mapping[tuple[str, str], int]:
        """How many calls were traced, by path (with `*` for numbers) and reason, without those in others."""
        counts = Counter((_NUMBER.sub("*", path), why) for path, why in self.reasons.items())
        several = {named: count for named, count in counts.items() if count > 1}
        paths = {path for path, _ in several} | {_NUMBER.sub("*", path) for path, _ in self.instances}
        within = tuple(f"{path}." for path in paths if path)
        return {named: count for named, count in several.items() if not named[0].startswith(within)}


NO_COPIES = Copies((), {})
_NUMBER = re.compile(r"\d+")
