"""Fused optimizer steps as the pointwise operators that they are made of, for compilers that fuse.

A fused step is one operator, whose lists of new parameters and states are all alive when it has run: three
times the parameters. As pointwise operators each parameter's update is a kernel of its own, which writes
where the parameter lies as soon as its gradient is there, and `early_updates` moves it there.

The trace keeps such a step whole, as it may take a learning rate that is a Python number (`scalars`); it is
broken up in the joint graph, where that is a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from aotdist.codegen.contract import Decompositions
from aotdist.codegen.decompose import inline
from aotdist.program import Graph
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.operators import OpOverload, own_operator

_ATEN = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def break_up_steps(graph: Graph, decompositions: Callable[[], Decompositions]) -> Graph:
    """The graph with steps of Adam and AdamW decomposed, and learning rates of other steps as tensors.

    Args:
        graph: a joint or an inference graph.
        decompositions: returns those of the backend; if it has none, nothing is decomposed.
    """
    has_steps = any(node.target in _WITH_TENSOR_RATE for node in graph.gm.graph.nodes)
    if not has_steps or not (table := decompositions()):
        return graph
    gm = graph.copied().gm
    for node in list(gm.graph.nodes):
        if node.target in _WITH_TENSOR_RATE:
            if isinstance(node.kwargs["lr"], Node):
                _take_rate(gm, node)
            takes_numbers = any(isinstance(each.meta["val"], float) for each in node.all_input_nodes)
            if node.target in _MADE_OF and not takes_numbers:
                inline(gm.graph, node, _MADE_OF[node.target], table)
                gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    return Graph(gm, graph.ins, graph.outs)


def _take_rate(gm: GraphModule, node: Node) -> None:
    """Let a step take its learning rate, which differs from call to call, as a tensor."""
    params: Any = node.args[0]
    rate: Any = node.kwargs["lr"]
    if isinstance(rate.meta["val"], torch.Tensor):
        return
    options: dict[str, Any] = {"dtype": torch.float64}
    with gm.graph.inserting_before(node):
        made = gm.graph.call_function(_ATEN.scalar_tensor.default, (rate,), options)
    with no_modes(), params[0].meta["val"].fake_mode:
        made.meta = {**rate.meta, "val": torch.empty((), **options)}
    node.target = _WITH_TENSOR_RATE[node.target]
    node.kwargs = {**node.kwargs, "lr": made}


def _adam_biases(steps: Sequence[Tensor], beta1: float, beta2: float) -> Tensor:
    """Bias corrections of the two means of each parameter, in float64 as in fused kernels. Shapes: (P, 2).

    An operator of its own: compilers would recompute it for each element of a parameter.
    """
    counts = torch.stack(list(steps)).double().view(-1)
    return torch.stack([1 - beta1**counts, (1 - beta2**counts).sqrt()], 1)


def _biases_like(steps: Sequence[Tensor], _beta1: float, _beta2: float) -> Tensor:
    return steps[0].new_empty((len(steps), 2), dtype=torch.float64)


_ADAM_BIASES = own_operator(
    "adam_biases(Tensor[] steps, float beta1, float beta2) -> Tensor", _adam_biases, _biases_like
)


@dataclass(frozen=True, slots=True)
class _Rule:
    """The numbers of a step, by their names in the operator, and whether weights decay by themselves."""

    decoupled: bool
    lr: Any
    beta1: Any
    beta2: Any
    weight_decay: Any
    eps: Any
    amsgrad: bool
    maximize: bool

    def updated(
        self, param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, most: Tensor | None, biases: Tensor
    ) -> list[Tensor | None]:
        """New parameter, mean, mean of squares, and the largest of these, from the unscaled gradient."""
        if self.maximize:
            grad = -grad
        if self.weight_decay is None:
            pass
        elif self.decoupled:
            param = param - self.lr * self.weight_decay * param
        else:
            grad = grad + self.weight_decay * param
        mean = torch.lerp(mean, grad, 1 - self.beta1)
        square = square * self.beta2 + grad * grad * (1 - self.beta2)
        if most is not None:
            most = torch.maximum(most, square)
        spread = (square if most is None else most).sqrt() / biases[1] + self.eps
        return [param - self.lr / biases[0] * mean / spread, mean, square, most]


def _adam(
    decoupled: bool,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    mosts: Sequence[Tensor],
    steps: Sequence[Tensor],
    **options: Any,
) -> tuple[list[Tensor], ...]:
    """Parameters, gradients and states after a step of Adam or AdamW; the old ones if `found_inf` is 1."""
    grad_scale, found_inf = (options.pop(name, None) for name in ("grad_scale", "found_inf"))
    options["weight_decay"] = options["weight_decay"] or None
    rule, results = _Rule(decoupled, **options), tuple[list[Tensor], ...]([] for _ in range(5))
    biases = _ADAM_BIASES(steps, rule.beta1, rule.beta2)
    for at, (param, grad) in enumerate(zip(params, grads, strict=True)):
        state = [means[at], squares[at], mosts[at] if rule.amsgrad else None]
        unscaled = grad if grad_scale is None else grad / grad_scale.to(grad.dtype)
        wide = [None if each is None else _widened(each) for each in (param, unscaled, *state)]
        new_param, *new_state = rule.updated(*wide, biases[at])  # type: ignore[arg-type]
        pairs = zip((param, grad, *state), (new_param, unscaled, *new_state), results, strict=True)
        for old, new, result in pairs:
            if old is not None and new is not None:
                narrow = new.to(old.dtype)
                result.append(narrow if found_inf is None else torch.where(found_inf == 1, old, narrow))
    return results


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


_WITH_TENSOR_RATE: Mapping[Any, OpOverload] = {
    step: packet.tensor_lr
    for packet in (_ATEN._fused_adam, _ATEN._fused_adamw, _ATEN._fused_sgd, _ATEN._fused_adagrad)
    if "tensor_lr" in packet.overloads()
    for step in (packet.default, packet.tensor_lr)
}
"""Fused steps of optimizers, and the form of each whose learning rate is a tensor."""
_MADE_OF: Mapping[Any, Callable[..., Any]] = {
    step: functools.partial(_adam, decoupled)
    for packet, decoupled in ((_ATEN._fused_adam, False), (_ATEN._fused_adamw, True))
    for step in (packet.default, packet.tensor_lr)
}
"""Decompositions of fused steps."""
