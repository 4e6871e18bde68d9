"""A sparse gradient in a trace: row numbers, and the gradients of these rows.

`nn.Embedding(sparse=True)` gives such gradients: COO tensors of whole rows. Optimizers coalesce them, read
state in their rows, and add them to dense tensors. The number of distinct rows depends on data. Operators
that sort or add up rows are single nodes in a graph: they rebuild the sparse tensor and call eager's kernel.

Shapes: V rows of D numbers in the dense tensor; N rows are stored, maybe several for one number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aotdist.errors import UnsupportedProgram
from aotdist.origins import current_source_line
from aotdist.subclasses.own_operators import define
from aotdist.subclasses.sparse_matrix import OF_ROWS, Form, SparseMatrix, made_of, rows_of
from aotdist.torch_seam.autograd import in_backward
from aotdist.torch_seam.operators import OpOverload, schema_of

_ATEN = torch.ops.aten


class SparseRows(SparseMatrix):
    """The stand-in for a sparse gradient in a trace.

    Attributes:
        is_given: whether it is an input of the program. A graph cannot write one, since a write may change
            the number of rows.
        num_writes: how often the program wrote it in place.

    Shapes: (V, D), of indices (N) and values (N, D).
    """

    is_given, num_writes = False, 0
    called = "a sparse gradient"
    remedy = (
        "compute with its `_indices()` and `_values()`, or with its `to_dense()`, or let it be dense "
        "(`nn.Embedding(..., sparse=False)`)"
    )

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Tensor], form: Form, *_size_and_stride: Any) -> Tensor:
        rows = super().__tensor_unflatten__(inner, form)
        if isinstance(rows, SparseRows):
            rows.is_given = True
        return rows

    @classmethod
    def of(
        cls, both: tuple[Tensor, Tensor], size: Sequence[int], *, is_coalesced: bool = False
    ) -> SparseRows:
        """From indices and values; a single row is coalesced, as in eager.

        Shapes: (N), (N, D).
        """
        form = (torch.sparse_coo, torch.Size(size), is_coalesced or _num_known(both[1]) in (0, 1))
        return SparseRows(dict(zip(OF_ROWS, both, strict=True)), form)

    @classmethod
    def of_bags(cls, grad: Tensor, *given: Any) -> SparseRows:
        """The gradient of an embedding bag, with the arguments of eager's operator."""
        *_, num_weights, _, _, _, _, _ = given = (*given, _NO_PADDING)[:11]
        return cls.of(_rows_of_bags(grad, *given), (num_weights, grad.shape[-1]))

    def new(self, indices: Tensor, values: Tensor, size: Sequence[int]) -> SparseRows:  # type: ignore[override]
        """Other rows."""
        return self.of((indices[0], values), size)

    def both(self) -> tuple[Tensor, Tensor]:
        """Indices and values."""
        indices, values = self.parts().values()
        return indices, values

    def indices_now(self) -> Tensor:
        """The result of `._indices()`."""
        return self.both()[0][None]

    def with_values(self, values: Tensor) -> SparseRows:
        """The same rows with other values."""
        return SparseRows(dict(zip(OF_ROWS, (self.both()[0], values), strict=True)), self.form)


def _coalesced(rows: SparseRows) -> SparseRows:
    size = rows.form[1]
    return SparseRows.of(_coalesce(*rows.both(), size), size, is_coalesced=True)


def _masked(dense: Tensor, rows: Any) -> SparseRows:
    if isinstance(dense, SparseRows):
        return NotImplemented
    return rows.with_values(dense.index_select(0, rows.both()[0]))


