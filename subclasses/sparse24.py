"""`Sparse24Tensor`: a matrix of which two in every four neighbours are stored.

It wraps plain tensors, which `sparse24_packing` describes, and is flattened into them before a graph::

    packed, meta        the matrix in groups along its rows
    packed_t, meta_t    the transposed matrix in groups along *its* rows

One of the two pairs may be missing. A product needs groups along the dimension that it sums over: a linear
layer's forward takes `packed`, its input's gradient takes `packed_t`, which only a transposable mask allows.
Where the pair that a product needs is missing, the matrix is unpacked and the product is dense.

A pair takes 9/16 of the bytes of a dense 16-bit matrix, 17/32 of those of a 32-bit one.

`sparse24_selection.sparsify` makes one from a dense matrix, and is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.sparse import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import Plain, Recipe, Wrapper, WrapperRule, leaves
from aotdist.subclasses.sparse24_compressed import forget_forms
from aotdist.subclasses.sparse24_operators import MADE_OF as MADE_OF
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
    COLUMNS_PER_BYTE,
    bytes_of_cutlass_words,
    cutlass_words,
    require_packable,
)
from aotdist.torch_seam.dtensor import local_part
from aotdist.torch_seam.operators import OpOverload

_PARTS = ("packed", "meta", "packed_t", "meta_t")
_CUTLASS = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten


class Sparse24Tensor(torch.Tensor):
    """A 2:4 matrix; `to_dense` unpacks it. Products, transposes, copies, casts and slices work on the parts.

    FSDP2 shards a frozen one by rows and gathers it packed (`fsdp_pre_all_gather`).

    Shapes: (R, C); `packed` (R, C / 2) and `meta` (R, C / 8) uint8; `packed_t` (C, R / 2) and `meta_t`
    (C, R / 8) uint8. The flattened matrix, (R * C), has the first two alone.
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
            size, values = (*packed.shape[:-1], 2 * packed.size(-1)), packed
            stride = (1,) if len(size) == 1 else (size[-1], 1)
        else:
            assert packed_t is not None, "one of the two packings has to be there"
            size, values = (2 * packed_t.size(1), packed_t.size(0)), packed_t
            stride = (1, size[0])
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, dtype=values.dtype, device=values.device
        )
        tensor.packed, tensor.meta, tensor.packed_t, tensor.meta_t = packed, meta, packed_t, meta_t
        return tensor

    @classmethod
    def from_choice(cls, dense: torch.Tensor, meta: torch.Tensor, *, both: bool = False) -> Sparse24Tensor:
        """The elements of `dense` that `meta` keeps.

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
        """The same matrix, from PyTorch's class.

        CUTLASS's layout of 16-bit floats is reordered, on any device. Its other layouts, cuSPARSELt's, and
        that of PyTorch's pruning kernel are opaque: such a matrix is unpacked by a product, on its GPU, and
        packed anew.

        Raises:
            UnsupportedProgram: the dtype cannot be packed.
        """
        words = (tensor.meta, tensor.meta_t)
        in_rows = isinstance(tensor, SparseSemiStructuredTensorCUTLASS) and tensor.dtype in _CUTLASS
        if not in_rows or any(part is not None and part.dim() != 2 for part in words):
            require_packable(dense := tensor.to_dense())
            return cls.from_choice(dense, choose_24(dense, transposable=False))
        meta, meta_t = (None if w is None else bytes_of_cutlass_words(w) for w in words)
        return cls(tensor.packed, meta, tensor.packed_t, meta_t)

    def to_semi_structured(self, backend: Literal["cutlass", "cusparselt"]) -> SparseSemiStructuredTensor:
        """The same matrix as PyTorch's class, for CUTLASS (on any device) or cuSPARSELt (on a GPU).

        Raises:
            UnsupportedProgram: CUTLASS has no layout for this size or dtype.
        """
        if backend == "cusparselt":
            return SparseSemiStructuredTensorCUSPARSELT.from_dense(self.to_dense())
        if self.dtype not in _CUTLASS:
            raise UnsupportedProgram(
                f"a Sparse24Tensor of {self.dtype} has no layout of CUTLASS's",
                fix="convert it to bf16 or fp16",
            )
        meta, meta_t = (None if m is None else cutlass_words(m) for m in (self.meta, self.meta_t))
        make: Any = SparseSemiStructuredTensorCUTLASS  # to type checkers, it has no constructor of its own
        return make(self.shape, self.packed, meta, self.packed_t, meta_t, compressed_swizzled_bitmask=None)

    def to_dense(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The dense matrix; arguments are those of `torch.Tensor.to_dense`, and ignored."""
        if self.packed is not None and self.meta is not None:
            return unpack_24(self.packed, self.meta)
        assert self.packed_t is not None and self.meta_t is not None
        return unpack_24(self.packed_t, self.meta_t).t()

    def mask(self) -> torch.Tensor:
        """Which elements are kept. Shapes: -> (R, C) bool."""
        if self.meta is not None:
            return mask_24(self.meta)
        assert self.meta_t is not None
        return mask_24(self.meta_t).t()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in self.parts().values())

    def parts(self) -> dict[str, torch.Tensor]:
        """The plain tensors by name."""
        return {name: part for name in _PARTS if (part := getattr(self, name)) is not None}

    def __repr__(self, *, tensor_contents: object = None) -> str:
        kept = ", ".join(f"{name}={tuple(part.shape)}" for name, part in self.parts().items())
        return f"Sparse24Tensor(size={tuple(self.shape)}, dtype={self.dtype}, {kept})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """The names of the parts, and no context."""
        return list(self.parts()), None

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> Sparse24Tensor:
        """The inverse of `__tensor_flatten__`."""
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
        if handler is not None:
            return handler(func, *args, **(kwargs or {}))
        made = func.decompose(*args, **(kwargs or {}))  # `linear` arrives whole in inference mode
        if made is NotImplemented:
            raise UnsupportedProgram(
                f"`{func}` is not defined for a Sparse24Tensor", fix="unpack it first: `tensor.to_dense()`"
            )
        return made

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], bool]:
        """The tensors that FSDP2 gathers: 9/16 of the bytes of a dense 16-bit matrix.

        Returns:
            This rank's packed values, in the dtype that the module computes in, and metadata; and whether the
            gathered matrix is packed along its columns, too.

        Raises:
            UnsupportedProgram: the rows do not divide by the number of ranks.
        """
        assert self.packed is not None and self.meta is not None, "cut to shards along its rows"
        if outer_size[0] % mesh.size():
            raise UnsupportedProgram(
                f"{outer_size[0]} packed rows do not divide among {mesh.size()} ranks",
                stage="runtime",
                fix="leave this layer out of `sparsify_24`'s filter, or choose a size that divides",
            )
        packed = self.packed.to(mp_policy.param_dtype or self.dtype)
        return (packed, self.meta), self.packed_t is not None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: bool,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[Sparse24Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole matrix around the gathered tensors; `out`, if given, wraps the same memory already."""
        packed, meta = all_gather_outputs
        if out is None:
            whole = Sparse24Tensor(packed, meta)
            if metadata:
                whole = Sparse24Tensor.from_choice(whole.to_dense(), meta, both=True)
                whole.packed, whole.meta = packed, meta
            return whole, tuple(whole.parts().values())
        local: Any = local_part(out)
        forget_forms()
        if metadata:
            both = Sparse24Tensor.from_choice(Sparse24Tensor(packed, meta).to_dense(), meta, both=True)
            local.packed_t.copy_(both.packed_t)
            local.meta_t.copy_(both.meta_t)
        return None


