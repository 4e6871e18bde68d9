"""The functionalisation mode, with the corrections that bit-equality to eager needs.

A functional operator promises the values of the in-place one that it replaces, but not its layout, nor the
order in which it draws random numbers. Both show: sums run in another order, and dropout masks differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from aotdist.convention.memory import by_stride, extent
from aotdist.errors import AotdistError, UnsupportedProgram
from aotdist.joint import batch_statistics, checked, collectives, linear_algebra, unknown_sizes
from aotdist.joint.bits import is_read_otherwise, memory_to_read_as, with_bits_flipped
from aotdist.joint.failures import refusal
from aotdist.joint.fused import is_fused_optimizer, step_functionally
from aotdist.joint.kernel_errors import as_in_eager
from aotdist.joint.rebinding import Rebinding
from aotdist.joint.strided import Strided
from aotdist.sizes import is_symbolic
from aotdist.torch_seam.autograd import in_backward
from aotdist.torch_seam.functional import (
    FunctionalTensor,
    FunctionalTensorMode,
    functional,
    functional_storage_id,
    functional_value,
    is_functional_base,
    keep_bases_of_views,
    replace_functional_value,
    second_shell,
)
from aotdist.torch_seam.modes import set_aside
from aotdist.torch_seam.operators import (
    HigherOrderOperator,
    OpOverload,
    broken_up,
    functional_twin,
    handle_in_mode,
    has_effects,
    is_left_whole_in_inference,
    is_operator,
    out_names,
    with_defaults,
    writes_arguments,
    written_by,
)
from aotdist.torch_seam.proxies import unknown_to_the_innermost_tracer
from aotdist.torch_seam.symbols import are_equal
from aotdist.torch_seam.tensors import heard_of, is_unheard
from aotdist.torch_seam.trees import pytree

_TO_SPARSE = frozenset({"aten::_to_sparse", "aten::_to_sparse.sparse_dim"})
_OBSERVE_AND_QUANTIZE = torch.ops.aten._fused_moving_avg_obs_fq_helper.default
_TO_COPY = torch.ops.aten._to_copy.default
_POLYGAMMA = torch.ops.aten.polygamma_.default
_FOREACH = "aten::_foreach_"
_MATMULS: Mapping[OpOverload, Callable[[Sequence[Any], Mapping[str, Any]], torch.Tensor]] = {
    torch.ops.aten.addmm_.default: lambda args, kwargs: args[0],
    torch.ops.aten.mm.out: lambda args, kwargs: kwargs["out"],
}
"""Products that are written, and where."""
_FILL_DIAGONAL = torch.ops.aten.fill_diagonal_.default
_SQUEEZE_DIM, _SQUEEZE_DIMS = torch.ops.aten.squeeze_.dim, torch.ops.aten.squeeze_.dims
_BERNOULLI = frozenset({torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli_.Tensor})


class Functionalisation(FunctionalTensorMode):
    """Turns writes into new values, of the layout of what is written."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._laid_out: dict[int, FunctionalTensor] = {}
        self.strided = Strided(self)
        self.rebinding = Rebinding(self.strided)
        self.on_write: Callable[[FunctionalTensor], None] | None = None
        """Called with every tensor before an operator writes it."""

    def remember(self, tensor: FunctionalTensor) -> FunctionalTensor:
        """Let `tensor` keep its layout through all writes, if it owns its memory and is not contiguous.

        What is viewed keeps any layout (`_remember_viewed`): a write through a view may lay it out anew.
        """
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if not plain and is_functional_base(tensor):
            self._keep_layout(tensor)
        return tensor

    def _keep_layout(self, tensor: FunctionalTensor) -> None:
        """Remember another shell of it: the program's own may be given other memory."""
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
        if any(map(is_unheard, args)):
            with self:
                return func(*heard_of(args), **kwargs)
        if isinstance(func, HigherOrderOperator):
            return handle_in_mode(func, FunctionalTensorMode, self, *args, **kwargs)
        _refuse_unknown_results(func, args, kwargs)
        beneath_wrappers = all(issubclass(cls, FunctionalTensor) for cls in types)
        if beneath_wrappers and is_left_whole_in_inference(func):
            with self:
                return broken_up(func, *args, **kwargs)
        moves = self.rebinding.does.get(func)
        if moves is not None and isinstance(args[0], FunctionalTensor):
            with self, torch.no_grad():
                moves(*args, **kwargs)
            return args[0]
        if beneath_wrappers and is_operator(func) and out_names(func):
            with self, torch.no_grad():
                outs = self.rebinding.call_with_outs(func, args, kwargs)
            if outs is not None:
                return outs[0] if len(outs) == 1 else tuple(outs)
        self._tell_of_writes(func, args, kwargs)
        _make_views_again((args, kwargs))
        written = [(owner, functional_value(owner)) for owner in self._written(func, args, kwargs)]
        special = self._special(func, args, kwargs) if beneath_wrappers else None
        result = self._functionalise(func, types, args, kwargs) if special is None else special()
        for owner, before in written:
            _restore_layout(owner, before)
        if special is None and (_is_foreach_write(func) or isinstance(kwargs.get("out"), list)):
            # Eager counts them where it takes the list apart, beneath all modes; of wrappers it counts none.
            listed = written_by(func, args, kwargs)
            plains = [t for t in listed if isinstance(t, FunctionalTensor) and not t.is_inference()]
            torch.autograd.graph.increment_version(plains)
        if getattr(func, "is_view", False):
            self._remember_viewed(args[0])
        return self.remember(result) if isinstance(result, FunctionalTensor) else result

    def _tell_of_writes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
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
        try:
            # PyTorch's mode does not know stand-ins that have a user's class as well.
            own = [FunctionalTensor if issubclass(cls, FunctionalTensor) else cls for cls in types]
            return super().__torch_dispatch__(func, own, args, kwargs)
        except AotdistError:
            raise
        except RuntimeError as error:
            # torch 2.11 looks every argument up in the innermost tracer, and fails for want of it.
            foreign = unknown_to_the_innermost_tracer([*args, *kwargs.values()])
            if foreign is None:
                raise
            raise computed_elsewhere(foreign) from error

    def _special(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """What runs an operator that PyTorch's mode would not run as eager does; None for all others."""
        strided = self.strided.instead(func, args, kwargs)
        if strided is not None:
            return lambda: self._by_itself(strided)
        if func is _FILL_DIAGONAL and args[0].storage_offset() != functional_value(args[0]).storage_offset():
            self.strided.refuse_lost_offset(func, args[0])
        collective = collectives.instead(func, args)
        if collective is not None:
            return lambda: self._by_itself(collective)
        if func in _BERNOULLI and _memory_order(args[0]) is not None:
            return lambda: self._draw_in_memory_order(func, *args, **kwargs)
        if func in _MATMULS and _memory_order(_MATMULS[func](args, kwargs)) == [1, 0]:
            return lambda: self._multiply_transposed(func, *args, **kwargs)
        if _is_foreach_write(func) and len(args[0]) > 1 and _meet(args):
            return lambda: self._by_itself(_one_by_one, func, args, kwargs)
        if is_fused_optimizer(func):
            return lambda: self._by_itself(step_functionally, func, args, kwargs)
        if is_operator(func) and has_effects(func):
            return lambda: self._for_its_effect(func, args, kwargs)
        rewritten = _rewritten(func, args, kwargs)
        if rewritten is not None:
            return lambda: self._by_itself(rewritten)
        twin = _twin_of_symbolic_write(func, args)
        return (
            None
            if twin is None
            else lambda: self._write_with(twin, with_defaults(func, args, kwargs), kwargs)
        )

    def _for_its_effect(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that prints or raises: the graph has it as it is, in order, and nothing drops it.

        PyTorch's mode would thread a token through the graph to keep such operators in order.
        """
        given = pytree.tree_map_only(FunctionalTensor, functional_value, (args, kwargs))
        result = func(*given[0], **given[1])
        with self:
            return pytree.tree_map_only(torch.Tensor, functional, result)

    def _write_with(self, twin: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """Let the first argument hold what `twin` computes."""
        target: FunctionalTensor = args[0]
        with self:
            value = twin(*args, **kwargs)
        if not are_equal(value.size(), target.size()):
            raise RuntimeError(
                f"`{twin}` gives {list(value.size())}, to be written into {list(target.size())}"
            )
        replace_functional_value(target, functional_value(value))
        return target

    def _by_itself(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with this mode on, which then sees the operators that it calls."""
        with self:
            return function(*args)

    def _written(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[FunctionalTensor]:
        """The tensors with a layout to keep that own the memory which the operator writes."""
        if not is_operator(func):
            return
        if torch.Tag.inplace_view in func.tags:
            self._remember_viewed(args[0])
            return
        for tensor in written_by(func, args, kwargs):
            if isinstance(tensor, FunctionalTensor) and (storage := functional_storage_id(tensor)):
                self.strided.refuse_write(func, tensor)
                owner = self._laid_out.get(storage, tensor)
                # One that was transposed in place is a view of what it was, which nobody holds.
                is_own_view = owner is not tensor and owner.elem is tensor.elem
                if is_own_view or is_functional_base(owner):
                    yield owner

    def _multiply_transposed(
        self, func: Callable[..., Any], *tensors: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Multiply into a transposed tensor as eager does: by the transposed product, rounded otherwise."""
        with self:
            *target, a, b = (tensor.t() for tensor in tensors)
            if "out" in kwargs:
                kwargs["out"] = kwargs["out"].t()
            return func(*target, b, a, **kwargs).t()

    def _draw_in_memory_order(
        self, func: Callable[..., Any], tensor: torch.Tensor, *probability: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Draw in the order of the tensor's memory, as eager does and the functional twin does not."""
        order = _memory_order(tensor)
        assert order is not None, "a contiguous tensor lies as its memory does"
        with self:
            given = [
                p.expand(tensor.shape).permute(order) if isinstance(p, torch.Tensor) else p
                for p in probability
            ]
            func(tensor.permute(order), *given, **kwargs)
        return tensor


def _refuse_unknown_results(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse operators whose results are not what their fake kernels say."""
    if is_operator(func) and func.name() in _TO_SPARSE:
        raise refusal(
            "the program makes a sparse tensor",
            fix="make it outside of the compiled function, or work on its indices and values",
        )
    if func is _OBSERVE_AND_QUANTIZE:
        tensor, _, _, running_min, *_, channels, per_channel, _ = with_defaults(func, args, kwargs)
        if per_channel and running_min.numel() != tensor.size(channels):
            raise refusal(
                "an observer of `torch.ao.quantization` is called for the first time: it resizes buffers",
                fix="run the model once before it is compiled",
            )


def _make_views_again(given: Any) -> None:
    """Compute views of what was written since: they have a history, also if `no_grad` is what reads them."""
    if torch.is_grad_enabled() or in_backward():
        return
    with torch.enable_grad():
        for one in pytree.tree_leaves(given):
            if isinstance(one, FunctionalTensor):
                functional_value(one)


def computed_elsewhere(tensor: torch.Tensor) -> UnsupportedProgram:
    """An error for a tensor that was recorded by another tracer than that of this trace."""
    return refusal(
        f"a tensor of size {list(tensor.size())} was computed by a tracer of the program's own "
        "(`torch.func.linearize` has one)",
        fix="use `torch.func.jvp` or `vjp`, or trace outside of the compiled function",
    )


def _twin_of_symbolic_write(func: Any, args: tuple[Any, ...]) -> OpOverload | None:
    """The functional twin of an in-place operator on tensors of symbolic sizes; None for all others.

    PyTorch runs an in-place operator on meta tensors first, to find wrong shapes, and many fail with symbols:
    `clamp_`, and all that promote 16-bit floats (torch 2.11 and 2.13).
    """
    twin = functional_twin(func) if is_operator(func) else None
    if twin is None or not isinstance(args[0], FunctionalTensor):
        return None
    shapes = [value.shape for value in args if isinstance(value, FunctionalTensor)]
    return twin if any(map(is_symbolic, shapes)) else None


def _rewritten(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The same computation by other operators, for operators that PyTorch's mode cannot run."""
    if func in unknown_sizes.OF_OUR_OWN:
        return functools.partial(unknown_sizes.OF_OUR_OWN[func], *args, **kwargs)
    if func is _POLYGAMMA:  # its functional twin takes its arguments the other way round
        return functools.partial(_polygamma, *args)
    if func is _TO_COPY and not isinstance(args[0], torch.Tensor):
        # `vmap` gives a number the dtype that it has beside a batch of single elements, and its product with
        # zeros that have no memory is looked up on the device `meta`.
        options = {name: kwargs[name] for name in ("dtype", "device") if name in kwargs}
        return functools.partial(torch.full, (), args[0], **options)
    if func is _SQUEEZE_DIM and isinstance(args[0], FunctionalTensor) and is_symbolic(args[0].shape):
        # On a fake with symbols it recurses until the process dies (torch 2.13).
        return functools.partial(_SQUEEZE_DIMS, args[0], [args[1]])
    return (
        checked.answer(func, args, kwargs)
        or linear_algebra.without_vectors(func, args, kwargs)
        or batch_statistics.with_new_statistics(func, args, kwargs)
    )


def _polygamma(tensor: torch.Tensor, order: int) -> torch.Tensor:
    return tensor.copy_(torch.polygamma(order, tensor))


def _is_foreach_write(func: Any) -> bool:
    return is_operator(func) and func.name().startswith(_FOREACH) and writes_arguments(func)


def _meet(args: Sequence[Any]) -> bool:
    """Whether some of the tensors in the lists share memory."""
    items = [item for arg in args if isinstance(arg, list) for item in arg]
    memory = [functional_storage_id(item) for item in items if isinstance(item, FunctionalTensor)]
    return len(set(memory)) < len(memory)


def _one_by_one(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Write one tensor of a list after the other, as eager does: each may show what was written before."""
    for position in range(len(args[0])):
        func(*([arg[position : position + 1] if isinstance(arg, list) else arg for arg in args]), **kwargs)


def _restore_layout(tensor: FunctionalTensor, before: torch.Tensor) -> None:
    """Give the new value of a written tensor the layout of the one before, if it came with another."""
    value = functional_value(tensor)
    if value.size() != before.size():
        return
    # Of a tensor with gaps, fakes claim that random operators keep them; the real ones do not.
    lies_otherwise = value.stride() != before.stride() or extent(before) > before.numel()
    if lies_otherwise or is_read_otherwise(value, before):
        memory = memory_to_read_as(before, value)
        if lies_otherwise:
            memory = torch.ops.aten.copy.default(with_bits_flipped(before, before), memory)
        replace_functional_value(tensor, with_bits_flipped(memory, before))


def _memory_order(tensor: torch.Tensor) -> list[int] | None:
    """The dimensions as they lie in memory, slowest first; None if that is their own order."""
    if tensor.is_contiguous():
        return None
    order = by_stride(tensor.size(), tensor.stride())
    return None if order == list(range(tensor.dim())) else order