def _sum(one: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
    """A dense tensor or rows, plus rows; the result is a new contiguous tensor."""
    return _added_to(one if isinstance(one, SparseRows) else one.contiguous(), other, alpha=alpha)


def _added_to(one: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
    """A dense tensor or rows, plus rows; the result has the strides of the first."""
    if not isinstance(other, SparseRows) or (one.shape, one.dtype) != (other.shape, other.dtype):
        return NotImplemented
    *given, is_coalesced = (*other.both(), bool(other.form[2]))
    if not isinstance(one, SparseRows):
        return _add(one, *given, is_coalesced, alpha)
    if _num_known(one.stored()) == 0:
        return other if alpha == 1 else NotImplemented
    size, are_coalesced = one.form[1], [bool(one.form[2]), is_coalesced]
    added = _add_up(*one.both(), *given, size, *are_coalesced, alpha)
    return SparseRows.of(added, size, is_coalesced=all(are_coalesced))


def _difference(one: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
    return _sum(one, -other, alpha=alpha)


def _subtracted_from(one: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
    return _added_to(one, -other, alpha=alpha)


def _num_known(values: Tensor) -> int | None:
    """The number of rows; None if it is a symbol."""
    num: Any = values.shape[0]
    return num if isinstance(num, int) else None


def _overwritten(rows: SparseRows, new: Any) -> SparseRows:
    if rows.is_given:
        raise UnsupportedProgram(
            "a sparse tensor that the call is given is written in place",
            where=current_source_line() or None,
            stage="joint",
            fix="write a clone of it, and return that",
        )
    vars(rows).update(new.parts(), form=new.form, num_writes=rows.num_writes + 1)
    return rows


def _emptied(rows: SparseRows) -> SparseRows:
    indices, values = rows.both()
    none = indices.new_empty((0,)), values.new_empty((0, *values.shape[1:]))
    return _overwritten(rows, SparseRows.of(none, rows.form[1]))


def _dense(rows: SparseRows, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _sum(rows.stored().new_zeros(rows.form[1]), rows) if dtype is None else NotImplemented


def _norm(rows: SparseRows, p: Any = None, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    if len(dim) == 1 or keepdim:
        return NotImplemented
    each_once = rows if rows.is_in_order() else _coalesced(rows)
    return each_once.stored().norm(2 if p is None else p)


def _of_values(func: Any) -> Callable[..., Any]:
    """A rule that applies an operator to the values."""

    def rule(rows: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(rows, SparseRows) or any(isinstance(one, Tensor) and one.dim() for one in args):
            return NotImplemented
        return rows.with_values(func(rows.stored(), *args, **kwargs))

    return rule


def _in_place(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for the in-place variant of an operator."""

    def written(one: Any, *args: Any, **kwargs: Any) -> Any:
        new = rule(one, *args, **kwargs)
        if new is NotImplemented:
            return new
        return _overwritten(one, new) if isinstance(one, SparseRows) else one.copy_(new)

    return written


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for a `foreach` operator on a list of rows and dense tensors."""

    def rule(items: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor] | None:
        given = [[arg[at] if isinstance(arg, list) else arg for arg in args] for at in range(len(items))]
        made = [function(one, *others, **kwargs) for one, others in zip(items, given, strict=True)]
        return None if made[0] is items[0] else made

    return rule


_neg, _mul, _div = map(_of_values, (_ATEN.neg.default, _ATEN.mul.Tensor, _ATEN.div.Tensor))
SparseRows.rules = {
    torch.ops.prim.layout.default: SparseMatrix.layout_now,
    _ATEN.is_coalesced.default: SparseMatrix.is_in_order,
    _ATEN.detach.default: SparseMatrix.again,
    _ATEN.clone.default: _of_values(_ATEN.clone.default),
    _ATEN._coalesce.default: _coalesced,
    _ATEN._indices.default: SparseRows.indices_now,
    _ATEN.indices.default: SparseRows.indices_now,
    _ATEN._values.default: SparseMatrix.stored,
    _ATEN.values.default: SparseMatrix.stored,
    _ATEN.sparse_mask.default: _masked,
    _ATEN.add.Tensor: _sum,
    _ATEN.add_.Tensor: _in_place(_added_to),
    _ATEN.sub.Tensor: _difference,
    _ATEN.sub_.Tensor: _in_place(_subtracted_from),
    _ATEN.neg.default: _neg,
    _ATEN.mul.Tensor: _mul,
    _ATEN.mul_.Tensor: _in_place(_mul),
    _ATEN.div.Tensor: _div,
    _ATEN.div_.Tensor: _in_place(_div),
    _ATEN.zero_.default: _emptied,
    _ATEN._to_dense.default: _dense,
    _ATEN.norm.ScalarOpt_dim: _norm,
    _ATEN._foreach_neg.default: _each(torch.neg),
    _ATEN._foreach_add.List: _each(torch.add),
    _ATEN._foreach_add_.List: _each(Tensor.add_),
    _ATEN._foreach_mul_.Scalar: _each(Tensor.mul_),
}


def sparse_made(
    _func: Any,
    sparse_dim: int,
    dense_dim: int,
    size: Sequence[int],
    indices: Tensor,
    values: Tensor,
    *,
    is_coalesced: bool | None = None,
    **_options: Any,
) -> Tensor:
    """The stand-in for a COO tensor that a backward makes, or that is made of values with history."""
    if in_backward() and (sparse_dim, dense_dim) == (1, 1):
        return SparseRows.of((indices[0], values), size, is_coalesced=bool(is_coalesced))
    has_history = torch.is_grad_enabled() and values.requires_grad
    if not has_history or (sparse_dim, dense_dim) != (2, 0):
        return NotImplemented
    parts = {"_indices()": indices, "_values()": values}
    return SparseMatrix(parts, (torch.sparse_coo, torch.Size(size), bool(is_coalesced)))


def _tensor(indices: Tensor, values: Tensor, size: Sequence[int], is_coalesced: bool) -> Tensor:
    return made_of([indices, values], (torch.sparse_coo, torch.Size(size), is_coalesced))


def _run_add_(dense: Tensor, indices: Tensor, values: Tensor, is_coalesced: bool, alpha: Any) -> Tensor:
    return dense.add_(_tensor(indices, values, dense.shape, is_coalesced), alpha=alpha)


def _run_add(dense: Tensor, indices: Tensor, values: Tensor, is_coalesced: bool, alpha: Any) -> Tensor:
    return _run_add_(dense.clone(), indices, values, is_coalesced, alpha)


def _like_dense(dense: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(dense)


def _like_itself(dense: Tensor, *_rest: Any) -> Tensor:
    return dense


def _run_coalesce(indices: Tensor, values: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    rows = _tensor(indices, values, size, is_coalesced=False)
    found = rows.coalesce()
    return rows_of(found.clone() if found is rows else found)


def _run_sum(
    indices: Tensor,
    values: Tensor,
    others: Tensor,
    added: Tensor,
    size: Sequence[int],
    is_coalesced: bool,
    are_coalesced: bool,
    alpha: Any,
) -> tuple[Tensor, Tensor]:
    one = _tensor(indices, values, size, is_coalesced)
    return rows_of(torch.add(one, _tensor(others, added, size, are_coalesced), alpha=alpha))


def _unknown_rows(indices: Tensor, values: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    num = torch.library.get_ctx().new_dynamic_size()
    return indices.new_empty((num,)), values.new_empty((num, values.shape[1]))


def _run_bags(*given: Any) -> tuple[Tensor, Tensor]:
    return rows_of(_BAGS(*given))


def _rows_but_padding(grad: Tensor, indices: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    num = indices.numel() if rest[-1] == _NO_PADDING else torch.library.get_ctx().new_dynamic_size()
    return indices.new_empty((num,), dtype=torch.int64), grad.new_empty((num, grad.shape[-1]))


_BAGS, _NO_PADDING = _ATEN._embedding_bag_backward.default, -1
_OF_BAGS = schema_of(_BAGS).removeprefix(_BAGS.name()).rpartition("=-1")[0]
_ROWS = "(Tensor, Tensor)"
_ADDED = "Tensor indices, Tensor values, bool is_coalesced, Scalar alpha"
_add = define(f"sparse_rows_add(Tensor dense, {_ADDED}) -> Tensor", _run_add, _like_dense)
define(f"sparse_rows_add_(Tensor(a!) dense, {_ADDED}) -> Tensor(a!)", _run_add_, _like_itself)
_coalesce = define(
    f"sparse_rows_coalesce(Tensor indices, Tensor values, int[] size) -> {_ROWS}",
    _run_coalesce,
    _unknown_rows,
)
_add_up = define(
    "sparse_rows_sum(Tensor indices, Tensor values, Tensor others, Tensor added, int[] size, "
    f"bool is_coalesced, bool are_coalesced, Scalar alpha) -> {_ROWS}",
    _run_sum,
    _unknown_rows,
)
_rows_of_bags = define(f"rows_of_bags{_OF_BAGS}) -> {_ROWS}", _run_bags, _rows_but_padding)


def _added(dense: Tensor, indices: Tensor, values: Tensor, _is_coalesced: bool, alpha: Any) -> Tensor:
    return dense.index_put((indices,), values * alpha, accumulate=True)


ADDED_ROWS: Mapping[OpOverload, Callable[..., Any]] = {_add: _added}
"""The decomposition of adding rows to a dense tensor, for compilers."""
