"""What a backend takes and returns, and what it must say about itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from aotdist.program import Graph
from aotdist.settings import Settings
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.operators import OpOverload

Kind = Literal["inference", "forward", "backward"]
"""Which program a graph is: one that is never differentiated, or one half of one that is."""

BoxedCall: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Takes its arguments as *one* list and empties it, so that each is freed after its last use."""

Decompositions: TypeAlias = Mapping[OpOverload, Callable[..., Any]]
"""Operators that are decomposed, and their decompositions."""

Strides: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Emission:
    """What a backend is given besides the graph.

    Args:
        kind: whether the graph is an inference program, a forward or a backward.
        fake_mode: the mode that made the graph's `val`s.
        settings: how the user asked to compile.
        static_ins: positions of the placeholders that keep their address from call to call:
            parameters, buffers, and saved values that are such primals.
        name: a word for files, tracebacks and logs (`step`, `Llama`); any text.
        saved_ins: positions of the placeholders that a backward's forward computed.
    """

    kind: Kind
    fake_mode: FakeTensorMode | None
    settings: Settings
    static_ins: frozenset[int] = frozenset()
    name: str = "graph"
    saved_ins: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """One kernel of our own.

    Args:
        name: of the function.
        operators: what it computes, in order.
        num_results: elements along what it does not reduce; text where it differs from call to call.
        num_reduced: elements that it reduces to each of those; 1 if it reduces nothing.
        num_bytes: bytes that it reads and writes, with the sizes that it was compiled for.
        sources: the user's lines that its operators are from, in order.
        text: the kernel as Triton source.
        registers: of a thread, 32 bits each; None while it is not compiled.
    """

    name: str
    operators: tuple[str, ...]
    num_results: int | str
    num_reduced: int | str
    num_bytes: int
    sources: tuple[str, ...]
    text: str
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class Fusion:
    """Into which kernels of our own the operators of a graph were fused.

    Args:
        kernels: in the order in which they run.
        library: how many calls were left to the library, by operator and reason.
        restrided: results of libraries with other strides than traced, for which the graph was emitted again.
    """

    kernels: tuple[KernelSummary, ...]
    library: Mapping[tuple[str, str], int]
    restrided: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recordings:
    """How the calls of a graph were recorded and replayed as CUDA graphs.

    Args:
        made: how many recordings.
        replays: how often they were replayed.
        without: how often the graph ran as it is, by reason.
    """

    made: int
    replays: int
    without: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Portable:
    """What was emitted on the CPU, for another process of the same machine: text and machine code.

    Args:
        source: what runs, for a reader.
        text: of a module that defines `call`, without the kernels.
        output_strides: see `Emitted`.
        libraries: extension modules.
        kernels: names of the text, by the library that holds each, and by what it is called there.
        constants: names of the text that are tensors.
        functions: names of `torch` that the text calls as attributes of `extern_kernels`.
    """

    source: str
    text: str
    output_strides: tuple[Strides | None, ...] | None
    libraries: tuple[bytes, ...]
    kernels: Mapping[str, tuple[int, str]]
    constants: Mapping[str, torch.Tensor]
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CompiledRegion:
    """A part of a graph that was compiled by itself.

    Args:
        call: what runs it.
        name: in text.
    """

    call: BoxedCall
    name: str

    @property
    def __name__(self) -> str:
        """Its name in printed graphs."""
        return self.name

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run it."""
        return self.call(args)


def _nothing_pending() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Emitted:
    """A compiled graph.

    Args:
        call: the compiled graph, boxed; one result per out of the graph, in order.
        source: what runs, for a reader.
        output_strides: per out, the strides that the compiler chose (None for an out that is no
            tensor); None altogether where every out has the strides of the graph's own `val`.
        finish: waits until `call` may be used, and raises if compiling failed. A compiler that
            works in the background returns early, so that the next graph is emitted meanwhile.
        else_fx: whether the program is to be emitted by `fx`, with a warning, if `finish` raises an
            `UnsupportedProgram`.
        fusion: tells which kernels there are, from a backend that writes its own.
        recordings: tells what was recorded until now, of a graph that is.
        portable: makes a form that another process can load, once `finish` is done; None if there is none.
        from_cache: it was compiled before, perhaps by another process, and found in the compile cache.
        with_modules: makes the version of `call` that runs while a profiler records, with a mark around the
            operators of each module. None where the backend cannot tell.
        is_settled: whether a call with such arguments neither compiles nor checks anything any more; None if
            that holds for every call.
        graphs: graphs that it holds, to make `with_modules` of.
        regions: how often each region is called; empty if the graph was compiled as a whole.
    """

    call: BoxedCall
    source: str
    output_strides: tuple[Strides | None, ...] | None = None
    finish: Callable[[], None] = _nothing_pending
    else_fx: bool = False
    fusion: Callable[[], Fusion] | None = None
    recordings: Callable[[], Recordings] | None = None
    portable: Callable[[], Portable | None] | None = None
    from_cache: bool = False
    with_modules: Callable[[], BoxedCall] | None = None
    is_settled: Callable[[Sequence[Any]], bool] | None = None
    graphs: tuple[Graph, ...] = ()
    regions: tuple[int, ...] = ()


def finished(emitted: Emitted) -> Emitted:
    """Wait until `call` may be used, and drop what was needed to wait.

    Raises:
        UnsupportedProgram: it does not compile.
    """
    emitted.finish()
    return replace(emitted, finish=_nothing_pending)


class Backend(ABC):
    """Turns functional graphs into callables.

    Attributes:
        name: the word that users select it by.
        partition: how to cut a joint graph when the settings leave it open.
        any_tangents: whether a compiled backward takes tangents of other strides and kinds than their `val`s.
        owns_cut: whether `prepare_joint` already cuts the joint graph in two, which no other cut may cross.
    """

    __slots__ = ()

    name: str
    partition: Literal["default", "min_cut"] = "default"
    any_tangents: bool = False
    owns_cut: bool = False

    def check(self) -> None:
        """Raise `BadSettings`, with the way out, if something that compiling needs is missing."""
        return

    def decompositions(self) -> Decompositions:
        """Operators that are decomposed for this backend: by the trace, or by Inductor's `prepare_joint`."""
        return {}

    def prepare_joint(self, graph: Graph) -> Graph:
        """Rewrite a joint or an inference graph before it is cut."""
        return graph

    @abstractmethod
    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        """Compile one graph. The graph is not changed."""
