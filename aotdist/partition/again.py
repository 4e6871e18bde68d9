"""The gradients of a program as a program of their own, to be differentiated in turn (`create_graph=True`).

The joint graph computes gradients from primals and tangents alone, by operators that autograd knows. Run
under autograd, it is what eager's backward is under `create_graph=True`: forward operators make the
history again, each in the grad mode that it was recorded in, and those of the backward are recorded too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Interpreter, Node

from aotdist.convention.philox import PHILOX
from aotdist.partition.builder import GraphBuilder
from aotdist.partition.halves import overwritten_primals
from aotdist.partition.traits import is_collective, is_random
from aotdist.program import Graph, Slot

_DETACH = torch.ops.aten.detach.default


@dataclass(frozen=True, slots=True)
class Again:
    """What differentiating twice takes.

    Args:
        primals: the plain inputs that the gradients depend on, which must be kept.
        obstacle: why it cannot be done, if so: an end of a sentence.
    """

    primals: tuple[Slot, ...]
    obstacle: str | None


def plan_again(joint: Graph, functions: Sequence[str]) -> Again:
    """What it takes for the gradients of `joint`, as the trace recorded it, to be differentiated.

    Args:
        joint: the graph, before any pass.
        functions: names of the user's autograd functions in it.
    """
    needed = _needed(joint)
    written = overwritten_primals(joint)
    named = joint.named_placeholders().items()
    primals = tuple(slot for slot, node in named if slot.role == "primal" and node in needed)
    obstacle = _obstacle(joint, needed, written, functions)
    return Again(() if obstacle else primals, obstacle)


def _obstacle(
    joint: Graph, needed: set[Node], written: frozenset[Node], functions: Sequence[str]
) -> str | None:
    if functions:
        return f"it runs the autograd function `{functions[0]}`"
    if any(slot.role == "backward_write" for slot in joint.outs):
        return "its backward writes an input"
    for node in joint.gm.graph.nodes:
        if node not in needed:
            continue
        if is_random(node):
            return f"it draws random numbers (`{node.target}`)"
        if is_collective(node):
            return f"it communicates (`{node.target}`)"
        if node.target is PHILOX:
            return "it draws random numbers"
        if node in written:
            return f"it writes `{node.name}`, whose old value its gradients depend on"
    return None


def gradients(joint: Graph, again: Again) -> Graph:
    """The graph of the gradients alone: primals that are needed, sizes, tangents -> gradients."""
    builder = GraphBuilder(joint.gm)
    needed = _needed(joint)
    ins: list[Slot] = []
    for slot, node in joint.named_placeholders().items():
        if slot.role in ("size", "tangent") or slot in again.primals:
            builder.placeholder(node)
            ins.append(slot)
    for node in joint.gm.graph.nodes:
        if node.op in ("placeholder", "output") or node not in needed:
            continue
        if _is_detached_by_autograd(node):
            builder.env[node] = builder.env[node.all_input_nodes[0]]
        else:
            builder.copy(node)
    pairs = [(slot, node) for slot, node in joint.named_results().items() if slot.role == "grad"]
    results = [None if node is None else builder.env[node] for _, node in pairs]
    return builder.finish(results, ins, [slot for slot, _ in pairs])


def as_function(graph: Graph) -> Callable[..., list[torch.Tensor]]:
    """The graph as a function that autograd records."""
    interpreter = _InGradModes(graph.gm)

    def gradients_of(*given: torch.Tensor | float) -> list[torch.Tensor]:
        return list(interpreter.run(*given))

    return gradients_of


class _InGradModes(Interpreter):
    """Runs each operator in the grad mode that it was recorded in; those of a backward, with it on."""

    def run_node(self, n: Node) -> Any:
        with torch.set_grad_enabled(n.meta.get("grad", True)):
            return super().run_node(n)


def _needed(joint: Graph) -> set[Node]:
    """What the gradients are computed from."""
    pending = [
        node for slot, node in joint.named_results().items() if slot.role == "grad" and node is not None
    ]
    needed = set(pending)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in needed:
                needed.add(source)
                pending.append(source)
    return needed


def _is_detached_by_autograd(node: Node) -> bool:
    """Whether it is a `detach` that stems from saving a result for backward: no forward operator uses it."""
    return node.target is _DETACH and all(user.meta.get("phase") == "backward" for user in node.users)
