"""`Sparse24Tensor`: a matrix of which two in every four neighbours are stored.

It is made of plain tensors, as `sparse24_packing` describes them, and taken apart into them before a graph::

    packed, meta        the matrix in groups along its rows
    packed_t, meta_t    the transposed matrix in groups along *its* rows

Either pair may be missing, not both. A product wants groups along the dimension that it sums over: a linear
layer's forward takes `packed`, its input's gradient takes `packed_t`, which only a transposable mask allows.
Where the pair that a product wants is missing, the matrix is unpacked and the product is a dense one.

Stored are 9/16 of the bytes of a dense 16-bit matrix a pair, 17/32 of a 32-bit one.

`sparsify` makes one of a dense matrix, in the middle of a training step if need be: it is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import torch
from torch.sparse import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.sparse24_operators import (
    choose_24,
    compress_24,
    linear_24,
    mask_24,
    mm_24,
    transpose_24,
    unpack_24,
)
from aotdist.subclasses.sparse24_packing import (
    MaskKind,
    bytes_of_cutlass_words,
    cutlass_words,
    require_packable,
)
from aotdist.torch_seam import OpOverload

Gradient: TypeAlias = Literal["straight-through", "masked"]

_PARTS = ("packed", "meta", "packed_t", "meta_t")
_aten = torch.ops.aten


class Sparse24Tensor(torch.Tensor):
    """A 2:4 matrix; `to_dense` unpacks it. `t()`, `@`, `linear`, copies and casts work on the packed form.

    Shapes: (R, C); `packed` (R, C / 2) and `meta` (R, C / 8) uint8; `packed_t` (C, R / 2) and `meta_t`
    (C, R / 8) uint8.
    """

    packed: torch.Tensor | None
    meta: torch.Tensor | None
    packed_t: torch.Tensor | None
    meta_t: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type[Sparse24Tensor],
        packed: torch.Tensor | None,
        meta: torch.Tensor | None,
        packed_t: torch.Tensor | None = None,
        meta_t: torch.Tensor | None = None,
    ) -> Sparse24Tensor:
        """Wrap packed parts; see the class for their shapes."""
        if packed is not None:
            rows, columns = packed.size(0), 2 * packed.size(1)
            values, stride = packed, (columns, 1)
        else:
            assert packed_t is not None, "one of the two packings has to be there"
            rows, columns = 2 * packed_t.size(1), packed_t.size(0)
            values, stride = packed_t, (1, rows)
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            cls, (rows, columns), strides=stride, dtype=values.dtype, device=values.device
        )
        tensor.packed, tensor.meta, tensor.packed_t, tensor.meta_t = packed, meta, packed_t, meta_t
        return tensor

    @classmethod
    def from_choice(cls, dense: torch.Tensor, meta: torch.Tensor, *, both: bool = False) -> Sparse24Tensor:
        """What `meta` keeps of `dense`.

        Args:
            dense: Shapes: (R, C).
            meta: Shapes: (R, C / 8) uint8.
            both: whether to pack it along the columns as well, if the mask is transposable.
        """
        packed = compress_24(dense, meta)
        if not both:
            return cls(packed, meta)
        meta_t = transpose_24(meta)
        return cls(packed, meta, compress_24(dense.t(), meta_t), meta_t)

    @classmethod
    def from_semi_structured(cls, tensor: SparseSemiStructuredTensor) -> Sparse24Tensor:
        """The same matrix out of PyTorch's class.

        CUTLASS's layout is reordered, on any device. cuSPARSELt's is opaque, and so is that of PyTorch's
        pruning
        kernel: such a matrix is unpacked by a product, on its GPU, and packed anew.
        """
        words = (tensor.meta, tensor.meta_t)
        in_rows = isinstance(tensor, SparseSemiStructuredTensorCUTLASS)
        if not in_rows or any(part is not None and part.dim() != 2 for part in words):
            dense = tensor.to_dense()
            return cls.from_choice(dense, choose_24(dense))
        meta, meta_t = (None if w is None else bytes_of_cutlass_words(w, tensor.dtype) for w in words)
        return cls(tensor.packed, meta, tensor.packed_t, meta_t)

    def to_semi_structured(self, backend: Literal["cutlass", "cusparselt"]) -> SparseSemiStructuredTensor:
        """The same matrix as PyTorch's class, for CUTLASS (on any device) or cuSPARSELt (on a GPU).

        Raises:
            UnsupportedProgram: CUTLASS has no layout for this size or dtype.
        """
        if backend == "cusparselt":
            return SparseSemiStructuredTensorCUSPARSELT.from_dense(self.to_dense())
        meta, meta_t = (None if m is None else cutlass_words(m, self.dtype) for m in (self.meta, self.meta_t))
        make: Any = SparseSemiStructuredTensorCUTLASS  # to type checkers, it has no constructor of its own
        return make(self.shape, self.packed, meta, self.packed_t, meta_t, compressed_swizzled_bitmask=None)

    def to_dense(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The dense matrix; arguments are those of `torch.Tensor.to_dense`, and ignored."""
        if self.packed is not None and self.meta is not None:
            return unpack_24(self.packed, self.meta)
        assert self.packed_t is not None and self.meta_t is not None
        return unpack_24(self.packed_t, self.meta_t).t()

    def mask(self) -> torch.Tensor:
        """What is kept. Shapes: -> (R, C) bool."""
        if self.meta is not None:
            return mask_24(self.meta)
        assert self.meta_t is not None
        return mask_24(self.meta_t).t()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in self.parts().values())

    def parts(self) -> dict[str, torch.Tensor]:
        """The plain tensors that it is made of, by name."""
        return {name: part for name in _PARTS if (part := getattr(self, name)) is not None}

    def __repr__(self, *, tensor_contents: object = None) -> str:
        kept = ", ".join(f"{name}={tuple(part.shape)}" for name, part in self.parts().items())
        return f"Sparse24Tensor(size={tuple(self.shape)}, dtype={self.dtype}, {kept})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Which parts there are."""
        return list(self.parts()), None

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> Sparse24Tensor:
        """Put the parts together again."""
        return cls(*(parts.get(name) for name in _PARTS))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on the packed form.

        Raises:
            UnsupportedProgram: it is not defined for a 2:4 matrix.
        """
        handler = _HANDLERS.get(func)
        if handler is None:
            raise UnsupportedProgram(
                f"`{func}` is not defined for a Sparse24Tensor", fix="unpack it first: `tensor.to_dense()`"
            )
        return handler(func, *args, **(kwargs or {}))


def sparsify(
    dense: torch.Tensor,
    mask: MaskKind = "row",
    *,
    meta: torch.Tensor | None = None,
    gradient: Gradient = "straight-through",
    decay: float = 0.0,
) -> Sparse24Tensor:
    """The 2:4 part of a dense matrix, chosen by magnitude, now; differentiable.

    The gradient that reaches `dense` is that of the 2:4 matrix: all of it (`straight-through`: what was
    dropped learns as if it had been kept, and may be chosen again), or the kept half (`masked`). `decay` adds
    `decay * dense` to the gradient where nothing was kept, so that a choice settles.

    Args:
        dense: to choose from. Shapes: (R, C), C a multiple of 8; R too if `mask` is "transposable".
        mask: "row", or "transposable": then both `W` and `W.T` are 2:4, and packed.
        meta: metadata of an earlier choice, to be kept to; None chooses. Shapes: (R, C / 8) uint8.
        gradient: what the gradient is.
        decay: lambda of SR-STE.

    Raises:
        UnsupportedProgram: `dense` cannot be packed.

    Source: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch" (SR-STE),
    arXiv:2102.04010, section 3.2.
    """
    require_packable(dense, mask)
    return cast(Sparse24Tensor, _Sparsify.apply(dense, mask, meta, gradient, decay))


class _Sparsify(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        dense: torch.Tensor,
        mask: MaskKind,
        meta: torch.Tensor | None,
        gradient: Gradient,
        decay: float,
    ) -> Sparse24Tensor:
        both = mask == "transposable"
        meta = choose_24(dense, transposable=both) if meta is None else meta
        sparse = Sparse24Tensor.from_choice(dense, meta, both=both)
        ctx.gradient, ctx.decay = gradient, decay
        ctx.save_for_backward(meta, dense if decay else None)
        ctx.set_materialize_grads(False)
        return sparse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        (grad,) = grads
        meta, dense = ctx.saved_tensors
        if isinstance(grad, Sparse24Tensor):
            grad = grad.to_dense()
        if grad is not None and ctx.gradient == "masked":
            grad = torch.where(mask_24(meta), grad, 0)
        if grad is not None and dense is not None:
            grad = grad + torch.where(mask_24(meta), 0, dense * ctx.decay)
        return grad, None, None, None, None


def _each_part(func: OpOverload, tensor: Sparse24Tensor, *args: Any, **kwargs: Any) -> Sparse24Tensor:
    return Sparse24Tensor(
        *(None if part is None else func(part, *args, **kwargs) for part in _all_parts(tensor))
    )


def _to_copy(func: OpOverload, tensor: Sparse24Tensor, **kwargs: Any) -> Sparse24Tensor:
    """A cast is one of the values; metadata only moves."""
    moves = {name: value for name, value in kwargs.items() if name != "dtype"}
    packed, meta, packed_t, meta_t = _all_parts(tensor)
    values = [None if part is None else func(part, **kwargs) for part in (packed, packed_t)]
    metas = [None if part is None else func(part, **moves) for part in (meta, meta_t)]
    return Sparse24Tensor(values[0], metas[0], values[1], metas[1])


def _copy(
    func: OpOverload, target: Sparse24Tensor, source: torch.Tensor, non_blocking: bool = False
) -> Sparse24Tensor:
    """In place, from another that has the same parts (a checkpoint's)."""
    parts = {} if not isinstance(source, Sparse24Tensor) else source.parts()
    if parts.keys() != target.parts().keys():
        raise UnsupportedProgram(
            f"a {type(source).__name__} with parts {list(parts)} cannot be copied into {target!r}",
            fix="copy from a Sparse24Tensor that is packed alike: `aotdist.subclasses.sparse24.sparsify`",
        )
    for name, ours in target.parts().items():
        func(ours, parts[name], non_blocking)
    return target


def _is_pinned(func: OpOverload, tensor: Sparse24Tensor, *args: Any) -> bool:
    return all(func(part, *args) for part in tensor.parts().values())


def _transpose(func: OpOverload, tensor: Sparse24Tensor, *dims: int) -> Sparse24Tensor:
    packed, meta, packed_t, meta_t = _all_parts(tensor)
    if len({dim % 2 for dim in dims}) == 1:  # `transpose(0, 0)` leaves it as it is
        return Sparse24Tensor(packed, meta, packed_t, meta_t)
    return Sparse24Tensor(packed_t, meta_t, packed, meta)


def _view(func: OpOverload, tensor: Sparse24Tensor, size: list[int]) -> Sparse24Tensor:
    """As it is: DTensor views what it wraps with the size that it has."""
    if list(tensor.shape) != list(size):
        raise UnsupportedProgram(
            f"a Sparse24Tensor of size {list(tensor.shape)} cannot be viewed as {list(size)}",
            fix="unpack it first: `tensor.to_dense()`",
        )
    return _each_part(_aten.alias.default, tensor)


def _mm(func: OpOverload, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _product(left, right, None)


def _addmm(
    func: OpOverload, bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **scales: Any
) -> torch.Tensor:
    if any(scale != 1 for scale in scales.values()) or bias.dim() != 1:
        return torch.addmm(bias, _dense(left), _dense(right), **scales)
    return _product(left, right, bias)


def _product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Sparse where one side is packed along what is summed over, else dense."""
    if isinstance(right, Sparse24Tensor) and right.packed_t is not None and right.meta_t is not None:
        return linear_24(_dense(left), right.packed_t, right.meta_t, bias)
    if isinstance(left, Sparse24Tensor) and left.packed is not None and left.meta is not None:
        product = mm_24(left.packed, left.meta, _dense(right))
        return product if bias is None else product + bias
    dense = _dense(left), _dense(right)
    return torch.mm(*dense) if bias is None else torch.addmm(bias, *dense)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if isinstance(tensor, Sparse24Tensor) else tensor


def _all_parts(tensor: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(getattr(tensor, name) for name in _PARTS)


_HANDLERS: dict[OpOverload, Callable[..., Any]] = {
    _aten.alias.default: _each_part,
    _aten.clone.default: _each_part,
    _aten.detach.default: _each_part,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.is_pinned.default: _is_pinned,
    _aten.t.default: _transpose,
    _aten.transpose.int: _transpose,
    _aten.view.default: _view,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
}

torch.serialization.add_safe_globals([Sparse24Tensor])  # a checkpoint may be read with `weights_only`
