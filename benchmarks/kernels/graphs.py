"""The graphs that a backend is given, without running them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import aotdist
from aotdist.codegen.contract import Backend, Decompositions, Emission, Emitted, Kind
from aotdist.codegen.triton import TritonBackend
from aotdist.program import Graph
from aotdist.torch_seam.symbols import hint


@dataclass(frozen=True, slots=True)
class Recorder(Backend):
    """Stands in for the Triton backend: keeps each graph, and computes nothing.

    Args:
        graphs: what it was given, in order.
    """

    graphs: list[tuple[Kind, Graph]]
    name: str = "recorder"
    partition: Literal["default", "min_cut"] = "min_cut"

    def decompositions(self) -> Decompositions:
        return TritonBackend().decompositions()

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        self.graphs.append((emission.kind, graph))
        nodes = graph.results()

        def call(args: list[Any]) -> Sequence[Any]:
            args.clear()
            return [None if node is None else blank(node.meta["val"]) for node in nodes]

        return Emitted(call, "")


def blank(val: Any) -> Any:
    """Memory of the size of a result; 1 stands for sizes that only running it tells."""
    if not isinstance(val, Tensor):
        return hint(val)
    sizes, strides = (
        [1 if (known := hint(number)) is None else known for number in numbers]
        for numbers in (val.shape, val.stride())
    )
    return torch.empty_strided(sizes, strides, dtype=val.dtype)


def graphs_of(
    program: Callable[..., Any], *args: Any, settings: Mapping[str, Any] | None = None, **kwargs: Any
) -> list[tuple[Kind, Graph]]:
    """The graphs of a program and of its backward; what it computes is never run."""
    recorder = Recorder([])
    aotdist.compile(program, backend=recorder, settings=settings or {})(*args, **kwargs)
    return recorder.graphs
