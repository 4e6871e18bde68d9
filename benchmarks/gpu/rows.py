"""What is measured, in the order of what matters most: later rows are the first to be left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu.compilers import Compilers, Way
from benchmarks.gpu.operators import OPERATORS, SMALL, Operator, Sizes
from benchmarks.gpu.place import Place
from benchmarks.gpu.training import BILLION, TINY, Training, of_training
from benchmarks.gpu.workload import Workload, of_operator
from benchmarks.models import LlamaShape
from benchmarks.timing import Pace

_OPERATOR_COSTS: Mapping[Way, float] = {
    "eager": 1.0,
    "aotdist triton": 2.0,
    "torch.compile": 3.0,
    "torch.compile max-autotune": 5.0,
}
_BLOCK_COSTS: Mapping[Way, float] = {
    "eager": 1.0,
    "aotdist triton": 5.0,
    "torch.compile": 8.0,
    "aotdist triton, CUDA graphs": 5.0,
    "torch.compile max-autotune": 25.0,
}
_MODEL_COSTS: Mapping[Way, float] = {
    "eager": 5.0,
    "aotdist triton": 25.0,
    "torch.compile": 45.0,
    "aotdist triton, CUDA graphs": 25.0,
    "torch.compile max-autotune": 90.0,
}
"""Seconds that a way is expected to take, compiling and all; most of it is compiling. Guesses until they are
measured: they decide only what is left out when time is short."""
_OPTIONAL: frozenset[Way] = frozenset({"aotdist triton, CUDA graphs", "torch.compile max-autotune"})
"""Ways that are left out before any row is."""


@dataclass(frozen=True, slots=True)
class Row:
    """Contenders that take turns.

    Args:
        case: as the tables name it.
        work: bytes or tokens of a run; 0 where the inputs decide.
        cold: whether caches are emptied before each run.
        memory: whether the peak is read too.
        costs: the ways, in the order in which they are compiled, with the seconds that each should take.
        build: what a way runs.
        pace: how often.
    """

    case: str
    work: int
    cold: bool
    memory: bool
    costs: Mapping[Way, float]
    build: Callable[[Way, Place], Workload]
    pace: Pace

    @property
    def needed(self) -> float:
        """Seconds of the ways that the row makes no sense without."""
        return sum(cost for way, cost in self.costs.items() if way not in _OPTIONAL)

    def is_optional(self, way: Way) -> bool:
        """Whether a way is left out to make room for later rows."""
        return way in _OPTIONAL


def rows(*, dry: bool) -> list[Row]:
    """All rows.

    Args:
        dry: with tiny tensors, which a CPU computes: to see that everything runs.
    """
    sizes, pace = (SMALL, Pace(rounds=2, warmup=1)) if dry else (Sizes(), Pace(rounds=30, warmup=3))
    kernels = Compilers(dry=dry)
    of_one_kernel = [
        Row(
            operator.name,
            0,
            cold=True,
            memory=False,
            costs={**_OPERATOR_COSTS, **dict.fromkeys(operator.by_hand, 2.0)},
            build=partial(_operator, operator, kernels, sizes),
            pace=pace,
        )
        for operator in OPERATORS
    ]
    shape, pace = (TINY, Pace(rounds=2, warmup=1)) if dry else (BILLION, Pace(rounds=10, warmup=3))
    programs = Compilers(dry=dry, backend="fx" if dry else "triton")
    of_training_steps = [
        Row(
            training.name,
            shape.batch * shape.sequence,
            cold=False,
            memory=True,
            costs=_BLOCK_COSTS if training.part == "block" else _MODEL_COSTS,
            build=partial(_training, training, programs, shape),
            pace=pace,
        )
        for training in (Training(part, fp) for part in ("block", "model") for fp in ("bf16", "fp8"))
    ]
    return [*of_one_kernel, *of_training_steps]


def _operator(operator: Operator, compilers: Compilers, sizes: Sizes, way: Way, place: Place) -> Workload:
    by_hand = operator.by_hand.get(way)
    program = by_hand() if by_hand else compilers.compiled(operator.program, way, graphs=False)
    return of_operator(operator, program, sizes, place.device)


def _training(
    training: Training, compilers: Compilers, shape: LlamaShape, way: Way, place: Place
) -> Workload:
    return of_training(training, way, compilers, shape, place.device)
