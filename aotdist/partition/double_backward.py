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


def plan_double_backward(joint: Graph, saved: Sequence[Slot], obstacle: str | None) -> DoubleBackwardPlan:
    """What is needed to differentiate the gradients of `joint`, as the trace recorded it.

    Args:
        joint: the graph, before any pass.
        saved: what is saved for the backward.
        obstacle: why they cannot be differentiated, as far as the trace showed it, see `BackwardFacts`.
    """
    drawn = _drawn(joint)
    by_name = {slot.path.removeprefix("%"): slot for slot in saved if slot.path.startswith("%")}
    kept = {node.name: by_name[node.name] for node in drawn if node.name in by_name}
    needed = _needed(joint, _slots(joint), kept)
    written = overwritten_primals(joint)
    named = joint.named_placeholders().items()
    primals = tuple(slot for slot, node in named if slot.role == "primal" and node in needed)
    needed -= {node for node in needed if node.name in kept}
    obstacle = obstacle or _obstacle(joint, needed, written)
    is_exact = obstacle is None and _is_exact(joint, needed)
    return DoubleBackwardPlan(() if obstacle else primals, kept, obstacle, is_exact, _failure(needed))


def _is_exact(joint: Graph, needed: set[Node]) -> bool:
    """See `DoubleBackwardPlan`: gradients have one formula."""
    return all(
        operator_name(node.target) in _WITH_ONE_FORMULA if is_late(node) else _is_differentiated_alike(node)
        for node in needed & _with_history(joint)
        if node.op == "call_function" and not is_getitem(node)
    )


def _is_differentiated_alike(node: Node) -> bool:
    """Whether autograd differentiates an operator of the forward as it did what the program called."""
    val, name = node.meta.get("val"), operator_name(node.target) or "copy"
    is_complex = isinstance(val, torch.Tensor) and val.is_complex()
    return not is_complex and name != "copy" and "scatter" not in name


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


def _obstacle(joint: Graph, needed: set[Node], written: frozenset[Node]) -> str | None:
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
    return _computed_again_without_history(joint) if any(map(_is_computed_again, needed)) else None


def _computed_again_without_history(joint: Graph) -> str | None:
    """What the program does under `no_grad`: where it is done again, it looks like autograd's own part."""
    history = _with_history(joint)
    for node in joint.gm.graph.nodes:
        has_none = node.op == "call_function" and not is_late(node) and not node.meta.get("grad", True)
        if has_none and node in history:
            return f"it may compute again what has no history ({node.meta['source'] or node.target})"
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
        with torch.set_grad_enabled(is_late(n) or n.meta.get("grad", True)):
            return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(_AS_WRITES.get(target, target), args, kwargs)


def _copied(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor).copy_(source)


def _scattered(tensor: torch.Tensor, source: torch.Tensor, *where: Any) -> torch.Tensor:
    whole = tensor.clone()
    whole.as_strided(*where).copy_(source)
    return whole


_AS_WRITES: Mapping[Any, Callable[..., torch.Tensor]] = {
    _ATEN.copy.default: _copied,  # has no derivative
    _ATEN.as_strided_scatter.default: _scattered,  # has a wrong one: what was written over keeps its gradient
}
"""What writes became in the graph and autograd cannot differentiate, as writes."""


def _needed(joint: Graph, outs: Sequence[Slot], kept: Container[str]) -> set[Node]:
    """What `outs` are computed from; the inputs of kept nodes are not followed."""
    named = joint.named_results()
    roots = [node for slot in outs if (node := named[slot]) is not None]
    return joint.ancestors(roots, stop={node for node in joint.gm.graph.nodes if node.name in kept})


def _is_computed_again(node: Node) -> bool:
    """Whether it is an operator of the forward that the backward repeats (in a checkpoint)."""
    return node.op == "call_function" and is_late(node) and bool(node.meta.get("grad"))


def _with_history(joint: Graph) -> set[Node]:
    """Inputs that get gradients, gradients that arrive, and all that is computed of them."""
    paths = {slot.path for slot, node in joint.named_results().items() if slot.role == "grad" and node}
    named = joint.named_placeholders().items()
    roots = (node for slot, node in named if slot.path in paths or slot.role in GRADIENT_ROLES)
    return joint.descendants(roots)


def _is_detached_by_autograd(node: Node) -> bool:
    """Whether it is a `detach` that stems from saving a value for backward: no forward operator uses it."""
    return node.target is DETACH and not _is_computed_again(node) and all(map(is_late, node.users))
