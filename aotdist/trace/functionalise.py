"""The functionalisation mode, with the corrections that bit-equality to eager needs.

A functional operator gives the values of the in-place one that it replaces, but not always its strides, nor
the order in which it draws random numbers. Both would show: sums run in another order, and dropout masks
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from aotdist.aliasing.memory import extent
from aotdist.errors import AotdistError, UnsupportedProgram
from aotdist.torch_seam.autograd import in_backward
from aotdist.torch_seam.functional import (
    FunctionalTensor,
    FunctionalTensorMode,
    functional_of_one,
    functional_results,
    functional_storage_id,
    functional_value,
    is_functional_base,
    keep_bases_of_views,
    replace_functional_value,
    second_shell,
)
from aotdist.torch_seam.modes import OutOfDynamo, set_aside
from aotdist.torch_seam.operators import (
    HigherOrderOperator,
    OpOverload,
    broken_up,
    handle_in_mode,
    has_effects,
    is_functional,
    is_left_whole_in_inference,
    is_of_one_tensor,
    is_operator,
    out_names,
    written_by,
)
from aotdist.torch_seam.proxies import unknown_to_the_innermost_tracer
from aotdist.torch_seam.tensors import is_zero_tensor, seen_by_modes
from aotdist.torch_seam.trees import pytree
from aotdist.trace.failures import refusal
from aotdist.trace.operators import collectives, corrections
from aotdist.trace.operators.fakes import as_in_eager
from aotdist.trace.operators.functionalised import is_list_write
from aotdist.trace.strided import Strided


def differ_in_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors differ in their conjugate or negative bit."""
    return (a.is_conj(), a.is_neg()) != (b.is_conj(), b.is_neg())


