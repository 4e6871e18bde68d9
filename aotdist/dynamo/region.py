"""One graph of Dynamo's, compiled: what Dynamo calls in its place."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from aotdist.capture.origins import short_tracebacks
from aotdist.codegen.contract import Backend
from aotdist.compiled import Compiled, Compiling
from aotdist.dynamo.graph import DynamoGraph
from aotdist.settings import Settings
from aotdist.subclasses.protocol import is_real
from aotdist.torch_seam.dynamo import dynamo_frame

_numbers = itertools.count()


class Region(Compiled):
    """A graph of Dynamo's as a callable that compiles itself for each new kind of call.

    Dynamo guards what it found out itself, and calls a graph for every call that passes. What the compiled
    graph depends on besides (which inputs share memory, strides, what a trace decided by a symbol) is
    guarded here, as for every compiled function.

    Attributes:
        name: of the frame that Dynamo compiled: `forward [0/0]`.

    Args:
        gm: the graph.
        backend: turns graphs into callables.
        settings: how to compile.
    """

    def __init__(self, gm: GraphModule, backend: Backend, settings: Settings) -> None:
        graph = DynamoGraph.of(gm)
        self.name = dynamo_frame()
        vars(gm)["__name__"] = self.name
        self.number = next(_numbers)
        self._graph = graph
        super().__init__(
            lambda: graph.gm,
            graph.run,
            Compiling(backend, settings, lambda call: graph.open_dims(call.kwargs)),
        )
        _every_region.add(self)

    def __call__(self, *inputs: Any) -> Any:
        """Run the artifact that fits, making one if there is none."""
        results = super().__call__(**self._graph.named(inputs))
        if self._graph.left_grad_mode is not None:
            torch.set_grad_enabled(self._graph.left_grad_mode)
        return results

    @short_tracebacks
    def compile_for(self, inputs: Sequence[Any]) -> None:
        """Compile for a call with these inputs, without calling."""
        if all(is_real(value) for value in inputs if isinstance(value, torch.Tensor)):
            self._made((), self._graph.named(self._graph.with_numbers(inputs)))


_every_region: weakref.WeakSet[Region] = weakref.WeakSet()


def regions() -> list[Region]:
    """What Dynamo compiled with this backend and has not let go of, the oldest first."""
    return sorted(_every_region, key=lambda region: region.number)
