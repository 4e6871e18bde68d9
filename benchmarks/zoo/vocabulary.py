"""The table's rows, columns and cells: who, how spread, in what, and what was found."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

Family = Literal["Llama", "Qwen3", "Mixtral", "GPT2", "ViT", "T5"]
Layout = Literal["FSDP2", "TP", "2-D"]
Precision = Literal["fp32", "bf16", "fp8", "2:4"]
Compiler = Literal["eager", "aotdist", "torch.compile"]
Kernels = Literal["operators", "inductor"]

FAMILIES: tuple[Family, ...] = get_args(Family)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
COMPILERS: tuple[Compiler, ...] = get_args(Compiler)
KERNELS: tuple[Kernels, ...] = get_args(Kernels)
Place = tuple[Kernels, Layout, Family, Precision]

NUM_RANKS: Mapping[Layout, int] = {"FSDP2": 2, "TP": 2, "2-D": 4}


@dataclass(slots=True)
class Outcome:
    """What one contender did, on the rank where it did worst.

    Args:
        failure: the message, if it came to no end; then nothing else counts.
        differs: largest relative difference from eager, in loss, gradients, parameters and buffers of all
            steps; 0.0 if they are equal bit for bit.
        where: what differs most.
        loss_differs: largest relative difference of a step's loss; infinite if one is no number.
        num_graphs: graphs that the forward was cut into, as its compiler counts them; 0 for eager.
        seconds: of forward and backward, one a round.
        eager_seconds: of eager, which took turns with it.
        peak: MiB of tensors that a step has at once beyond the model, gradients included.
    """

    failure: str = ""
    differs: float = 0.0
    where: str = ""
    loss_differs: float = 0.0
    num_graphs: int = 0
    seconds: tuple[float, ...] = ()
    eager_seconds: tuple[float, ...] = ()
    peak: float = 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """A cell.

    Args:
        num_converted: linear layers that compute in 8 bits, or 2:4.
        num_linear: linear layers that there are.
        outcomes: by contender.
    """

    num_converted: int
    num_linear: int
    outcomes: dict[Compiler, Outcome] = field(default_factory=dict[Compiler, Outcome])

    def ran(self, name: Compiler) -> bool:
        """Whether a contender came to its end."""
        return name in self.outcomes and not self.outcomes[name].failure

    def time_ratio(self, name: Compiler) -> float:
        """A contender's time to eager's, the median of all rounds."""
        outcome = self.outcomes[name]
        pairs = zip(outcome.seconds, outcome.eager_seconds, strict=True)
        return statistics.median(ours / eager for ours, eager in pairs)

    def peak_ratio(self, name: Compiler) -> float:
        """A contender's memory to eager's."""
        return self.outcomes[name].peak / self.outcomes["eager"].peak

    def fastest(self, names: Sequence[Compiler]) -> Compiler | None:
        """Who of those of `names` that ran took least time."""
        return min((name for name in names if self.ran(name)), key=self.time_ratio, default=None)
