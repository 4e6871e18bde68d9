"""The table's rows and columns: which architectures, who runs them, and what was found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch

from benchmarks.zoo.families import Size

Kind = Literal[
    "decoder",
    "experts",
    "state space, linear attention",
    "encoder",
    "encoder and decoder",
    "vision",
    "audio",
    "several senses",
    "other",
]
Exact = Literal["aotdist.compile", "backend aotdist", "aot_eager"]
Rounding = Literal["auto", "inductor", "triton", "torch.compile"]
Way: TypeAlias = Exact | Rounding

WAYS: tuple[Exact, ...] = get_args(Exact)
"""These run operators one by one, as eager does: bits are compared."""

ROUNDING: tuple[Rounding, ...] = get_args(Rounding)
"""These make kernels, which round in other places: losses, and distances from float64, are compared."""

Inputs: TypeAlias = Callable[[Size, torch.Generator], dict[str, Any]]
"""Makes a batch with labels."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row.

    Args:
        kind: where it stands in the table.
        model: its class in `transformers`, which knows the class of its config.
        options: of the config, as far as they differ from its defaults.
        inputs: makes a batch.
    """

    kind: Kind
    model: str
    options: Mapping[str, Any]
    inputs: Inputs


@dataclass(slots=True)
class Half:
    """What became of training, or of generation.

    Args:
        failure: the message, if it came to no end; then nothing else counts.
        is_ours: whether that is an error that aotdist words.
        differs: largest relative difference from eager; 0.0 if all bits are equal.
        where: what differs most.
        is_programs: whether eager has these bits too, where it runs what was compiled: told that it is being
            compiled, or as Dynamo captured it.
        num_graphs: graphs that were compiled.
        breaks: why Dynamo cut the program, a reason for each cut.
        with_cache: for generation, whether keys and values were kept from token to token.
    """

    failure: str = ""
    is_ours: bool = False
    differs: float = 0.0
    where: str = ""
    is_programs: bool = False
    num_graphs: int = 0
    breaks: tuple[str, ...] = ()
    with_cache: bool = True


@dataclass(slots=True)
class Rounded:
    """What became of training by a backend that rounds in other places than eager.

    Args:
        failure: the message, if it came to no end; then nothing else counts.
        is_ours: whether that is an error that aotdist words.
        told: what was warned of: operators that ran without a kernel.
        apart: with dropout, the largest relative difference of a loss from eager's, over ten steps of AdamW
            from the same seeds; NaN if a loss is not finite.
        error: without dropout, how far the loss and all gradients of a step are from those in float64, by
            norm and relative.
        eager_error: how far eager's are.
    """

    failure: str = ""
    is_ours: bool = False
    told: tuple[str, ...] = ()
    apart: float = math.nan
    error: float = math.nan
    eager_error: float = math.nan

    def is_right(self) -> bool:
        """Whether losses stay near eager's, and rounding is of eager's size; never with a NaN."""
        return self.apart <= NEAR and self.error <= MUCH * self.eager_error + TINY


NEAR, MUCH, TINY = 1e-2, 4.0, 1e-6
"""What is taken for rounding: of losses after ten steps, of one step's to eager's, and in any case."""


@dataclass(slots=True)
class Found:
    """A row's part about one way to run.

    Args:
        training: three steps.
        told: these again with `Settings(is_compiling=True)`, as aotdist proposes where a program reads data;
            None where it does not.
        generation: three tokens; None where a model generates none, or was not asked to.
        told_generation: these again as aotdist proposes where it refuses a cache, or reads of data: with
            `Settings(is_compiling=True)`, and caches registered as pytrees; without a cache if that fails
            too.
        first: seconds of the first step, which compiles.
        seconds: of a step, one a round.
        eager_seconds: of eager, which took turns with it.
        rounded: instead of all that, what became of one of `ROUNDING`.
    """

    training: Half = field(default_factory=Half)
    told: Half | None = None
    generation: Half | None = None
    told_generation: Half | None = None
    first: float = 0.0
    seconds: tuple[float, ...] = ()
    eager_seconds: tuple[float, ...] = ()
    rounded: Rounded | None = None

    def came_through(self) -> Half | None:
        """The training that came to its end, if one did."""
        return next((half for half in (self.training, self.told) if half and not half.failure), None)

    def came_through_generation(self) -> Half | None:
        """The generation that came to its end, if one did."""
        halves = (self.generation, self.told_generation)
        return next((half for half in halves if half and not half.failure), None)

    def compile_seconds(self) -> float:
        """What the first step takes beyond the others."""
        return self.first - statistics.median(self.seconds)

    def time_ratio(self) -> float:
        """A step to eager's, the median of all rounds."""
        pairs = zip(self.seconds, self.eager_seconds, strict=True)
        return statistics.median(ours / eager for ours, eager in pairs)
