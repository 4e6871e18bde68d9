"""What a bench consists of, and how much of it to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import LlamaShape
from benchmarks.timing import Series


@dataclass(frozen=True, slots=True)
class Effort:
    """Handed to every bench.

    Args:
        quick: seconds instead of minutes: a model of one small layer, few rounds. Quick numbers
            show that the benches run; nothing else should be read into them.
        caches: folder that `step` and `memory` share, so that what one compiled the other finds.
            `compile` and `cache` never look at it.
    """

    quick: bool
    caches: Path

    @property
    def shape(self) -> LlamaShape:
        """The training workload."""
        return LlamaShape(dim=64, num_layers=1, vocab=256, sequence=32) if self.quick else LlamaShape()

    @property
    def environment(self) -> dict[str, str]:
        """What worker processes that share the cache are started with."""
        return dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "AOTDIST_CACHE_FOLDER"), str(self.caches))


@dataclass(frozen=True, slots=True)
class Case:
    """A part of a bench that stands alone: when it fails, the others are still worth having.

    Args:
        name: as the tables name it.
        measure: runs it.
    """

    name: str
    measure: Callable[[], list[Series]]
