"""A sparse matrix in a trace: indices and values, with a constant layout and size.

It may be multiplied by dense matrices and transposed, as the backward of a product does; everything else is
refused. A graph has one operator for each product, `sparse_addmm`, which rebuilds the sparse matrix and calls
eager's kernel, so it has eager's bits.

Shapes: R rows and C columns; N stored values; F columns of the dense matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from aotdist.errors import UnsupportedProgram
from aotdist.origins import current_source_line
from aotdist.subclasses.own_operators import define
from aotdist.torch_seam.functional import stands_for_another
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.trees import pytree

_ATEN = torch.ops.aten

Form: TypeAlias = tuple[torch.layout, torch.Size, bool | None]
"""The constants: layout, size, and whether COO indices are coalesced; None for a mask, see `_as_mask`."""

FIX = (
    "multiply it by a dense matrix (`a @ x`, `torch.sparse.mm(a, x)`), or pass its indices and values: such "
    "a product is `zeros.index_add(0, row, values[:, None] * dense[column])`"
)
"""The fix for other sparse tensors and other operators."""


def is_sparse(tensor: object) -> bool:
    """Whether a tensor is sparse, and no stand-in of a trace (which has `SparseMatrix` for it)."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return _is_laid_out(tensor.layout) and not stands_for_another(tensor)  # type: ignore[attr-defined,arg-type]


def _is_laid_out(layout: torch.layout) -> bool:
    return layout is torch.sparse_coo or layout is torch.sparse_csr


OF_ROWS = ("_indices()[0]", "_values()")
"""Expressions for the parts of a sparse tensor of whole rows."""
SPARSE_PARTS = frozenset({*OF_ROWS, "_indices()", "crow_indices()", "col_indices()", "values()"})
"""Expressions for the parts of sparse tensors."""


def is_of_rows(tensor: Tensor) -> bool:
    """Whether a sparse tensor (no stand-in) consists of whole rows, as gradients of embeddings do."""
    with no_modes():
        return tensor.is_sparse and (tensor.sparse_dim(), tensor.dense_dim()) == (1, 1)


def rows_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers and rows."""
    return tensor._indices()[0], tensor._values()


def sparse_parts(tensor: Tensor) -> tuple[Mapping[str, Tensor], Form]:
    """The plain tensors of a sparse one, indices first, by the expression for each; and its form.

    Shapes: (2, N) indices of COO; (R + 1) and (N) of CSR; (N) values. For rows (N) indices, (N, D) values.
    """
    names = ("_indices", "_values") if tensor.is_sparse else ("crow_indices", "col_indices", "values")
    with no_modes(), torch.no_grad():
        parts: dict[str, Tensor] = {f"{name}()": getattr(tensor, name)() for name in names}
        if is_of_rows(tensor):
            parts = {name: part for name, part in zip(OF_ROWS, rows_of(tensor), strict=True)}
        return parts, (tensor.layout, tensor.shape, tensor.is_sparse and tensor.is_coalesced())


FORM_SOURCE = "({0}.layout, {0}.shape, {0}.is_sparse and {0}.is_coalesced())"
"""Python expression for the form of a sparse tensor."""


class SparseMatrix(Tensor):
    """The stand-in for a sparse matrix in a trace.

    Shapes: (R, C).
    """

    form: Form
    part_names: tuple[str, ...]
    called, remedy = "a matrix", FIX
    rules: Mapping[Any, Callable[..., Any]]
    """Implementations of operators; others are refused."""

    def __new__(cls, parts: Mapping[str, Tensor], form: Form) -> Self:
        """Wrap parts; see `sparse_parts`."""
        *_, values = parts.values()
        made: Any = Tensor._make_wrapper_subclass(
            cls, form[1], dtype=values.dtype, layout=form[0], device=values.device, dispatch_layout=True
        )
        made.form, made.part_names = form, tuple(parts)
        vars(made).update(parts)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Form]:
        return list(self.part_names), self.form

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Tensor], form: Form, *_size_and_stride: Any) -> Tensor:
        *_, values = inner.values()
        return cls(inner, form) if stands_for_another(values) else made_of([*inner.values()], form)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator.

        Raises:
            UnsupportedProgram: there is no rule for it.
        """
        rule = cls.rules.get(func)
        found = NotImplemented if rule is None else rule(*args, **(kwargs or {}))
        if found is NotImplemented:
            layout = next(each.form[0] for each in pytree.tree_leaves(args) if isinstance(each, cls))
            raise UnsupportedProgram(
                f"`{func}` is given {cls.called} of layout {layout}",
                where=current_source_line() or None,
                stage="joint",
                fix=cls.remedy,
            )
        return found

    def parts(self) -> dict[str, Tensor]:
        """Indices and values, by the expression for each."""
        return {name: vars(self)[name] for name in self.part_names}

    def stored(self) -> Tensor:
        """The values."""
        return vars(self)[self.part_names[-1]]

    def again(self) -> Self:
        """Another tensor of the same parts."""
        return type(self)(self.parts(), self.form)

    def layout_now(self) -> torch.layout:
        """The result of `.layout`."""
        return self.form[0]

    def is_in_order(self) -> bool:
        """The result of `.is_coalesced()`."""
        return self.form[2] is not False


