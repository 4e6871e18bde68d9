"""Small graphs, recorded from plain functions of tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotdist.codegen.contract import Emission, Kind
from aotdist.program import Graph, Role, Slot
from aotdist.settings import Settings
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.proxies import make_fx


def captured(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    *,
    out_roles: Sequence[Role] | None = None,
    in_roles: Sequence[Role] | None = None,
    decompositions: Any = None,
) -> Graph:
    """`fn(*inputs)` as a graph over fake tensors; `fn` returns a list or tuple."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(tensor.detach()) for tensor in inputs]
    torch.compiler.reset()  # `torch.cond` asks Dynamo, for which sizes that it saw differ are symbols
    gm = make_fx(fn, decomposition_table=decompositions)(*fakes)
    (values,) = gm.graph.output_node().args
    gm.graph.output_node().args = (tuple(values),)
    ins = [Slot(role, f"args[{i}]") for i, role in enumerate(in_roles or ["primal"] * len(inputs))]
    outs = [Slot(role, f"out[{i}]") for i, role in enumerate(out_roles or ["output"] * len(values))]
    return Graph(gm, tuple(ins), tuple(outs))


def emission(graph: Graph, kind: Kind = "inference", static_ins: frozenset[int] = frozenset()) -> Emission:
    """What an emitter is told about `graph`."""
    fakes = [node.meta["val"] for node in graph.placeholders()]
    return Emission(kind, fakes[0].fake_mode if fakes else None, Settings(), static_ins, "test")


def branching(x: torch.Tensor) -> list[torch.Tensor]:
    """A program with a branch that stays in the graph."""
    return [torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))]


def calls(graph: Graph) -> list[torch.fx.Node]:
    """The nodes that compute something, in order."""
    return [node for node in graph.gm.graph.nodes if node.op == "call_function"]
