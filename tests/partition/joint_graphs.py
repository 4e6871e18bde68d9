"""Joint graphs for tests: recorded with `make_fx`, with the metadata that the tracer would attach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotdist.program import Graph, Role, Slot
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.proxies import make_fx

Fn = Callable[..., Sequence[torch.Tensor]]


def record_joint(
    fn: Fn, primals: Sequence[torch.Tensor], writes: Sequence[int] = (), decompositions: Any = None
) -> Graph:
    """The joint graph of `fn`, whose last `len(writes)` results replace those primals.

    Every result that requires grad gets a tangent, every primal that requires grad gets a grad.
    `fn` mutates nothing: neither its arguments nor, as `dropout` does, tensors of its own.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(p) for p in primals]
    with mode:
        outs = fn(*fakes)
        tangents = [torch.ones_like(out) for out in outs if out.requires_grad]

    def joint(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> tuple[Any, ...]:
        outs = list(fn(*primals))
        wanted = [p for p in primals if p.requires_grad]
        live = [o for o in outs if o.requires_grad]
        found = iter(torch.autograd.grad(live, wanted, tangents, allow_unused=True) if wanted else ())
        return (*(o.detach() for o in outs), *(next(found) if p.requires_grad else None for p in primals))

    gm = make_fx(joint, decomposition_table=decompositions)(fakes, tangents)
    return as_joint(gm, len(primals), len(outs) - len(writes), writes)


def as_joint(
    gm: torch.fx.GraphModule, num_primals: int, num_outputs: int, writes: Sequence[int] = ()
) -> Graph:
    """Names the arguments and results of a recorded graph and marks the phases of its nodes."""
    gm.graph.set_codegen(torch.fx.graph.CodeGen())
    flatten_results(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    tangents = placeholders[num_primals:]
    mark_phases(gm.graph, tangents)
    gm.recompile()
    outs: list[tuple[Role, str]] = [("output", f"out[{i}]") for i in range(num_outputs)]
    outs += [("write", f"p{i}") for i in writes]
    outs += [("grad", f"p{i}") for i in range(num_primals)]
    ins: list[tuple[Role, str]] = [("primal", f"p{i}") for i in range(num_primals)]
    ins += [("tangent", f"t{i}") for i in range(len(tangents))]
    return Graph(gm, tuple(Slot(r, p) for r, p in ins), tuple(Slot(r, p) for r, p in outs))


def flatten_results(gm: torch.fx.GraphModule) -> None:
    """Makes the output one flat tuple."""
    output = gm.graph.output_node()
    (values,) = output.args
    output.args = (tuple(values),)


def mark_phases(graph: torch.fx.Graph, tangents: Sequence[torch.fx.Node]) -> None:
    """Everything recorded before a tangent is first used belongs to the forward."""
    phase = "forward"
    for node in graph.nodes:
        if any(i in tangents for i in node.all_input_nodes):
            phase = "backward"
        node.meta["phase"] = "forward" if node.op == "placeholder" else phase
