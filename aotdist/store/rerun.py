"""Whether a graph from a file is what it says: its operators are run once more, on tensors without data.

Each has to take what it is given, and to give a tensor of the sizes and of the dtype that the file tells of
it. So a graph that is loaded runs, and what is derived from its values (kernels' sizes, strides of gradients,
bytes to keep) is of the program that runs.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from aotdist.codegen.fx import attribute_of
from aotdist.passes.verify import verify
from aotdist.program import Graph
from aotdist.store.typed import damaged
from aotdist.torch_seam.functional import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    quiet_fakes,
)
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.operators import OpOverload

_UNTOLD = (
    *(DataDependentOutputException, DynamicOutputShapeException),
    *(UnsupportedOperatorException, NotImplementedError),
)
"""Raised for operators of which nothing is known without data."""


class Rerun:
    """Runs the operators of graphs of one file; what was seen once of sizes and constants, not again.

    Args:
        fake_mode: made the values of the graphs, one for all that are alike.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._seen = set[str]()

    def check(self, graph: Graph) -> None:
        """See that a graph holds together, and that its operators compute what it says of its values.

        Raises:
            BadArtifact: they don't.
            InternalError: an invariant of all graphs does not hold.
        """
        verify(graph, "reading a file")
        with no_modes(), self._fake_mode, torch.no_grad(), quiet_fakes():
            for node in graph.gm.graph.nodes:
                if isinstance(node.target, OpOverload) or node.target is operator.getitem:
                    self._check_node(graph.gm, node)

    def _check_node(self, gm: GraphModule, node: Node) -> None:
        def val_of(source: Node) -> Any:
            return source.meta["val"] if source.op != "get_attr" else attribute_of(gm, source)

        target: Any = node.target
        args, kwargs = map_arg((node.args, dict(node.kwargs)), val_of)
        # Equal values are one object, as long as the graphs live.
        key = str((target, map_arg((node.args, node.kwargs), lambda n: _Same(val_of(n))), _Same(val_of(node))))
        if key in self._seen:
            return
        try:
            found = target(*map_aggregate(args, self._faked), **map_aggregate(kwargs, self._faked))
        except _UNTOLD:
            return
        except Exception as error:
            raise damaged(f"`{node.name}` does not run: {type(error).__name__}: {error}") from error
        if _kind(found) != _kind(node.meta["val"]):
            raise damaged(f"`{node.name}` is said to be {_kind(node.meta['val'])}, and is {_kind(found)}")
        self._seen.add(key)

    def _faked(self, value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return self._fake_mode.from_tensor(value) if is_real else value


class _Same:
    """Shows which object a value is; no text of a file looks like that."""

    def __init__(self, value: Any) -> None:
        parts = value if isinstance(value, tuple) else (value,)
        self._shown = f"<{' '.join(str(id(part)) for part in parts)}>"

    def __repr__(self) -> str:
        return self._shown


def _kind(val: Any) -> Any:
    if isinstance(val, (tuple, list)):
        return tuple(map(_kind, val))
    return (tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else type(val)
