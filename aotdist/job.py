"""One compilation: the call, the backend, the settings, and what they require of the trace."""

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
    """A call to compile, and how; see `aotdist.pipeline.compile_call`.

    Args:
        call: the call.
        backend: turns graphs into callables.
        settings: how to compile.
        symbolic: try symbolic sizes, if the call, settings or marks request them.
        finds_out: let the program branch on data of this call, see `aotdist.trace.numbers.data_guards`.
        counts: places of numbers that become symbols.
        counted: paths of arguments that are numbers and become symbols.
        opens: make the dimensions in `call.guessed` dynamic.
        set_up: spots of flags that earlier artifacts assumed to be set up.
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
        """With symbols for more numbers, given by path (arguments) or by place."""
        paths, places = list(self.counted), {place.spot(): place for place in self.counts}
        for number in numbers:
            if isinstance(number, Source):
                places[number.spot()] = number
            else:
                paths.append(number)
        return replace(self, counts=tuple(places.values()), counted=tuple(dict.fromkeys(paths)))

    def lacks(self, numbers: Iterable[str | Source]) -> bool:
        """Whether some of these numbers have no symbol yet."""
        more = self.with_numbers(numbers)
        return len(more.counts) + len(more.counted) > len(self.counts) + len(self.counted)

    def needs_symbols(self) -> bool:
        """Whether the job is of no use without symbols."""
        return bool(self.counts or self.counted or self.opens)


def dims_of(job: Job, captured: Captured) -> Mapping[int, frozenset[int]]:
    """The dimensions that become symbols, by the identity of the tensor."""
    if not job.opens:
        return captured.dims
    none = frozenset[int]()
    requested, guessed = captured.dims, job.call.guessed
    return {key: requested.get(key, none) | guessed.get(key, none) for key in {*requested, *guessed}}


def refuse_fakes(program: Program[PrimalIdx], backend: Backend) -> None:
    """Refuse to make machine code for a call with fake tensors: it would read memory that does not exist."""
    for slot, example in zip(program.ins, program.examples, strict=True):
        if is_fake(example) and backend.name in ("inductor", "triton"):
            raise BadSettings(
                f"`{slot}` is a fake tensor, and what `{backend.name}` emits reads memory",
                stage="capture",
                fix='compile with `backend="fx"`, or export the program: `aotdist.export`',
            )


def record_options(backend: Backend, settings: Settings) -> RecordOptions:
    """The options of the recorder that follow from the backend and the settings."""
    return RecordOptions(
        _decompositions(backend, settings),
        functional_rng=settings.functional_rng,
        backward_autocast=_backward_autocast(settings),
        # Eager's formulas may wait for data, which a CUDA graph cannot.
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
    """The operators that the trace decomposes, without losses that a pass is to find whole.

    Inductor's backend decomposes graphs itself: equal blocks once, and none of those that the cache has.
    """
    if settings.loss_chunk_bytes is not None:
        return {op: made for op, made in backend.decompositions().items() if op not in WHOLE}
    return {} if backend.name == "inductor" else backend.decompositions()