def _transposed(matrix: SparseMatrix) -> SparseMatrix:
    """As in eager, COO indices are copied, and a CSR matrix becomes a CSC one."""
    (layout, size, _), parts = matrix.form, matrix.parts()
    if layout is torch.sparse_coo:
        return SparseMatrix(parts | {"_indices()": parts["_indices()"].flip(0)}, (layout, size[::-1], False))
    other = torch.sparse_csc if layout is torch.sparse_csr else torch.sparse_csr
    return SparseMatrix(parts, (other, size[::-1], False))


def _addmm(added: Tensor, matrix: Any, dense: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if not isinstance(matrix, SparseMatrix) or isinstance(dense, SparseMatrix):
        return NotImplemented
    *indices, values = matrix.parts().values()
    layout, size, is_coalesced = matrix.form
    if is_coalesced is None:
        return NotImplemented
    return _sparse_addmm(added, indices, values, size, layout, is_coalesced, dense, beta, alpha)


def _mm(matrix: Any, dense: Any) -> Tensor:
    return _addmm(dense.new_zeros((matrix.size(0), dense.size(1))), matrix, dense, beta=0)


def _as_mask(matrix: SparseMatrix) -> SparseMatrix:
    """`coalesce` in the backward of a product, which masks a dense gradient by the result; else refused."""
    layout, size, _ = matrix.form
    is_in_backward = matrix.requires_grad and not torch.is_grad_enabled()
    return SparseMatrix(matrix.parts(), (layout, size, None)) if is_in_backward else NotImplemented


def _masked(dense: Tensor, matrix: SparseMatrix) -> SparseMatrix:
    """The values of `dense` at the matrix's indices: the gradient of the matrix."""
    parts = matrix.parts()
    if isinstance(dense, SparseMatrix):
        return dense if dense.parts()["_indices()"] is parts["_indices()"] else NotImplemented
    row, column = parts["_indices()"]
    return SparseMatrix(parts | {"_values()": dense[row, column]}, matrix.form)


def _sum_of_masked(one: Any, other: Any) -> SparseMatrix:
    """The sum of two gradients of a matrix."""
    of_one, of_other = (each.parts() if isinstance(each, SparseMatrix) else {} for each in (one, other))
    if not of_one or of_one.get("_indices()") is not of_other.get("_indices()") or one.form[2] is not None:
        return NotImplemented
    return SparseMatrix(of_one | {"_values()": of_one["_values()"] + of_other["_values()"]}, one.form)


SparseMatrix.rules = {
    torch.ops.prim.layout.default: SparseMatrix.layout_now,
    _ATEN.is_coalesced.default: SparseMatrix.is_in_order,
    _ATEN.detach.default: SparseMatrix.again,
    _ATEN._coalesce.default: _as_mask,
    _ATEN.sparse_mask.default: _masked,
    _ATEN.add.Tensor: _sum_of_masked,
    _ATEN._values.default: SparseMatrix.stored,
    _ATEN.t.default: _transposed,
    _ATEN.mm.default: _mm,
    _ATEN.addmm.default: _addmm,
    _ATEN._sparse_addmm.default: _addmm,
}


def made_of(parts: Sequence[Tensor], form: Form) -> Tensor:
    """A sparse tensor of these parts; the inverse of `sparse_parts`."""
    *indices, values = parts
    layout, size, is_coalesced = form
    like: Any = {"dtype": values.dtype, "layout": layout, "device": values.device}
    if layout is not torch.sparse_coo:
        return _ATEN._sparse_compressed_tensor_unsafe.default(*indices, values, size, **like)
    (at,) = indices
    at = at[None] if at.dim() == 1 else at
    make = _ATEN._sparse_coo_tensor_with_dims_and_tensors.default
    return make(len(at), values.dim() - 1, size, at, values, is_coalesced=is_coalesced or None, **like)


def _run(
    added: Tensor,
    indices: Sequence[Tensor],
    values: Tensor,
    size: Sequence[int],
    layout: torch.layout,
    is_coalesced: bool,
    dense: Tensor,
    *by: float,
) -> Tensor:
    matrix = made_of([*indices, values], (layout, torch.Size(size), is_coalesced))
    beta, alpha = by
    return torch.addmm(added, matrix, dense, beta=beta, alpha=alpha)


def _like(added: Tensor, _: Any, values: Tensor, size: Sequence[int], *rest: Any) -> Tensor:
    return torch.addmm(added, values.new_empty(size), rest[2])


_sparse_addmm = define(
    "sparse_addmm(Tensor added, Tensor[] indices, Tensor values, int[] size, Layout layout, "
    "bool is_coalesced, Tensor dense, Scalar beta, Scalar alpha) -> Tensor",
    _run,
    _like,
)
