"""Jagged tensors as wrappers around values, offsets and cached lengths.

Their sizes follow from these parts, so recipes have no sizes: the ragged size is a symbol because the size of
the values is one, and tensors around the same offsets share it.

For their attention PyTorch has no kernel on CPUs: eager reads the lengths of the rows and makes a strided
nested tensor, which cannot be traced. So attention is one custom operator, `jagged_attention`, which runs
what eager runs, with the same bits; its backward runs the forward once more and differentiates that.

Shapes, of the operator: T the length of all rows together, H heads, E and F features: q and k (T, H, E), v
and result (T, H, F).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.own_operators import define
from aotdist.subclasses.protocol import Wrapper, WrapperRule, plain_tensors
from aotdist.torch_seam.classes import flatten_protocol
from aotdist.torch_seam.jagged import EAGER_ATTENTION, NestedTensor, jagged_traced, same_rows


def _run(q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, of_v: Tensor, scale: Any) -> Tensor:
    pairs = ((q, of_q), (k, of_k), (v, of_v))
    query, key, value = (
        nested_tensor_from_jagged(each.contiguous(), at).transpose(1, 2) for each, at in pairs
    )
    return EAGER_ATTENTION(query, key, value, scale=scale).transpose(1, 2).values()


def _differentiate(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    given = [each.detach().requires_grad_() for each in (q, k, v)]
    with torch.enable_grad():
        out = _run(*given, *rest)
    return tuple(each.contiguous() for each in torch.autograd.grad(out, given, grad))


def _like(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


def _grads_like(_grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in given[:3])


_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor of_q, Tensor of_k, Tensor of_v, float? scale"
_attention = define(f"jagged_attention({_GIVEN}) -> Tensor", _run, _like)
_attention_backward = define(
    f"jagged_attention_backward(Tensor grad, {_GIVEN}) -> (Tensor, Tensor, Tensor)",
    _differentiate,
    _grads_like,
)


class _Attention(torch.autograd.Function):
    passes_gradients_on = True

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *tensors, ctx.scale = given
        ctx.save_for_backward(*tensors)
        return _attention(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grads = _attention_backward(*grads, *ctx.saved_tensors, ctx.scale)
        return (*grads, None, None, None, None)


def _attend(query: Any, key: Any, value: Any, dropout: float, scale: float | None) -> Tensor:
    """Attention of jagged tensors, with the dimension of heads before that of rows; see `jagged_traced`.

    Raises:
        UnsupportedProgram: `dropout` is not 0.
    """
    if dropout:
        raise UnsupportedProgram(
            f"attention of jagged tensors drops weights (dropout_p={dropout}): PyTorch has no kernel",
            stage="joint",
            fix="leave `dropout_p` at 0.0, or drop what attention returns (`F.dropout`)",
        )
    rows = [each.transpose(1, 2) for each in (query, key, value)]
    values, offsets = [each.values() for each in rows], [each.offsets() for each in rows]
    return same_rows(_Attention.apply(*values, *offsets, scale), query).transpose(1, 2)


class _JaggedRule(WrapperRule):
    sized = False

    def owns(self, cls: type[torch.Tensor]) -> bool:
        return cls is NestedTensor

    def tracing(self) -> AbstractContextManager[None]:
        return jagged_traced(_attend)

    def context_of(self, tensor: torch.Tensor) -> Any:
        return flatten_protocol(tensor)

    def same_layout(self, a: Wrapper, b: Wrapper) -> bool:
        names = ([name for name, _ in recipe.attributes] for recipe in (a, b))
        return a.context["ragged_idx"] == b.context["ragged_idx"] and next(names) == next(names)

    def same_context_source(self, tensor: str, expected: str) -> str:
        return f"{tensor}.__tensor_flatten__() == {expected}"

    def compared(self, tensor: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
        values, offsets, *_ = plain_tensors(tensor)
        return (len(offsets) - 1, *values.shape), (0, *values.stride())

    def ragged_dims(self, tensor: torch.Tensor) -> frozenset[int]:
        return frozenset({self.context_of(tensor)[1]["ragged_idx"]})

    def dims_inside(self, recipe: Wrapper, name: str, dims: frozenset[int]) -> frozenset[int]:
        ragged = recipe.context["ragged_idx"]
        match name:
            case "_values":
                return frozenset(dim - 1 for dim in dims if dim)
            case "_offsets" | "_lengths":
                return dims & {0}
            case _:
                return frozenset({0} if ragged in dims else ())


WRAPPER_RULE = _JaggedRule()
