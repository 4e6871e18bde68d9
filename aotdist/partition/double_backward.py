"""The gradients of a program as a program of their own, to be differentiated in turn (`create_graph=True`).

The joint graph computes gradients from primals and tangents alone, by operators that autograd knows. Run
under autograd, it is what eager's backward is under `create_graph=True`: forward operators make the
history again, each in the grad mode that it was recorded in, and those of the backward are recorded too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Interpreter, Node

from aotdist.convention.philox import PHILOX
from aotdist.errors import UnsupportedProgram
from aotdist.facts import DETACH
from aotdist.partition.builder import GraphBuilder
from aotdist.partition.halves import overwritten_primals
from aotdist.partition.traits import is_collective, is_getitem, is_late, is_random
from aotdist.program import GRADIENT_ROLES, Graph, Slot
from aotdist.torch_seam.operators import operator_name

_ATEN = torch.ops.aten
_SHAPED_LIKE = frozenset(
    {
        _ATEN.empty_like.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    }
)
"""Operators whose results hold nothing yet."""
_DRAWN_LIKE = frozenset(
    {
        _ATEN.rand_like.default,
        _ATEN.randn_like.default,
        _ATEN.randint_like.default,
        _ATEN.bernoulli.p,
        _ATEN.uniform.default,
        _ATEN.normal_functional.default,
        _ATEN.exponential.default,
    }
)
"""Operators that draw numbers for a tensor of the same shape."""


_ANOTHER_WITH_HISTORY = frozenset(
    {
        "silu_backward",
        "mish_backward",
        "logit_backward",
        "native_dropout_backward",
        "native_group_norm_backward",
        "_fused_rms_norm_backward",
        "_weight_norm_interface_backward",
        "mkldnn_rnn_layer_backward",
        "_thnn_fused_lstm_cell_backward_impl",
        "_thnn_fused_gru_cell_backward",
        "_linalg_det",
        "_linalg_slogdet",
        "_linalg_solve_ex",
    }
)
"""Operators whose gradients autograd computes by other formulas under `create_graph=True`.