def with_bits_flipped(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` whose conjugate and negative bits are flipped where `model` has them set."""
    if model.is_conj():
        tensor = torch.ops.aten._conj.default(tensor)
    return torch.ops.aten._neg_view.default(tensor) if model.is_neg() else tensor


def memory_to_read_as(model: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What memory has to hold so that a tensor over it with the bits of `model` equals `value`."""
    memory = with_bits_flipped(value, value)
    if value.is_neg() != model.is_neg():
        memory = torch.ops.aten.neg.default(memory)
    if value.is_conj() != model.is_conj():
        memory = torch.ops.aten._conj_physical.default(memory)
    return memory


_FILL_DIAGONAL = torch.ops.aten.fill_diagonal_.default


class Functionalisation(OutOfDynamo, FunctionalTensorMode):
    """Turns writes into new values, with the layout of the tensor that is written."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._laid_out: dict[int, FunctionalTensor] = {}
        self.strided = Strided(self)
        self.on_write: Callable[[FunctionalTensor], None] | None = None
        """Called with each tensor before an operator writes it."""
        self.num_writes = 0
        """How many writes of tensors there were."""
        self.record_known: Callable[..., Any] | None = None
        """Records an operator on fakes if its result is cached; else it returns `NotImplemented`."""

    def remember(self, tensor: FunctionalTensor) -> FunctionalTensor:
        """Let `tensor` keep its layout through all writes, if it owns its memory and is not contiguous.

        A tensor with views keeps a contiguous one, too (`_remember_viewed`): a write through a view may give
        the whole other strides.
        """
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if not plain and is_functional_base(tensor):
            self._keep_layout(tensor)
        return tensor

    def _keep_layout(self, tensor: FunctionalTensor) -> None:
        """Remember it by a second shell around its memory: the program's own may be moved to other memory."""
        with self:
            self._laid_out[functional_storage_id(tensor)] = second_shell(tensor)

    @set_aside
    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return self._dispatch(func, types, args, kwargs)
        except Exception as error:
            if isinstance(error, AotdistError) or (eagers := as_in_eager(error, func, args, kwargs)) is error:
                raise
            raise eagers from None

    def _dispatch(self, func: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator by our rules, or by PyTorch's mode; what it writes keeps its layout."""
        if any(map(is_zero_tensor, args)):
            with self:
                return func(*seen_by_modes(args), **kwargs)
        if isinstance(func, HigherOrderOperator):
            return handle_in_mode(func, FunctionalTensorMode, self, *args, **kwargs)
        beneath_wrappers = all(issubclass(cls, FunctionalTensor) for cls in types)
        if beneath_wrappers and is_left_whole_in_inference(func):
            with self:
                return broken_up(func, *args, **kwargs)
        moves = self.strided.moves.get(func)
        if moves is not None and isinstance(args[0], FunctionalTensor):
            self.num_writes += 1
            with self, torch.no_grad():
                moves(*args, **kwargs)
            return args[0]
        self._note_writes(func, args, kwargs)
        _compute_pending_views((args, kwargs))
        written = [(owner, functional_value(owner)) for owner in self._written(func, args, kwargs)]
        result = self._by_our_rules(func, args, kwargs) if beneath_wrappers else NotImplemented
        if result is NotImplemented:
            result = self._functionalise(func, types, args, kwargs)
        for owner, before in written:
            _restore_layout(owner, before)
        _refuse_resized(func, kwargs)
        if getattr(func, "is_view", False):
            self._remember_viewed(args[0])
        return self.remember(result) if isinstance(result, FunctionalTensor) else result

    def _with_known_result(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record an operator that needs no functionalisation from the cache of results, if it is there."""
        if self.record_known is None or not is_functional(func):
            return NotImplemented
        named = {name: _with_fakes(value) for name, value in kwargs.items()}
        result = self.record_known(func, _with_fakes(args), named)
        return result if result is NotImplemented else functional_results(self, result)

    def _note_writes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.on_write is not None and is_operator(func):
            for tensor in written_by(func, args, kwargs):
                if isinstance(tensor, FunctionalTensor):
                    self.on_write(tensor)

    def _remember_viewed(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, FunctionalTensor) or not is_functional_base(tensor):
            return
        if functional_storage_id(tensor) not in self._laid_out:
            self._keep_layout(tensor)

    def _functionalise(
        self, func: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Let PyTorch's mode run an operator."""
        if torch.is_inference_mode_enabled():
            keep_bases_of_views(self, [*args, *kwargs.values()])
        if getattr(func, "is_view", False) and isinstance(args[0], FunctionalTensor):
            self.strided.note_owner(args[0])
        is_plain = is_operator(func) and not torch.is_inference_mode_enabled()
        if is_plain and is_of_one_tensor(func) and isinstance(args[0], FunctionalTensor):
            return functional_of_one(self, func, args, kwargs)
        try:
            # PyTorch's mode does not know stand-ins that have a user's class as well.
            own = [FunctionalTensor if issubclass(cls, FunctionalTensor) else cls for cls in types]
            result = super().__torch_dispatch__(func, own, args, kwargs)
        except AotdistError:
            raise
        except RuntimeError as error:
            # torch 2.11 looks every argument up in the innermost tracer, and fails for want of it.
            foreign = unknown_to_the_innermost_tracer([*args, *kwargs.values()])
            if foreign is None:
                raise
            raise computed_elsewhere(foreign) from error
        if is_operator(func) and (is_list_write(func) or isinstance(kwargs.get("out"), list)):
            # Eager counts them where it takes the list apart, beneath all modes; of wrappers it counts none.
            listed = written_by(func, args, kwargs)
            plains = [t for t in listed if isinstance(t, FunctionalTensor) and not t.is_inference()]
            torch.autograd.graph.increment_version(plains)
        return result

    def _by_our_rules(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that PyTorch's mode would run otherwise; `NotImplemented` for all others."""
        ours = self.strided.instead(func, args, kwargs) or collectives.instead(func, args)
        if ours is not None:
            with self:
                return ours()
        if func is _FILL_DIAGONAL and args[0].storage_offset() != functional_value(args[0]).storage_offset():
            self.strided.refuse_lost_offset(func, args[0])
        if not is_operator(func):
            return NotImplemented
        if has_effects(func):
            return self._for_its_effect(func, args, kwargs)
        if rows := corrections.of("operator", func):
            with self:
                return corrections.corrected(rows, func, args, kwargs)
        return self._with_known_result(func, args, kwargs)

    def _for_its_effect(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that prints or raises: the graph has it as it is, in order, and nothing drops it.

        PyTorch's mode would thread a token through the graph to keep such operators in order.
        """
        given = pytree.tree_map_only(FunctionalTensor, functional_value, (args, kwargs))
        return functional_results(self, func(*given[0], **given[1]))

    def _written(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[FunctionalTensor]:
        """The tensors whose layout is to be kept that own the memory which the operator writes."""
        if not is_operator(func):
            return
        if torch.Tag.inplace_view in func.tags:
            self._remember_viewed(args[0])
            return
        for tensor in written_by(func, args, kwargs):
            self.num_writes += 1
            if isinstance(tensor, FunctionalTensor) and (storage := functional_storage_id(tensor)):
                self.strided.refuse_write(func, tensor)
                owner = self._laid_out.get(storage, tensor)
                # One that was transposed in place is a view of what it was, which nobody holds.
                is_own_view = owner is not tensor and owner.elem is tensor.elem
                if is_own_view or is_functional_base(owner):
                    yield owner


def _refuse_resized(func: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse an `out=` of another size than the result, which eager would resize."""
    for name in out_names(func) if is_operator(func) else ():
        out = kwargs.get(name)
        if isinstance(out, FunctionalTensor) and functional_value(out).size() != out.size():
            raise refusal(
                f"`{func}` is given an `out=` of size {list(out.size())}, and its result has another",
                fix="give it the size of the result before, or use what the operator returns without `out=`",
            )


def _compute_pending_views(given: Any) -> None:
    """Compute pending views of written tensors with grad mode on: even under `no_grad` they have history."""
    if torch.is_grad_enabled() or in_backward():
        return
    with torch.enable_grad():
        for one in pytree.tree_leaves(given):
            if isinstance(one, FunctionalTensor):
                functional_value(one)


def _with_fakes(given: Any) -> Any:
    """An argument, or a list of them, with fakes in the place of functional tensors."""
    if isinstance(given, FunctionalTensor):
        return functional_value(given)
    return tuple([_with_fakes(one) for one in given]) if isinstance(given, (list, tuple)) else given


def computed_elsewhere(tensor: torch.Tensor) -> UnsupportedProgram:
    """An error for a tensor that was recorded by another tracer than that of this trace."""
    return refusal(
        f"a tensor of size {list(tensor.size())} was computed by a tracer of the program's own "
        "(`torch.func.linearize` has one)",
        fix="use `torch.func.jvp` or `vjp`, or trace outside of the compiled function",
    )


def _restore_layout(tensor: FunctionalTensor, before: torch.Tensor) -> None:
    """Give the new value of a written tensor the layout of the one before, if it came with another."""
    value = functional_value(tensor)
    if value.size() != before.size():
        return
    # Fakes claim that random operators keep gaps between elements; the real kernels do not.
    lies_otherwise = value.stride() != before.stride() or extent(before) > before.numel()
    if lies_otherwise or differ_in_bits(value, before):
        memory = memory_to_read_as(before, value)
        if lies_otherwise:
            memory = torch.ops.aten.copy.default(with_bits_flipped(before, before), memory)
        replace_functional_value(tensor, with_bits_flipped(memory, before))
