"""Jagged tensors (`torch.jagged`): values, and offsets at which rows begin.

The size of the ragged dimension is a number of its own kind, a nested int, that equals itself alone: tensors
made with the same offsets have the same.
"""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import mb_unwrap_functional_tensor
from torch.nested._internal import nested_tensor, ops, sdpa
from torch.nested._internal.nested_int import NestedIntNode
from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor
from torch.nn.attention import SDPBackend

from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.patches import all_replaced_here
from aotdist.torch_seam.symbols import new_ragged

MAKES_JAGGED = torch.ops.aten._nested_view_from_jagged.default
"""Puts a jagged tensor around values and offsets: to autograd, a view of the values."""

EAGER_ATTENTION = sdpa.jagged_scaled_dot_product_attention
"""What `F.scaled_dot_product_attention` is for jagged tensors."""

_RAGGED_SIZES = WeakKeyDictionary[FakeTensorMode, dict[int, Any]]()
"""The ragged sizes of each mode's fakes, by number."""

_LENGTHS = WeakKeyDictionary[FakeTensorMode, dict[Any, Any]]()
"""The lengths of the shortest and longest rows that each mode's traces have read."""

Attend: TypeAlias = Callable[[Any, Any, Any, float, float | None], torch.Tensor]
"""Attention of query, key and value, with the probability of dropout, and the scale."""


def jagged_traced(attend: Attend) -> AbstractContextManager[None]:
    """In this context and thread, jagged tensors can be traced.

    Args:
        attend: what attention calls where eager would make strided nested tensors.
    """
    return all_replaced_here(
        (FakeTensorMode, "create_symbolic_nested_int", _ragged_size),
        (nested_tensor, "_nt_view_dummy", lambda original: _dummy_outside_of_traces()),
        (NestedTensor, "_get_max_seqlen", partial(_length, "max")),
        (NestedTensor, "_get_min_seqlen", partial(_length, "min")),
        (ops, "jagged_scaled_dot_product_attention", partial(_jagged_attention, attend)),
    )


def _ragged_size(original: Any, mode: FakeTensorMode, *, nt_tensor_id: int | None = None) -> Any:
    """The ragged size of fake offsets, as real ones have it: of that number, or a new one.

    In a mode with symbols it has one, which PyTorch gives to each tensor anew, and here to each number once.
    """
    sizes, number = _RAGGED_SIZES.setdefault(mode, {}), nt_tensor_id
    if number is None:
        with no_modes():  # PyTorch counts where it meets a real tensor
            number = nested_tensor.get_tensor_symint(torch.empty(0)).node.nested_int()
    if number not in sizes:
        size: Any = torch.SymInt(NestedIntNode(number, 1))
        sizes[number] = size if mode.shape_env is None else new_ragged(mode.shape_env, size)
    return sizes[number]


def _jagged_attention(
    attend: Attend,
    original: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if query.dim() <= 3 or query._ragged_idx != 1:  # else eager attends to dense rows
        cast = sdpa._autocast(query, key, value, attn_mask)
        sdpa._validate_sdpa_input(*cast, dropout_p, is_causal, scale)
        if sdpa._select_sdp_backend(*cast, dropout_p, is_causal, enable_gqa) == SDPBackend.MATH:
            return attend(*cast[:3], dropout_p, scale)
    return original(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _length(which: Literal["min", "max"], original: Any, jagged: NestedTensor) -> Any:
    """The length of the shortest or longest row: a number that is read off a tensor, once in a trace.

    Eager keeps it with the tensor, and with all that have the same rows, the caller's own among them.
    """
    offsets = mb_unwrap_functional_tensor(jagged._offsets)
    if f"{which}_seqlen" in jagged._metadata_cache or not isinstance(offsets, FakeTensor):
        return original(jagged)
    known, key = _LENGTHS.setdefault(offsets.fake_mode, {}), (which, rows_of(jagged))
    if key not in known:
        lengths = jagged._offsets.diff() if jagged._lengths is None else jagged._lengths
        known[key] = getattr(lengths, which)().item()
    return known[key]


@functools.cache
def _dummy_outside_of_traces() -> torch.Tensor:
    """A jagged tensor for `MAKES_JAGGED` to be dispatched by, which is no tensor of the program."""
    with no_modes(), torch.no_grad():
        with FakeTensorMode():
            values, offsets = torch.zeros(3, 3), torch.zeros(3, dtype=torch.int64)
        return NestedTensor(values, offsets)


def same_rows(values: torch.Tensor, like: Any) -> torch.Tensor:
    """A jagged tensor of `values`, whose rows are those of `like`."""
    return nested_tensor.nested_view_from_values_offsets_lengths(
        values,
        like.offsets(),
        like.lengths(),
        min_seqlen=like._maybe_min_seqlen,
        max_seqlen=like._maybe_max_seqlen,
    )


def share_ragged_size(fake: torch.Tensor, like: torch.Tensor) -> None:
    """Give a fake the ragged size of the offsets (or lengths) that it was made for, if these have one.

    Args:
        fake: of a plain tensor.
        like: the plain tensor: real, or one of the trace's.
    """
    known = mb_unwrap_functional_tensor(like)
    if isinstance(known, FakeTensor):
        fake.nested_int_memo = known.nested_int_memo
    elif (number := rows_of(known)) is not None:
        fake.nested_int_memo = fake.fake_mode.create_symbolic_nested_int(nt_tensor_id=number)


def rows_of(tensor: torch.Tensor) -> int | None:
    """A number that jagged tensors and offsets which belong together have in common; None for others."""
    known = nested_tensor._tensor_symint_registry
    size = tensor._size[tensor._ragged_idx] if isinstance(tensor, NestedTensor) else known.get(tensor)
    return None if size is None else size.node.nested_int()


def have_same_rows(*tensors: torch.Tensor) -> bool:
    """Whether jagged tensors, and offsets, belong together."""
    return len(set(map(rows_of, tensors))) == 1


def with_ragged_inferred(args: Sequence[Any]) -> list[Any]:
    """Arguments of a view, -1 in the place of each ragged size: it is that of the tensor which is viewed."""
    return [tuple(map(_inferred, each)) if isinstance(each, (list, tuple)) else each for each in args]


def _inferred(size: Any) -> Any:
    return -1 if is_ragged(size) else size


def is_ragged(size: Any) -> bool:
    """Whether a number is the size of a ragged dimension, or a multiple of it."""
    return isinstance(size, torch.SymInt) and size.node.is_nested_int()
