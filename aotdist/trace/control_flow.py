"""Operators that are handed functions: `torch.cond`, `while_loop`, `scan`, `map`, and the others.

What depends on data becomes graphs inside of the graph (`aotdist.trace.body`). Loops of a length that is
known, `scan` and `map`, are unrolled: whatever holds of a Python loop holds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.subclasses.protocol import leaves, plain_tensors, rebuild
from aotdist.torch_seam.functional import FunctionalTensor, functional_value
from aotdist.torch_seam.modes import under_transform
from aotdist.torch_seam.operators import HigherOrderOperator, dense_rule
from aotdist.torch_seam.trees import pytree
from aotdist.trace.body import Body, CutArgument, Enclosing, Operand, cut, trace_body
from aotdist.trace.branches import Branches
from aotdist.trace.failures import refusal
from aotdist.trace.recorder import Recorder

_WHILE_LOOP: Any = torch.ops.higher_order.while_loop


@dataclass(frozen=True, slots=True)
class ControlFlow:
    """What becomes of the control flow in a program that is being traced.

    Args:
        around: the program that is being traced.
    """

    around: Enclosing

    def __call__(
        self,
        op: HigherOrderOperator,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        lifting: AbstractContextManager[Any],
    ) -> Any:
        """What `op(*args, **kwargs)` returns; what it calls itself runs in `lifting`."""
        match op.name():
            case "cond":
                return self._cond(*args)
            case "while_loop":
                return self._while_loop(*args)
            case name if name in _INLINED:
                with lifting:
                    return _INLINED[name](op)(*args, **kwargs)
            case "custom_function_call":  # an `autograd.Function` inside of a `torch.func` transform
                return op(*args, **kwargs)
            case name:
                raise refusal(
                    f"the program calls the higher-order operator `{name}`",
                    "call what it is given directly, or leave that part out of the compiled function",
                )

    def _body(
        self, name: str, fn: Callable[..., Any], operands: Sequence[Operand], *, training: bool
    ) -> Body:
        may_write = name.startswith("cond.")
        return trace_body(name, fn, operands, self.around, training=training, may_write=may_write)

    def _cond(
        self, pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], given: Sequence[Any]
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

            operands = [Operand(f"operands[{k}]", t) for k, t in enumerate(distinct)]
            return self._body(name, call, operands, training=torch.is_grad_enabled())

        bodies = body("cond.true_fn", true_fn), body("cond.false_fn", false_fn)
        return Branches.of(self.around.recorder, pred, bodies).call()

    def _while_loop(
        self,
        cond_fn: Callable[..., Any],
        body_fn: Callable[..., Any],
        carried: Sequence[Any],
        more: Sequence[Any],
    ) -> Any:
        _refuse_transforms("while_loop")
        number = next((value for value in carried if not isinstance(value, torch.Tensor)), None)
        if number is not None:
            raise refusal(f"`while_loop` carries the number {number}", "carry a tensor: `torch.tensor(n)`")
        # A tensor may be carried twice, or closed over too, and differ after a step: each is one of its own.
        given = [*carried, *more]
        places = [k for k, value in enumerate(given) if isinstance(value, torch.Tensor)]
        own = [Operand(f"carried[{k}]", given[k].view_as(given[k])) for k in places]

        def with_numbers(fn: Callable[..., Any]) -> Callable[..., Any]:
            def call(*tensors: torch.Tensor) -> Any:
                at = dict(zip(places, tensors, strict=True))
                return fn(*(at.get(k, value) for k, value in enumerate(given)))

            return call

        test = self._body("while_loop.cond_fn", with_numbers(cond_fn), own, training=False)
        step = self._body("while_loop.body_fn", with_numbers(body_fn), own, training=False)
        operands = list({id(o.tensor): o for body in (test, step) for o in body.operands()}.values())
        _refuse_gradients(operands)
        _check_loop(own[: len(carried)], test, step)
        return _record_loop(self.around.recorder, operands, len(carried), test, step)


def _record_loop(
    recorder: Recorder, operands: Sequence[Operand], num_carried: int, test: Body, step: Body
) -> Any:
    plains = [plain_tensors(operand.tensor) for operand in operands]
    flat = [plain for of_one in plains for plain in of_one]
    split = sum(map(len, plains[:num_carried]))
    nodes = [recorder.value(plain) for plain in flat]
    graphs: list[Any] = []
    for name, body in (("loop_test", test), ("loop_step", step)):
        found = body.arguments()
        stands_for = [
            node
            for operand, of_one in zip(operands, plains, strict=True)
            for node in found.get(id(operand.tensor), [None] * len(of_one))
        ]
        arguments = [
            CutArgument(functional_value(plain), node)  # type: ignore[arg-type]
            for plain, node in zip(flat, stands_for, strict=True)
        ]
        part = cut(body.joint, arguments, body.results(), body.effects(), alone=body is test)
        graphs.append(recorder.attribute(name, part))
    likes = [node.meta["val"] for node in step.results()]
    args = (*graphs, tuple(nodes[:split]), tuple(nodes[split:]))
    remaining = iter(recorder.call(_WHILE_LOOP, args, likes, draws=test.draws() or step.draws()))
    outs = [rebuild(recipe, [next(remaining) for _ in leaves(recipe)]) for recipe in step.recipes()]
    return pytree.tree_unflatten(outs, step.spec)


def _check_loop(carried: Sequence[Operand], test: Body, step: Body) -> None:
    if len(test.results()) != 1 or test.results()[0].meta["val"].dtype is not torch.bool:
        raise refusal(
            "`while_loop.cond_fn` does not return one boolean", "return a boolean tensor of one element"
        )
    given = [operand.tensor for operand in carried]
    before = [(tuple(p.size()), p.stride(), p.dtype) for tensor in given for p in plain_tensors(tensor)]
    values = [node.meta["val"] for node in step.results()]
    after = [(tuple(val.size()), val.stride(), val.dtype) for val in values]
    if before != after or not all(step.tensors):
        raise refusal(
            f"`while_loop.body_fn` takes tensors of (size, strides, type) {before} and returns {after}",
            "return tensors like the ones that it takes; `contiguous()` settles strides",
        )


def _refuse_gradients(operands: Sequence[Operand]) -> None:
    for operand in operands:
        if torch.is_grad_enabled() and operand.tensor.requires_grad:
            raise refusal(
                f"`while_loop` works on a tensor that requires grad ({operand.name}), and how many steps its "
                "backward has to keep depends on data",
                "use `scan` or a Python loop of fixed length, or call it under `torch.no_grad()`",
            )


def _check_predicate(pred: torch.Tensor) -> None:
    _refuse_transforms("cond")
    if not isinstance(pred, FunctionalTensor):
        raise refusal(f"the predicate of `cond` is a {type(pred).__name__}", "pass a plain tensor")


def _refuse_transforms(name: str) -> None:
    if under_transform():
        raise refusal(
            f"`{name}` runs inside of a `torch.func` transform",
            "use `torch.where`, or call the transform inside of the functions that it is given",
        )


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
