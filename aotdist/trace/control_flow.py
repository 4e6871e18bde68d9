"""Operators that take functions: `torch.cond`, `scan`, `map`, and the others.

The branches of `cond` become graphs inside of the graph (`aotdist.trace.body`), two for the forward and two
for the backward: the predicate decides at run time which of two runs. Both branches take the same operands:
the arguments, and all tensors that either closes over. The backward recomputes a branch from the operands. An
operand that only the other branch uses gets zeros for its gradient, where eager leaves it without one.

Loops of a known length, `scan` and `map`, are unrolled: whatever holds of a Python loop holds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from aotdist.subclasses.protocol import Plain, tangent_recipe
from aotdist.torch_seam.functional import FunctionalTensor, functional_value
from aotdist.torch_seam.modes import under_transform
from aotdist.torch_seam.operators import HigherOrderOperator, dense_rule
from aotdist.torch_seam.trees import pytree
from aotdist.trace.body import Body, CutArgument, cut, trace_body
from aotdist.trace.context import TraceContext
from aotdist.trace.failures import refusal
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


_COND: Any = torch.ops.higher_order.cond


@dataclass(frozen=True, slots=True)
class Branches:
    """Two branches whose results agree in structure, sizes, strides and dtypes.

    Args:
        recorder: records the program around them.
        pred: the node of the boolean that decides which of them runs.
        bodies: the branch for true, and the one for false.
        operands: the tensors that they take.
    """

    recorder: Recorder
    pred: Node
    bodies: tuple[Body, Body]
    operands: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, recorder: Recorder, pred: torch.Tensor, bodies: tuple[Body, Body]) -> Branches:
        """The branches, checked.

        Raises:
            UnsupportedProgram: their results differ in structure, sizes, strides, dtypes or constants.
        """
        _check_alike(*bodies)
        operands = {id(tensor): tensor for body in bodies for _, tensor in body.operands()}
        return cls(recorder, recorder.value(pred), bodies, tuple(operands.values()))

    def call(self) -> Any:
        """Record the call; returns what the program gets from `torch.cond`."""
        tensors = list(self.operands)
        outs = Cond.apply(self, *tensors) if any(self.differentiable()) else self.forward(tensors)
        found = iter(outs)
        body = self.bodies[0]
        flat = [
            next(found) if is_tensor else c for is_tensor, c in zip(body.tensors, body.constants, strict=True)
        ]
        return pytree.tree_unflatten(flat, body.spec)

    def differentiable(self) -> list[bool]:
        """Which results have a gradient, in one branch at least."""
        return [a or b for a, b in zip(*(body.differentiable() for body in self.bodies), strict=True)]

    def forward(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Record the branches on the operands' `tensors`; returns the results."""
        graphs = [
            cut(body.joint, _arguments(body, self.operands, _values(tensors)), body.results())
            for body in self.bodies
        ]
        return self._record("branch", graphs, list(map(self.recorder.value, tensors)))

    def needed(self) -> list[torch.Tensor]:
        """The operands that gradients are computed from."""
        found: set[int] = set()
        for body in self.bodies:
            sources = body.joint.ancestors(body.gradients().values())
            found |= {i for i, node in body.arguments().items() if node in sources}
        return [operand for operand in self.operands if id(operand) in found]

    def backward(
        self, saved: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Record the gradients of the branches.

        Args:
            saved: the operands that are `needed`.
            tangents: one for each result; those of results without gradient are not used.

        Returns:
            the gradient of each operand; None where neither branch has one.
        """
        arriving = [_laid_out(tangents[k], stride) for k, stride in self._tangents()]
        gradients = [body.gradients() for body in self.bodies]
        wanted = [id(o) for o in self.operands if any(id(o) in found for found in gradients)]
        results = [_gradients(wanted, gradients, side) for side in (0, 1)]
        by_rows = [k for k, pair in enumerate(zip(*results, strict=True)) if _lie_differently(*pair)]
        graphs = [
            cut(
                body.joint,
                [
                    *_arguments(body, self.needed(), _values(saved)),
                    *zip(_values(arriving), (body.tangent(k) for k, _ in self._tangents()), strict=True),
                ],
                results[side],
                by_rows=by_rows,
            )
            for side, body in enumerate(self.bodies)
        ]
        recorded = self._record("gradients", graphs, list(map(self.recorder.value, (*saved, *arriving))))
        built = dict(zip(wanted, recorded, strict=True))
        return [built.get(id(operand)) for operand in self.operands]

    def _record(
        self, name: str, graphs: Sequence[GraphModule], operands: Sequence[Node]
    ) -> list[FunctionalTensor]:
        ends: Any = graphs[0].graph.output_node().args[0]
        if not ends:
            return []
        if_so, if_not = (
            self.recorder.attribute(f"{name}_{side}", graph)
            for side, graph in zip(("if_true", "if_false"), graphs, strict=True)
        )
        args = (self.pred, if_so, if_not, tuple(operands))
        return self.recorder.call(_COND, args, [end.meta["val"] for end in ends])

    def _tangents(self) -> list[tuple[int, tuple[int, ...]]]:
        """The positions of results with a gradient, each with the strides that its gradient is to have."""
        recipes = [out.recipe for out in self.bodies[0].traced.facts.node_outs]
        assumed = ((k, tangent_recipe(recipes[k])) for k, found in enumerate(self.differentiable()) if found)
        return [(k, tuple(recipe.stride)) for k, recipe in assumed if isinstance(recipe, Plain)]


class Cond(torch.autograd.Function):
    """The gradients of `Branches`."""

    @staticmethod
    def forward(ctx: Any, branches: Branches, *tensors: torch.Tensor) -> Any:
        """Record both branches."""
        outs = branches.forward(tensors)
        ctx.branches = branches
        needed = set(map(id, branches.needed()))
        pairs = zip(branches.operands, tensors, strict=True)
        ctx.save_for_backward(*(tensor for operand, tensor in pairs if id(operand) in needed))
        constant = [o for o, d in zip(outs, branches.differentiable(), strict=True) if not d]
        ctx.mark_non_differentiable(*constant)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        """Record the gradients of both."""
        return (None, *ctx.branches.backward(ctx.saved_tensors, tangents))


def _values(plains: Sequence[Any]) -> list[torch.Tensor]:
    return list(map(functional_value, plains))


def _arguments(
    body: Body, operands: Sequence[torch.Tensor], likes: Sequence[torch.Tensor]
) -> list[CutArgument]:
    nodes = body.arguments()
    return [(like, nodes.get(id(operand))) for operand, like in zip(operands, likes, strict=True)]


def _laid_out(plain: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if plain.stride() == stride:
        return plain
    return torch.empty_strided(plain.size(), stride, dtype=plain.dtype, device=plain.device).copy_(plain)


def _gradients(
    wanted: Sequence[int], gradients: Sequence[dict[int, Node]], side: int
) -> list[Node | torch.Tensor]:
    """One side's gradients of the operands that get one on either; zeros where it has none itself."""
    own, other = gradients[side], gradients[1 - side]
    return [own[i] if i in own else other[i].meta["val"] for i in wanted]


def _lie_differently(a: Node | torch.Tensor, b: Node | torch.Tensor) -> bool:
    first, second = (end.meta["val"] if isinstance(end, Node) else end for end in (a, b))
    zeros = not (isinstance(a, Node) and isinstance(b, Node))
    return first.stride() != second.stride() or (zeros and not first.is_contiguous())


def _check_alike(true: Body, false: Body) -> None:
    """Raise unless two branches return the same structure of equal constants and tensors of equal metadata.

    Raises:
        UnsupportedProgram: they differ.
    """
    advice = "let both return the same structure of tensors of the same size, strides and type"
    if true.spec != false.spec or true.tensors != false.tensors:
        raise refusal(f"the branches of `cond` return {true.spec} and {false.spec}", advice)
    if true.constants != false.constants:
        raise refusal(
            f"the branches of `cond` return the constants {true.constants} and {false.constants}",
            "let both return a tensor in their place",
        )
    outs = zip(true.traced.facts.node_outs, false.traced.facts.node_outs, strict=True)
    for position, (a, b) in enumerate(outs):
        if a.recipe != b.recipe:
            raise refusal(f"result {position} of the branches of `cond` is {a.recipe} and {b.recipe}", advice)
    for position, (a, b) in enumerate(zip(true.results(), false.results(), strict=True)):
        if a.meta["val"].device != b.meta["val"].device:
            raise refusal(f"result {position} of the branches of `cond` is on two devices", advice)
