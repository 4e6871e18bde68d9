"""Functions of linear algebra that compute otherwise for what is no plain tensor, as in a trace nothing is.

They would compute vectors along with the values that are asked for, by another algorithm, which rounds
otherwise; and leave `out=` as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from aotdist.torch_seam.operators import with_defaults

_VALUES_ALONE: ContextVar[bool] = ContextVar("values_alone", default=False)
_DECOMPOSITIONS = frozenset({torch.ops.aten._linalg_svd.default, torch.ops.aten._linalg_eigh.default})
"""The third argument of each asks for the vectors."""


def _of_values(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what needs singular values or eigenvalues only."""
    token = _VALUES_ALONE.set(True)
    try:
        return function(*args, **kwargs)
    finally:
        _VALUES_ALONE.reset(token)


def _matrix_rank(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    rank = _of_values(torch.linalg.matrix_rank, *args, **kwargs)
    return torch.mul(rank, 1, out=torch.empty_like(rank) if out is None else out)


_OF_VALUES = (
    torch.linalg.cond,
    torch.linalg.eigvalsh,
    torch.linalg.matrix_norm,
    torch.linalg.norm,
    torch.linalg.svdvals,
    torch.norm,
    torch.nuclear_norm,
)

INSTEAD: Mapping[Any, Callable[..., Any]] = {
    **{function: functools.partial(_of_values, function) for function in _OF_VALUES},
    torch.linalg.matrix_rank: _matrix_rank,
}
"""What is called in a trace for PyTorch's functions."""


def without_vectors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """A decomposition that computes no vectors, where eager computes none: no gradient needs them."""
    if func not in _DECOMPOSITIONS or not _VALUES_ALONE.get():
        return None
    if args[0].requires_grad and torch.is_grad_enabled():
        return None
    matrix, how, with_vectors = with_defaults(func, args, kwargs)
    return functools.partial(func, matrix, how, False, **kwargs) if with_vectors else None
