"""Operators that take functions: `torch.cond`, `scan`, `map`, and the others.

The branches of `cond` become graphs inside of the graph (`aotdist.trace.body`): the predicate decides at run
time which of the two runs. Both take the same operands: the arguments, and all tensors that either closes
over. The gradient of a `cond` is a `cond` of two functions from operands and tangents to gradients, each of
which runs its branch again, and autograd behind it. An operand that only the other branch uses gets zeros for
its gradient, where eager leaves it without one.

Loops of a known length, `scan` and `map`, are unrolled: whatever holds of a Python loop holds of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from aotdist.subclasses.protocol import Plain, recipe_of, tangent_recipe
from aotdist.torch_seam.functional import FunctionalTensor, functional_value
from aotdist.torch_seam.modes import under_transform
from aotdist.torch_seam.operators import HigherOrderOperator, dense_rule
from aotdist.torch_seam.trees import pytree
from aotdist.trace.body import Body, Operand, trace_body
from aotdist.trace.context import TraceContext
from aotdist.trace.failures import naming_failures_of_backward, refusal
from aotdist.trace.recorder import Recorder

if TYPE_CHECKING:
    from aotdist.trace.trace import Traced


def call_higher_order(
    around: TraceContext,
    trace: Callable[..., Traced],
    op: HigherOrderOperator,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    capture_mode: AbstractContextManager[Any],
) -> Any:
    """What `op(*args, **kwargs)` returns in the program `around` it; what it calls runs in `capture_mode`.

    Raises:
        UnsupportedProgram: it cannot be recorded.
    """
    match op.name():
        case "cond":
            return _cond(around, trace, *args)
        case name if name in _INLINED:
            with capture_mode:
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

    def of_operands(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: torch.Tensor) -> Any:
            # Dynamo hands over the numbers too that a branch closes over.
            values = [tensors[place[id(leaf)]] if id(leaf) in place else leaf for leaf in flat]
            return fn(*pytree.tree_unflatten(values, spec))

        return call

    functions = list(map(of_operands, (true_fn, false_fn)))
    operands = [(f"operands[{k}]", t) for k, t in enumerate(distinct)]
    bodies, recorder = _trace_both(functions, operands, around, trace), around.recorder
    branches = Branches.of(recorder, "branch", recorder.value(pred), bodies)
    if any(branches.requires_grad()):
        gradients = _gradients(branches, functions, around, trace)
        return branches.returned(Cond.apply(branches, gradients, *branches.operands))
    return branches.returned(branches.record(branches.operands))


def _trace_both(
    functions: Iterable[Callable[..., Any]],
    operands: Sequence[Operand],
    around: TraceContext,
    trace: Callable[..., Traced],
) -> tuple[Body, Body]:
    if_true, if_false = functions
    return (
        trace_body("cond.true_fn", if_true, operands, around, trace),
        trace_body("cond.false_fn", if_false, operands, around, trace),
    )


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


_COND: Any = torch.ops.higher_order.cond


@dataclass(frozen=True, slots=True)
class Branches:
    """Two branches whose results agree in structure, sizes, strides and dtypes.

    Args:
        recorder: records the program around them.
        name: of their graphs.
        pred: the node of the boolean that decides which of them runs.
        bodies: the branch for true, and the one for false.
        operands: the tensors that they take.
    """

    recorder: Recorder
    name: str
    pred: Node
    bodies: tuple[Body, Body]
    operands: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, recorder: Recorder, name: str, pred: Node, bodies: tuple[Body, Body]) -> Branches:
        """The branches, which take all that either takes.

        Raises:
            UnsupportedProgram: their results differ in structure, sizes, strides, dtypes or constants.
        """
        _check_alike(*bodies)
        operands = {id(tensor): tensor for body in bodies for _, tensor in body.operands}
        return cls(recorder, name, pred, bodies, tuple(operands.values()))

    def requires_grad(self) -> list[bool]:
        """Which results have a gradient, in one branch at least."""
        return list(map(any, zip(*(body.requires_grad for body in self.bodies), strict=True)))

    def reads(self) -> set[int]:
        """The identities of the operands that one of them computes with."""
        return self.bodies[0].reads() | self.bodies[1].reads()

    def record(self, tensors: Sequence[Any]) -> list[FunctionalTensor]:
        """Record a call with these traced tensors as the operands; returns the tensors among the results."""
        likes = self.bodies[0].results()
        if not likes:
            return []
        values = list(map(functional_value, tensors))
        graphs = (
            self.recorder.attribute(f"{self.name}_{side}", body.module(self.operands, values))
            for side, body in zip(("if_true", "if_false"), self.bodies, strict=True)
        )
        nodes = tuple(map(self.recorder.value, tensors))
        return self.recorder.call(_COND, (self.pred, *graphs, nodes), likes)

    def returned(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the program gets, with these tensors in it."""
        made, body = iter(tensors), self.bodies[0]
        leaves = [next(made) if isinstance(leaf, Plain) else leaf for leaf in body.leaves]
        return pytree.tree_unflatten(leaves, body.spec)


