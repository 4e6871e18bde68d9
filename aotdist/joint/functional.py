"""The functionalisation mode, with the corrections that bit-equality to eager needs.

A functional operator promises the values of the in-place one that it replaces, and neither the layout
nor the order in which random numbers are drawn. Both show: sums run in another order, dropout masks differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from aotdist.capture.origins import Origins
from aotdist.convention.memory import by_stride
from aotdist.errors import UnsupportedProgram
from aotdist.joint.rebinding import Rebinding
from aotdist.torch_seam import (
    FunctionalTensor,
    FunctionalTensorMode,
    OpOverload,
    functional_storage_id,
    functional_value,
    is_functional_base,
    is_operator,
    out_names,
    pytree,
    replace_functional_value,
    written_arguments,
)

_TO_SPARSE = frozenset({"aten::_to_sparse", "aten::_to_sparse.sparse_dim"})
_CHECK = torch.ops.aten._linalg_check_errors.default
_POLYGAMMA = torch.ops.aten.polygamma_.default
_BERNOULLI = frozenset({torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli_.Tensor})


class Functionalisation(FunctionalTensorMode):
    """Turns writes into new values, of the layout of what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.rebinding = Rebinding()
        self._laid_out: dict[int, FunctionalTensor] = {}

    def remember(self, tensor: FunctionalTensor) -> FunctionalTensor:
        """Keep the layout of `tensor`, if it is not contiguous and owns its memory, through all writes."""
        if not tensor.is_contiguous() and is_functional_base(tensor):
            self._laid_out[functional_storage_id(tensor)] = tensor
        return tensor

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if is_operator(func) and func.name() in _TO_SPARSE:
            raise UnsupportedProgram(
                "the program makes a sparse tensor",
                where=Origins().current() or None,
                stage="joint",
                fix="make it outside of the compiled function, or work on its indices and values",
            )
        moves = self.rebinding.does.get(func)
        if moves is not None and isinstance(args[0], FunctionalTensor):
            with self, torch.no_grad():
                moves(*args, **kwargs)
            return args[0]
        if is_operator(func) and out_names(func):
            with self, torch.no_grad():
                outs = self.rebinding.call_with_outs(func, args, kwargs)
            if outs is not None:
                return outs[0] if len(outs) == 1 else tuple(outs)
        written = [(owner, functional_value(owner)) for owner in self._written(func, args, kwargs)]
        if func in _BERNOULLI and _memory_order(args[0]) is not None:
            result = self._draw_in_memory_order(func, *args, **kwargs)
        elif func is _CHECK:
            # It only raises; PyTorch's mode would thread a token through the graph for it.
            values = pytree.tree_map_only(FunctionalTensor, functional_value, args)
            result = func(*values, **kwargs)
        elif func is _POLYGAMMA:
            with self:  # its functional twin takes its arguments the other way round
                result = args[0].copy_(torch.polygamma(args[1], args[0]))
        else:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        for owner, before in written:
            _restore_layout(owner, before)
        if isinstance(result, FunctionalTensor):
            self.remember(result)
        return result

    def _written(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[FunctionalTensor]:
        """The tensors with a layout to keep that own the memory which the operator writes."""
        if not is_operator(func) or torch.Tag.inplace_view in func.tags:
            return
        for position, name in written_arguments(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, FunctionalTensor) and (storage := functional_storage_id(tensor)):
                    owner = self._laid_out.get(storage, tensor)
                    if is_functional_base(owner):
                        yield owner

    def _draw_in_memory_order(
        self, func: Callable[..., Any], tensor: torch.Tensor, *probability: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Draw into the view that lies as the memory does: eager does so, the functional twin does not."""
        order = _memory_order(tensor)
        assert order is not None, "a contiguous tensor lies as its memory does"
        with self:
            given = [
                p.expand(tensor.shape).permute(order) if isinstance(p, torch.Tensor) else p
                for p in probability
            ]
            func(tensor.permute(order), *given, **kwargs)
        return tensor


def _restore_layout(tensor: FunctionalTensor, before: torch.Tensor) -> None:
    """Give the new value of a written tensor the layout of the one before, if it came with another."""
    value = functional_value(tensor)
    if value.size() != before.size():
        return
    # Of a tensor with gaps, fakes claim that random operators keep them; the real ones do not.
    if _strides(value) != _strides(before) or _has_gaps(before):
        replace_functional_value(tensor, torch.ops.aten.copy.default(before, value))


def _has_gaps(tensor: torch.Tensor) -> bool:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.numel() > 0 and span > tensor.numel()


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that tell: those of dimensions with several elements."""
    return [stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1]


def _memory_order(tensor: torch.Tensor) -> list[int] | None:
    """The dimensions as they lie in memory, slowest first; None if that is their own order."""
    if tensor.is_contiguous():
        return None
    order = by_stride(tensor.size(), tensor.stride())
    return None if order == list(range(tensor.dim())) else order
