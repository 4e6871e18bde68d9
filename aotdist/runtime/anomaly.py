"""Anomaly mode: a NaN, or an error, in a compiled backward is traced to its line of the forward.

While `torch.autograd.set_detect_anomaly` is on, the backward graph runs operator by operator. What an
autograd node would have handed on is looked at; what stays inside of a node may be NaN, as in eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Interpreter, Node

from aotdist.codegen.any_strides import takes_any_strides, with_reshapes
from aotdist.codegen.contract import BoxedCall
from aotdist.program import Graph


def pointing_at_the_forward(call: BoxedCall, backward: Graph) -> BoxedCall:
    """`call`, or in anomaly mode `backward` under observation."""

    def run(args: list[Any]) -> Sequence[Any]:
        if not torch.is_anomaly_enabled():
            return call(args)
        graph = with_reshapes(backward) if takes_any_strides(backward) else backward
        observed = _Observed(graph.gm)
        observed.extra_traceback = False  # the error says it better
        return observed.boxed_run(args)

    return run


class _Observed(Interpreter):
    """Runs a graph, and stops at the first node whose result goes wrong."""

    def run_node(self, n: Node) -> Any:
        try:
            value = super().run_node(n)
        except Exception as error:
            error.add_note(f"in the backward ({_name(n)}) of {_line(n)}")
            raise
        if torch.is_anomaly_check_nan_enabled() and _leaves_its_node(n) and _has_nan(value):
            raise RuntimeError(f"Function '{_name(n)}' returned nan values.\n  at {_line(n)}")
        return value


def _name(node: Node) -> str:
    return str(node.meta.get("function") or node.target)


def _line(node: Node) -> str:
    return str(node.meta.get("source") or "an unknown line")


def _leaves_its_node(node: Node) -> bool:
    """Whether a value passes from one autograd node to another, or out of the graph."""
    if node.op != "call_function" or node.meta.get("phase") != "backward":
        return False
    own = node.meta.get("seq_nr")
    return any(user.op == "output" or user.meta.get("seq_nr") != own for user in node.users)


def _has_nan(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return bool(value.isnan().any())
