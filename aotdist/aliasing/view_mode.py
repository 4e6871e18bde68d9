"""Logs, while a program is traced, which operation made each view, and of which tensor.

This dispatch mode is above all others and directly below autograd, so it sees every operation on the tensors
of the user's code, wrappers included. So one log serves plain tensors and subclasses; and it has the views
made under `no_grad` and by `detach`, of which autograd does not keep the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch

from aotdist.aliasing.metadata import INVERSES, Change, another_name, rebuild_history
from aotdist.aliasing.overwrite import all_uncounted, bump, rewind, written_uncounted
from aotdist.aliasing.view_log import ViewLog, is_recorded
from aotdist.aliasing.views import Opened, ViewEntry, lies_in, view_refusal
from aotdist.facts import DETACH, ViewStep, data_of
from aotdist.subclasses.protocol import is_wrapper
from aotdist.torch_seam.functional import FunctionalTensor
from aotdist.torch_seam.jagged import MAKES_JAGGED, with_ragged_inferred
from aotdist.torch_seam.modes import OutOfDynamo, TorchDispatchMode, torch_functions_off
from aotdist.torch_seam.operators import (
    HigherOrderOperator,
    OpOverload,
    broken_up,
    is_left_whole_in_inference,
    is_operator,
    makes_views,
    out_of_place,
    written_by,
)
from aotdist.torch_seam.patches import replaced

_LIKE_ANOTHER = {
    torch.ops.aten.view_as.default: torch.ops.aten.reshape.default,
    torch.ops.aten.reshape_as.default: torch.ops.aten.reshape.default,
    torch.ops.aten.expand_as.default: torch.ops.aten.broadcast_to.default,
}
"""Operators that make the same views from a size; those with a tensor arrive here in inference mode only."""
_DETACH_ = torch.ops.aten.detach_.default
_SET = torch.ops.aten.set_.source_Tensor
_FROM_STORAGES = frozenset(
    {torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset}
)
_SETS = frozenset({_SET, torch.ops.aten.set_.default})
_RESIZE = torch.ops.aten.resize_.default
_RESIZES = frozenset({_RESIZE, torch.ops.aten.resize_as_.default})
_AS_STRIDED_ = torch.ops.aten.as_strided_.default
_VIEW_AS_DTYPE = torch.ops.aten.view.dtype
_LIFT = torch.ops.aten.lift_fresh.default
"""`torch.tensor` calls it on its data; for the program the result is no view."""


class ViewMode(OutOfDynamo, TorchDispatchMode):
    """Logs views, and in-place changes of metadata.

    Args:
        log: the log that it writes.
    """

    supports_higher_order_operators = True

    def __init__(self, log: ViewLog) -> None:
        super().__init__()
        self.log = log
        self._reshaped: list[torch.Tensor] = []
        self._is_off = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_off:
            return func(*args, **kwargs)
        with torch_functions_off() if _runs_no_users_code(func, types) else nullcontext():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator, and log it if it makes a view, or changes a tensor's metadata in place."""
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)  # none of them makes views
        whole = is_left_whole_in_inference(func)
        if whole and not any(map(is_wrapper, args)):
            # Outside of inference mode, autograd decomposes `view_as` and `reshape` before they get here.
            # Wrappers see `view_as` itself, as in eager. The parts are operators of the program like others.
            with self, nullcontext() if makes_views(func) else enable_reentrant_dispatch():
                return broken_up(func, *args, **kwargs)
        targets = [*written_by(func, args, kwargs)] if is_operator(func) else []
        for target in targets:
            self.log.refuse_overlapping_write(func, target)
        if self.log.changes:
            self.log.refuse_lost((*args, *kwargs.values()), targets)
        if whole or (getattr(func, "is_view", False) and func is not _LIFT):
            with nullcontext() if whole else _as_what_is_viewed(func, args):
                result = func(*args, **kwargs)
            # `reshape`, `to`, `dropout` return a view only if they can; autograd conjugates numbers, too.
            is_view = func is not MAKES_JAGGED and (not whole or lies_in(args[0], result))
            if is_view and isinstance(args[0], torch.Tensor):
                self._log(func, args, kwargs, result)
            return result
        # `detach_` arrives here in inference mode only, where nothing has a history.
        if torch.Tag.inplace_view in getattr(func, "tags", ()) and func is not _DETACH_:
            return self._log_in_place(func, args, kwargs)
        uncounted = written_uncounted(args)
        if uncounted and targets and is_recorded((*args, *kwargs.values())):
            raise view_refusal(
                f"`{func}` writes a list with wrappers while autograd records: in eager, views from before "
                "keep the gradients that they had",
                "write each by itself (`x.mul_(2)` for `torch._foreach_mul_([x], 2)`), or under `no_grad`",
            )
        with all_uncounted(uncounted):
            return func(*args, **kwargs)

    def _log(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        base, *rest = args
        if func in _LIKE_ANOTHER:
            func, rest = _LIKE_ANOTHER[func], [rest[0].size()]
        if is_wrapper(base):
            rest = with_ragged_inferred(rest)
        grad, serial = torch.is_grad_enabled(), self.log.next_serial()
        picks = enumerate(result) if isinstance(result, (list, tuple)) else ((None, result),)
        for pick, view in picks:
            if view is not base:
                step = ViewStep(func, tuple(rest), tuple(kwargs.items()), pick, grad, serial)
                made, version = self.log.next_serial(), None if base.is_inference() else base._version
                self.log.put(ViewEntry(view, base, (step,), made, version, Opened.of(view).inside))

    def data_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor.data`, logged as such; this mode sees a `detach`."""
        view = tensor.data
        entry = self.log.entry_of(view)
        if entry is not None and entry.steps[-1].op is DETACH:
            steps = (*entry.steps[:-1], replace(entry.steps[-1], op=data_of))
            self.log.put(replace(entry, steps=steps))
        return view

    def _log_in_place(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Log an operator like `view.t_()`: it adds a step to the view's chain, not to those of its views."""
        op: Any = func
        if func is _AS_STRIDED_:
            raise view_refusal(
                "`as_strided_` lets a tensor show other elements in place",
                "let it be another tensor: `x = x.as_strided(size, stride)`",
            )
        if func in _FROM_STORAGES:
            raise view_refusal(
                "a tensor is set to a storage, which has no memory while it is captured",
                "set it to a tensor: `x.set_(y)`",
            )
        changed, *rest = args
        size, stride = changed.size(), changed.stride()
        former = None if func in INVERSES else another_name_from_below(changed)
        result = func(*args, **kwargs)
        if func in _RESIZES:
            if changed.size() == size and changed.stride() == stride:
                return result
            op, rest, kwargs = _RESIZE, [tuple(changed.size())], _format_of(changed)
        change = self.log.note_change(changed, size, op, rest, kwargs, bumps=1, former=former)
        twin, entry = out_of_place(func), self.log.entry_of(changed)
        if entry is None and changed._is_view():
            raise view_refusal(
                f"`{func}` reshapes a view in place that no operator of the program made: an input that is a "
                "view of another tensor, and one of the two is written with history",
                "reshape it out of place (`t` for `t_`), or clone it first",
            )
        if entry is not None and twin is not None:
            # Autograd rebuilds a view's history after a write, in the grad mode in which the view was made.
            grad = entry.steps[-1].grad if changed._is_view() else change.grad
            step = ViewStep(twin, tuple(rest), tuple(kwargs.items()), None, grad, change.serial)
            self._reshaped.append(changed)
            steps = (*entry.steps, *self._as_steps(step, changed, change))
            self.log.put(replace(entry, steps=steps))
        return result

    def _as_steps(self, step: ViewStep, changed: torch.Tensor, change: Change) -> tuple[ViewStep, ...]:
        """The steps from a tensor as it was before it was reshaped in place to what it is now."""
        if changed._is_view():
            return (step,)
        # To autograd `x.detach().t_()` is no view, and `x.detach().t()` is one.
        return (step, ViewStep(DETACH, (), (), None, change.grad, self.log.next_serial()))

    def settle(self) -> None:
        """Rebuild the histories of views that the last call reshaped in place."""
        while self._reshaped:
            view = self._reshaped.pop()
            base = view._base
            # Autograd rebuilds the history of a wrapper from its layout.
            if base is not None and isinstance(view, FunctionalTensor) and not view.is_inference():
                rewind(base, 1)  # so that autograd finds the view outdated, and rebuilds its history
                with replaced(self, "_is_off", True):
                    rebuild_history(view, base, self.log.steps_from(base, view))
                bump(base, 1)


def another_name_from_below(tensor: torch.Tensor) -> torch.Tensor:
    """`another_name`, called below autograd."""
    with enable_reentrant_dispatch():
        return another_name(tensor)


def _format_of(tensor: torch.Tensor) -> Mapping[str, Any]:
    for memory_format in (torch.channels_last, torch.channels_last_3d):
        dims = 4 if memory_format is torch.channels_last else 5
        if (
            tensor.dim() == dims
            and not tensor.is_contiguous()
            and tensor.is_contiguous(memory_format=memory_format)
        ):
            return {"memory_format": memory_format}
    return {}


def _as_what_is_viewed(func: OpOverload, args: Sequence[Any]) -> AbstractContextManager[Any]:
    """The mode in which to make a view: in inference mode, a view of a normal tensor is a normal tensor.

    The exception is `view(dtype)`, which makes an inference tensor.
    """
    is_view = getattr(func, "is_view", False) and func is not _VIEW_AS_DTYPE
    if torch.is_inference_mode_enabled() and is_view and not args[0].is_inference():
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        return stack
    return nullcontext()


def _runs_no_users_code(func: Any, types: Sequence[type]) -> bool:
    """Whether an operator of PyTorch's is called on plain tensors.

    Then torch-function modes, which are on in the backward, are switched off: they take 5 us for each
    attribute that is read.
    """
    is_of_torch = is_operator(func) and func.namespace in ("aten", "prim")
    return is_of_torch and all(issubclass(cls, FunctionalTensor) for cls in types)
