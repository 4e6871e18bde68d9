"""What is compiled, and how: what the settings and the backend ask of a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from aotdist.capture.captured import Captured, UserCall
from aotdist.capture.source import Source
from aotdist.codegen.ahead import TargetBackend
from aotdist.codegen.contract import Backend, Decompositions
from aotdist.errors import BadSettings
from aotdist.passes.linear_losses import WHOLE
from aotdist.program import PrimalIdx, Program
from aotdist.settings import Settings
from aotdist.torch_seam.ambient import autocast_off, autocast_only
from aotdist.torch_seam.functional import is_fake
from aotdist.trace.recorder import RecordOptions


@dataclass(frozen=True, slots=True)
class Job:
    """What is compiled, and how; see `aotdist.pipeline.compile_call`.

    Args:
        call: the call.
        backend: turns graphs into callables.
        settings: how to compile.
        symbolic: try symbolic sizes, if the call, settings or marks ask for them.
        finds_out: let the program choose by data of this call, see `aotdist.trace.numbers.data_guards`.
        counts: places of numbers that symbols are to stand for.
        counted: such numbers among the arguments, by path.
        opens: let dimensions differ that `call.guessed` names.
        set_up: spots of flags that were set up before: who finds them otherwise again has another program.
    """

    call: UserCall
    backend: Backend
    settings: Settings
    symbolic: bool = True
    finds_out: bool = True
    counts: tuple[Source, ...] = ()
    counted: tuple[str, ...] = ()
    opens: bool = False
    set_up: frozenset[Any] = frozenset()

    def with_numbers(self, numbers: Iterable[str | Source]) -> Job:
        """With symbols for more numbers: paths of those among the arguments, and places of others."""
        paths, places = list(self.counted), {place.spot(): place for place in self.counts}
        for number in numbers:
            if isinstance(number, Source):
                places[number.spot()] = number
            else:
                paths.append(number)
        return replace(self, counts=tuple(places.values()), counted=tuple(dict.fromkeys(paths)))

    def lacks(self, numbers: Iterable[str | Source]) -> bool:
        """Whether there are symbols for some of these numbers only."""
        more = self.with_numbers(numbers)
        return len(more.counts) + len(more.counted) > len(self.counts) + len(self.counted)

    def needs_symbols(self) -> bool:
        """Whether it is of no use without symbols."""
        return bool(self.counts or self.counted or self.opens)


def dims_of(job: Job, captured: Captured) -> Mapping[int, frozenset[int]]:
    """The dimensions that symbols are to stand for, by the identity of the tensor."""
    if not job.opens:
        return captured.dims
    none = frozenset[int]()
    known, guessed = captured.dims, job.call.guessed
    return {key: known.get(key, none) | guessed.get(key, none) for key in {*known, *guessed}}


def refuse_fakes(program: Program[PrimalIdx], backend: Backend) -> None:
    """Refuse to make machine code for a call with fake tensors: it would read memory that is not there."""
    for slot, example in zip(program.ins, program.examples, strict=True):
        if is_fake(example) and backend.name in ("inductor", "triton"):
            raise BadSettings(
                f"`{slot}` is a fake tensor, and what `{backend.name}` emits reads memory",
                stage="capture",
                fix='compile with `backend="fx"`, or export the program: `aotdist.export`',
            )


def record_options(backend: Backend, settings: Settings) -> RecordOptions:
    """How settings, and the backend that is to run it, have a program recorded."""
    return RecordOptions(
        _decompositions(backend, settings),
        functional_rng=settings.functional_rng,
        backward_autocast=_backward_autocast(settings),
        # A CUDA graph holds nothing that waits for data, as eager's formulas do.
        of_bits=backend.name == "fx" and not settings.cuda_graphs,
        target=backend.target if isinstance(backend, TargetBackend) else None,
    )


def _backward_autocast(settings: Settings) -> Callable[[], AbstractContextManager[Any]]:
    match settings.backward_autocast:
        case "off":
            return autocast_off
        case "same_as_forward":
            return nullcontext
        case _:
            return functools.partial(autocast_only, settings.explicit_autocast())


def _decompositions(backend: Backend, settings: Settings) -> Decompositions:
    """The operators that the trace decomposes; losses that a pass may look for are left whole.

    Inductor's backend decomposes graphs itself: equal blocks once, and none of those that the cache has.
    """
    if settings.loss_chunk_bytes is not None:
        return {op: made for op, made in backend.decompositions().items() if op not in WHOLE}
    return {} if backend.name == "inductor" else backend.decompositions()