def _each_part(func: OpOverload, tensor: Sparse24Tensor, *args: Any, **kwargs: Any) -> Sparse24Tensor:
    return Sparse24Tensor(
        *(None if part is None else func(part, *args, **kwargs) for part in _all_parts(tensor))
    )


def _to_copy(func: OpOverload, tensor: Sparse24Tensor, **kwargs: Any) -> Sparse24Tensor:
    """Cast the values, and move values and metadata."""
    moves = {name: value for name, value in kwargs.items() if name != "dtype"}
    packed, meta, packed_t, meta_t = _all_parts(tensor)
    values = [None if part is None else func(part, **kwargs) for part in (packed, packed_t)]
    metas = [None if part is None else func(part, **moves) for part in (meta, meta_t)]
    return Sparse24Tensor(values[0], metas[0], values[1], metas[1])


def _copy(
    func: OpOverload, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copy into a dense tensor, or from another `Sparse24Tensor` with the same parts (a checkpoint's)."""
    if not isinstance(target, Sparse24Tensor):
        return func(target, _dense(source), non_blocking)
    parts = {} if not isinstance(source, Sparse24Tensor) else source.parts()
    if parts.keys() != target.parts().keys():
        raise UnsupportedProgram(
            f"a {type(source).__name__} with parts {list(parts)} cannot be copied into {target!r}",
            fix="copy from a Sparse24Tensor that is packed alike (`sparsify`, with the same mask)",
        )
    for name, ours in target.parts().items():
        func(ours, parts[name], non_blocking)
    forget_forms()
    return target


def _is_pinned(func: OpOverload, tensor: Sparse24Tensor, *args: Any) -> bool:
    return all(func(part, *args) for part in tensor.parts().values())


def _transpose(func: OpOverload, tensor: Sparse24Tensor, *dims: int) -> Sparse24Tensor:
    _require_matrix(tensor)
    packed, meta, packed_t, meta_t = _all_parts(tensor)
    if len({dim % 2 for dim in dims}) == 1:  # `transpose(0, 0)` leaves it as it is
        return Sparse24Tensor(packed, meta, packed_t, meta_t)
    return Sparse24Tensor(packed_t, meta_t, packed, meta)


def _require_matrix(tensor: Sparse24Tensor) -> None:
    if tensor.dim() != 2:
        raise UnsupportedProgram("a flattened Sparse24Tensor has no rows", fix="use the matrix itself")


def _view(func: OpOverload, tensor: Sparse24Tensor, size: list[int], *layout: Any) -> Sparse24Tensor:
    """A view of the same size, as DTensor and FSDP2 make (by `as_strided`, too), or a flat one (FSDP2)."""
    if list(size) == [-1] and tensor.packed is not None and tensor.meta is not None:
        return Sparse24Tensor(tensor.packed.view(-1), tensor.meta.view(-1))
    if list(tensor.shape) != list(size):
        raise UnsupportedProgram(
            f"a Sparse24Tensor of size {list(tensor.shape)} cannot be viewed as {list(size)}",
            fix="unpack it first: `tensor.to_dense()`",
        )
    return _each_part(_aten.alias.default, tensor)


def _new_zeros(func: OpOverload, tensor: Sparse24Tensor, size: list[int], **options: Any) -> Sparse24Tensor:
    """Zeros with the same parts as `tensor`."""
    if tensor.packed is None:
        zeros = _new_zeros(func, _transpose(_aten.t.default, tensor), size[::-1], **options)
        return _transpose(_aten.t.default, zeros)
    both = tensor.packed_t is not None
    dense = tensor.packed.new_zeros(size, **options)
    return Sparse24Tensor.from_choice(dense, choose_24(dense, transposable=both), both=both)


def _split(func: OpOverload, tensor: Sparse24Tensor, size: int, dim: int = 0) -> list[Sparse24Tensor]:
    starts = range(0, max(tensor.size(dim), 1), size)
    return [_cut(tensor, dim, start, min(start + size, tensor.size(dim))) for start in starts]


def _slice(
    func: OpOverload,
    tensor: Sparse24Tensor,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> Sparse24Tensor:
    places = range(tensor.size(dim))[start:stop:step]
    if step != 1:
        raise UnsupportedProgram(f"a Sparse24Tensor is cut in steps of {step}", fix="unpack it first")
    return _cut(tensor, dim, places.start, places.stop)


def _cut(tensor: Sparse24Tensor, dim: int, start: int, stop: int) -> Sparse24Tensor:
    """A view of rows `start` to `stop`, or of columns.

    Raises:
        UnsupportedProgram: a boundary goes through a group of four, or through a byte of metadata.
    """
    _require_matrix(tensor)
    if dim % 2:
        return _transpose(_aten.t.default, _cut(_transpose(_aten.t.default, tensor), 0, start, stop))
    packed, meta, packed_t, meta_t = _all_parts(tensor)
    if packed_t is not None and (start % COLUMNS_PER_BYTE or stop % COLUMNS_PER_BYTE):
        raise UnsupportedProgram(
            f"a cut from {start} to {stop} goes through groups of four of a {tensor!r}",
            fix=f"cut at multiples of {COLUMNS_PER_BYTE}, or along the dimension that is not packed",
        )
    return Sparse24Tensor(
        None if packed is None else packed[start:stop],
        None if meta is None else meta[start:stop],
        None if packed_t is None else packed_t[:, start // 2 : stop // 2],
        None if meta_t is None else meta_t[:, start // COLUMNS_PER_BYTE : stop // COLUMNS_PER_BYTE],
    )


def _mm(func: OpOverload, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _product(left, right, None)


def _addmm(
    func: OpOverload, bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **scales: Any
) -> torch.Tensor:
    if any(scale != 1 for scale in scales.values()) or bias.dim() != 1:
        return torch.addmm(bias, _dense(left), _dense(right), **scales)
    return _product(left, right, bias)


def _product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A sparse product where one side is packed along the dimension that is summed over, else a dense one."""
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
    _aten.as_strided.default: _view,
    _aten.new_zeros.default: _new_zeros,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
}

torch.serialization.add_safe_globals([Sparse24Tensor])  # a checkpoint may be read with `weights_only`


class _Sparse24Rule(WrapperRule):
    """Products of a Sparse24Tensor give it dense gradients."""

    def owns(self, cls: type[torch.Tensor]) -> bool:
        return issubclass(cls, Sparse24Tensor)

    def tangent_recipe(self, recipe: Wrapper) -> Recipe:
        """A dense matrix of the same size and strides."""
        (_, values), *_ = leaves(recipe)
        return Plain(recipe.size, recipe.stride, values.dtype)


WRAPPER_RULE = _Sparse24Rule()