What a trace without it recorded has no derivative, or a wrong one.
"""

_WITH_ONE_FORMULA = frozenset(
    {
        *("add", "bmm", "cat", "clone", "detach", "div", "mm", "mul", "neg", "pow", "sum"),
        *("_unsafe_view", "expand", "permute", "select_backward", "slice", "slice_backward", "squeeze"),
        *("t", "transpose", "unsqueeze", "view"),
        *("_log_softmax_backward_data", "_softmax_backward_data", "nll_loss_backward"),
        *("gelu_backward", "sigmoid_backward", "tanh_backward", "threshold_backward"),
        *("embedding_dense_backward", "native_layer_norm_backward", "native_batch_norm_backward"),
        *("convolution_backward", "max_pool2d_with_indices_backward"),
    }
)
"""Operators of backwards that autograd computes alike under `create_graph=True`, each with a derivative."""
_WITHOUT_DERIVATIVE = re.compile(r"_scaled_dot_product_(flash|efficient|cudnn)_attention\w*_backward")
"""Operators of backwards that autograd cannot differentiate."""


@dataclass(frozen=True, slots=True)
class DoubleBackwardPlan:
    """What is needed to differentiate the backward.

    Args:
        primals: the plain inputs that the gradients depend on, which must be kept.
        kept: saved values that follow from random numbers alone; they are not drawn again.
        obstacle: why it cannot be differentiated, if so: the end of a sentence.
        is_exact: whether the graph, run under autograd, is known to be what a trace under `create_graph=True`
            would show: backwards that are traced later are not needed then.
        failure: why a gradient with a history cannot be differentiated in eager either, if so.
    """

    primals: tuple[Slot, ...]
    kept: Mapping[str, Slot]
    obstacle: str | None
    is_exact: bool = False
    failure: str = ""


def plan_double_backward(
    joint: Graph, functions: Sequence[str], saved: Sequence[Slot], *, hooked: bool
) -> DoubleBackwardPlan:
    """What is needed to differentiate the gradients of `joint`, as the trace recorded it.

    Args:
        joint: the graph, before any pass.
        functions: names of the user's autograd functions in it.
        saved: what is saved for the backward.
        hooked: whether there are hooks on the program's own tensors, which would run for these, too.
    """
    drawn = _drawn(joint)
    by_name = {slot.path.removeprefix("%"): slot for slot in saved if slot.path.startswith("%")}
    kept = {node.name: by_name[node.name] for node in drawn if node.name in by_name}
    needed = _needed(joint, _slots(joint), kept)
    written = overwritten_primals(joint)
    named = joint.named_placeholders().items()
    primals = tuple(slot for slot, node in named if slot.role == "primal" and node in needed)
    needed -= {node for node in needed if node.name in kept}
    obstacle = "hooks in it hear of gradients" if hooked else _obstacle(joint, needed, written, functions)
    is_exact = obstacle is None and _is_exact(joint, needed)
    return DoubleBackwardPlan(() if obstacle else primals, kept, obstacle, is_exact, _failure(needed))


def _is_exact(joint: Graph, needed: set[Node]) -> bool:
    """See `DoubleBackwardPlan`: no write under `no_grad` hides a history, and gradients have one formula."""
    paths = {slot.path for slot, node in joint.named_results().items() if slot.role == "grad" and node}
    named = joint.named_placeholders().items()
    roots = (node for slot, node in named if slot.path in paths or slot.role in GRADIENT_ROLES)
    with_history = joint.descendants(roots)
    return all(
        operator_name(node.target) in _WITH_ONE_FORMULA if is_late(node) else _is_recorded_as_written(node)
        for node in needed & with_history
        if node.op == "call_function" and not is_getitem(node)
    )


def _is_recorded_as_written(node: Node) -> bool:
    """Whether autograd sees an operator of the forward as it saw it in the program."""
    val, name = node.meta.get("val"), operator_name(node.target) or "copy"
    is_complex = isinstance(val, torch.Tensor) and val.is_complex()
    return bool(node.meta.get("grad")) and not is_complex and name != "copy" and "scatter" not in name


def _failure(needed: set[Node]) -> str:
    names = (operator_name(node.target) or "" for node in needed if is_late(node))
    found = next((name for name in names if _WITHOUT_DERIVATIVE.fullmatch(name)), None)
    return "" if found is None else f"derivative for aten::{found} is not implemented"


def no_double_backward(obstacle: str) -> UnsupportedProgram:
    """An error for gradients that are to be differentiated in turn and cannot be."""
    return UnsupportedProgram(
        "the backward of a compiled program is asked for its own gradient (`create_graph=True`), "
        f"but {obstacle}",
        stage="partition",
        fix="leave the part that is differentiated twice out of the compiled function",
    )


def _slots(joint: Graph) -> list[Slot]:
    return [slot for slot in joint.outs if slot.role in ("grad", "piece", "kept")]


def _drawn(joint: Graph) -> set[Node]:
    """Nodes that depend on random numbers and on the shapes of other values only: no gradient passes them."""
    drawn: set[Node] = set()
    empty: set[Node] = set()
    for node in joint.gm.graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and not is_late(node) and node.target in _SHAPED_LIKE:
            empty.add(node)
        elif is_random(node) and (node.target in _DRAWN_LIKE or all(source in empty for source in sources)):
            drawn.add(node)
        elif sources and node.op == "call_function" and all(source in drawn for source in sources):
            drawn.add(node)
    return drawn


def _obstacle(
    joint: Graph, needed: set[Node], written: frozenset[Node], functions: Sequence[str]
) -> str | None:
    if functions:
        return f"it runs the autograd function `{functions[0]}`"
    if any(slot.role == "backward_write" for slot in joint.outs):
        return "its backward writes a tensor"
    for node in joint.gm.graph.nodes:
        if node not in needed:
            continue
        if is_random(node):
            return f"it draws random numbers (`{node.target}`)"
        if is_collective(node):
            return f"it communicates (`{node.target}`)"
        if operator_name(node.target) in _ANOTHER_WITH_HISTORY:
            return f"the gradient is computed in another way then (`{node.target}`)"
        if node.target is PHILOX:
            return "it draws random numbers"
        if node in written:
            return f"it writes `{node.name}`, whose old value its gradients depend on"
    return None


def gradients(joint: Graph, plan: DoubleBackwardPlan, outs: Sequence[Slot]) -> Graph:
    """The graph of some gradients: primals and saved values that are needed, sizes, tangents -> `outs`."""
    builder = GraphBuilder(joint.gm)
    needed = _needed(joint, outs, plan.kept)
    ins: list[Slot] = []
    for slot, node in joint.named_placeholders().items():
        if slot.role == "size" or slot.role in GRADIENT_ROLES or slot in plan.primals:
            builder.placeholder(node)
            ins.append(slot)
    for node in joint.gm.graph.nodes:
        if node in needed and node.name in plan.kept:
            builder.placeholder(node)
            ins.append(plan.kept[node.name])
    for node in joint.gm.graph.nodes:
        if node.op in ("placeholder", "output") or node not in needed or node in builder.env:
            continue
        if _is_detached_by_autograd(node):
            builder.env[node] = builder.env[node.all_input_nodes[0]]
        else:
            builder.copy(node)
    named = joint.named_results()
    results = [None if (node := named[slot]) is None else builder.env[node] for slot in outs]
    return builder.finish(results, ins, outs)


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


def _needed(joint: Graph, outs: Sequence[Slot], kept: Container[str]) -> set[Node]:
    """What `outs` are computed from; the inputs of kept nodes are not followed."""
    named = joint.named_results()
    roots = [node for slot in outs if (node := named[slot]) is not None]
    return joint.ancestors(roots, stop={node for node in joint.gm.graph.nodes if node.name in kept})


def _is_detached_by_autograd(node: Node) -> bool:
    """Whether it is a `detach` that stems from saving a result for backward: no forward operator uses it."""
    return node.target is DETACH and all(map(is_late, node.users))
