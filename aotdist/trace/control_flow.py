"""Operators that are handed functions: `torch.cond`, `scan`, `map`, and the others.

Branches that depend on data become graphs inside of the graph (`aotdist.trace.body`). Loops of a length that
is known, `scan` and `map`, are unrolled: whatever holds of a Python loop holds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from aotdist.torch_seam.functional import FunctionalTensor
from aotdist.torch_seam.modes import under_transform
from aotdist.torch_seam.operators import HigherOrderOperator, dense_rule
from aotdist.torch_seam.trees import pytree
from aotdist.trace.body import Body, trace_body
from aotdist.trace.branches import Branches
from aotdist.trace.context import TraceContext
from aotdist.trace.failures import refusal

if TYPE_CHECKING:
    from aotdist.trace.trace import Traced


def call_higher_order(
    around: TraceContext,
    trace: Callable[..., Traced],
    op: HigherOrderOperator,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    lifting: AbstractContextManager[Any],
) -> Any:
    """What `op(*args, **kwargs)` returns in the program `around` it; what it calls runs in `lifting`.

    Raises:
        UnsupportedProgram: it cannot be recorded.
    """
    match op.name():
        case "cond":
            return _cond(around, trace, *args)
        case name if name in _INLINED:
            with lifting:
                return _INLINED[name](op)(*args, **kwargs)
        case "custom_function_call":  # an `autograd.Function` inside of a `torch.func` transform
            return op(*args, **kwargs)
        case name:
            raise refusal(
                f"the program calls the higher-order operator `{name}`",
                _FIXES.get(name, "call what it is given directly, or leave it out of the compiled function"),
            )


def _cond(
    around: TraceContext,
    trace: Callable[..., Traced],
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    given: Sequence[Any],
) -> Any:
    if not isinstance(pred, torch.Tensor):
        return (true_fn if pred else false_fn)(*given)
    _check_predicate(pred)
    flat, spec = pytree.tree_flatten(tuple(given))
    distinct = list({id(t): t for t in flat if isinstance(t, torch.Tensor)}.values())
    place = {id(t): k for k, t in enumerate(distinct)}

    def body(name: str, fn: Callable[..., Any]) -> Body:
        def call(*tensors: torch.Tensor) -> Any:
            # Dynamo hands over the numbers too that a branch closes over.
            values = [tensors[place[id(leaf)]] if id(leaf) in place else leaf for leaf in flat]
            return fn(*pytree.tree_unflatten(values, spec))

        operands = [(f"operands[{k}]", t) for k, t in enumerate(distinct)]
        return trace_body(name, call, operands, around, trace)

    bodies = body("cond.true_fn", true_fn), body("cond.false_fn", false_fn)
    return Branches.of(around.recorder, pred, bodies).call()


def _check_predicate(pred: torch.Tensor) -> None:
    if under_transform():
        raise refusal(
            "`cond` runs inside of a `torch.func` transform",
            "use `torch.where`, or call the transform inside of the functions that it is given",
        )
    if not isinstance(pred, FunctionalTensor):
        raise refusal(f"the predicate of `cond` is a {type(pred).__name__}", "pass a plain tensor")


def _scan(
    combine: Callable[..., Any],
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    additional_inputs: Sequence[Any],
) -> tuple[Any, ...]:
    """`combine(*carry, *x)` for each slice of `xs`, one after the other."""
    carry = list(init)
    kept: list[Sequence[torch.Tensor]] = []
    for slices in zip(*(x.unbind(0) for x in xs), strict=True):
        carry_and_out = list(combine(*carry, *slices, *additional_inputs))
        carry = carry_and_out[: len(init)]
        kept.append(carry_and_out[len(init) :])
    return (*carry, *(torch.stack(list(column)) for column in zip(*kept, strict=True)))


def _map(fn: Callable[..., Any], xs: Sequence[torch.Tensor], args: Sequence[Any], **_: Any) -> Any:
    """`fn` of each slice of `xs`, the results stacked.

    What `fn` writes (torch 2.14 says it as `mutated_arg_indices`) are slices, and the trace sees it.
    """
    rows = [
        pytree.tree_flatten(fn(*slices, *args)) for slices in zip(*(x.unbind(0) for x in xs), strict=True)
    ]
    columns = zip(*(flat for flat, _ in rows), strict=True)
    return pytree.tree_unflatten([torch.stack(list(column)) for column in columns], rows[0][1])


_INLINED: Mapping[str, Callable[[HigherOrderOperator], Callable[..., Any]]] = {
    "scan": lambda _: _scan,
    "map_impl": lambda _: _map,
    "flex_attention": dense_rule,
    "hints_wrapper": dense_rule,
    "out_dtype": dense_rule,
    "wrap": dense_rule,
}
"""Operators that call what they are given a known number of times, among others that can be recorded."""

_FIXES: Mapping[str, str] = {
    "while_loop": "use `scan` or a Python loop of fixed length, or leave it out of the compiled function"
}
"""What to do instead, where that can be said."""