def _gradients(
    branches: Branches,
    functions: Sequence[Callable[..., Any]],
    around: TraceContext,
    trace: Callable[..., Traced],
) -> Branches:
    """The gradients of the operands, None for those without one, as branches: each runs its function again.

    They take the operands of `branches`, then a gradient for each result that has one.

    Args:
        branches: whose gradients.
        functions: the function of each, of the operands.
        around: the trace of the program.
        trace: as for `trace_body`.
    """
    names = {id(tensor): name for body in branches.bodies for name, tensor in body.operands}
    operands = [(names[id(tensor)], tensor) for tensor in branches.operands]
    has_grad = branches.requires_grad()
    for position, result in enumerate(branches.bodies[0].results()):
        if has_grad[position]:
            like = tangent_recipe(recipe_of(result))
            assert isinstance(like, Plain), "results are plain tensors"
            operands.append((f"tangents[{position}]", branches.recorder.fake_like(like, result.device)))
    by_rows: frozenset[int] = frozenset()
    while True:
        of_each = (_gradient_of(each, has_grad, len(branches.operands), by_rows) for each in functions)
        bodies = _trace_both(of_each, operands, around, trace)
        pairs = zip(*(body.leaves for body in bodies), strict=True)
        if not (differ := {position for position, (a, b) in enumerate(pairs) if a != b}):
            return Branches.of(branches.recorder, "gradients", branches.pred, bodies)
        by_rows = by_rows | differ


def _gradient_of(
    function: Callable[..., Any], has_grad: Sequence[bool], num_operands: int, by_rows: Container[int]
) -> Callable[..., list[torch.Tensor | None]]:
    """A function from operands and tangents to the operands' gradients.

    Args:
        function: of the operands.
        has_grad: which of its results have a tangent.
        num_operands: the tangents follow these.
        by_rows: positions of gradients to return contiguous, and as zeros if there is none.
    """

    def gradient(*given: torch.Tensor) -> list[torch.Tensor | None]:
        operands, tangents = given[:num_operands], iter(given[num_operands:])
        leaves = pytree.tree_leaves(function(*operands))
        results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        arriving = [next(tangents) if has else None for has in has_grad]
        ends = [pair for pair in zip(results, arriving, strict=True) if pair[0].requires_grad]
        wanted = [operand for operand in operands if operand.requires_grad]
        found: Iterator[torch.Tensor | None] = iter([None] * len(wanted))
        if ends and wanted:
            outs, first = zip(*ends, strict=True)
            with naming_failures_of_backward(of_assumed=True):
                found = iter(torch.autograd.grad(outs, wanted, first, allow_unused=True))
        grads = [next(found) if operand.requires_grad else None for operand in operands]
        return [
            _by_rows(grad, operand) if position in by_rows else grad
            for position, (grad, operand) in enumerate(zip(grads, operands, strict=True))
        ]

    return gradient


def _by_rows(grad: torch.Tensor | None, operand: torch.Tensor) -> torch.Tensor:
    if grad is None:
        return torch.zeros(operand.shape, dtype=operand.dtype, device=operand.device)
    return grad.contiguous()


class Cond(torch.autograd.Function):
    """Branches with gradients."""

    @staticmethod
    def forward(ctx: Any, branches: Branches, gradients: Branches, *tensors: torch.Tensor) -> Any:
        """Record the branches."""
        outs = branches.record(tensors)
        ctx.gradients, ctx.has_grad, reads = gradients, branches.requires_grad(), gradients.reads()
        ctx.is_saved = [id(operand) in reads for operand in branches.operands]
        ctx.save_for_backward(*itertools.compress(tensors, ctx.is_saved))
        ctx.mark_non_differentiable(*(out for out, has in zip(outs, ctx.has_grad, strict=True) if not has))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        """Record their gradients.

        Raises:
            UnsupportedProgram: these are to be differentiated in turn.
        """
        if torch.is_grad_enabled():
            raise refusal(
                "gradients of a `cond` are to be differentiated in turn (`create_graph=True`)",
                "choose by `torch.where`, or compute what is differentiated twice outside of the branches",
            )
        gradients: Branches = ctx.gradients
        num_operands = len(ctx.is_saved)
        tangent_operands = gradients.operands[num_operands:]
        arriving = itertools.compress(tangents, ctx.has_grad)
        laid_out = [_laid_out(*pair) for pair in zip(arriving, tangent_operands, strict=True)]
        saved = list(itertools.compress(gradients.operands[:num_operands], ctx.is_saved))
        with_needed = replace(gradients, operands=(*saved, *tangent_operands))
        return None, None, *gradients.returned(with_needed.record([*ctx.saved_tensors, *laid_out]))


def _laid_out(plain: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if plain.stride() == like.stride():
        return plain
    return torch.empty_strided(plain.size(), like.stride(), dtype=plain.dtype, device=plain.device).copy_(
        plain
    )


def _check_alike(true: Body, false: Body) -> None:
    """Raise unless two branches return the same structure of equal constants and tensors of equal metadata.

    Raises:
        UnsupportedProgram: they differ.
    """
    advice = "let both return the same structure of tensors of the same size, strides and type"
    are_tensors = [[isinstance(leaf, Plain) for leaf in body.leaves] for body in (true, false)]
    if true.spec != false.spec or are_tensors[0] != are_tensors[1]:
        raise refusal(f"the branches of `cond` return {true.spec} and {false.spec}", advice)
    constants = [
        tuple(None if isinstance(leaf, Plain) else leaf for leaf in body.leaves) for body in (true, false)
    ]
    if constants[0] != constants[1]:
        raise refusal(
            f"the branches of `cond` return the constants {constants[0]} and {constants[1]}",
            "let both return a tensor in their place",
        )
    recipes = ((leaf for leaf in body.leaves if isinstance(leaf, Plain)) for body in (true, false))
    for position, (a, b) in enumerate(zip(*recipes, strict=True)):
        if a != b:
            raise refusal(f"result {position} of the branches of `cond` is {a} and {b}", advice)
    for position, (a, b) in enumerate(zip(true.results(), false.results(), strict=True)):
        if a.device != b.device:
            raise refusal(f"result {position} of the branches of `cond` is on two devices", advice)
