"""Remembers, while a program is traced, by which operation each view was made of which tensor.

A dispatch mode on top of all others sees every operation on the tensors that the user handles,
wrappers included, below autograd. So one log serves plain tensors and subclasses, under `no_grad`
and `detach` too, where autograd itself forgets what a view was made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotdist.capture.origins import Origins
from aotdist.errors import UnsupportedProgram
from aotdist.facts import ViewStep, data_of
from aotdist.subclasses.protocol import is_wrapper, plain_tensors
from aotdist.torch_seam import (
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    broken_up,
    is_left_whole_in_inference,
    is_operator,
    made_by_custom_function,
    memory_of,
    out_of_place,
    writes_arguments,
)

_DETACH = torch.ops.aten.detach.default
_LIKE_ANOTHER = {
    torch.ops.aten.view_as.default: torch.ops.aten.reshape.default,
    torch.ops.aten.reshape_as.default: torch.ops.aten.reshape.default,
    torch.ops.aten.expand_as.default: torch.ops.aten.broadcast_to.default,
}
"""What does the same without a second tensor; only in inference mode they come here whole."""
_LIFT = torch.ops.aten.lift_fresh.default
"""What `torch.tensor` does with its data; to the program the result is no view of anything."""


@dataclass(frozen=True, slots=True)
class _Entry:
    view: torch.Tensor  # held, so that its id stays its own
    base: torch.Tensor
    steps: tuple[ViewStep, ...]
    base_changed: bool = False  # the base has had its own size or strides written since


@dataclass(frozen=True, slots=True)
class Root:
    """Where a view comes from.

    Args:
        base: the tensor that it is a view of in the end.
        steps: how, from there, to `function`, or to the view itself.
        function: the last tensor on the way that a user's `autograd.Function` returned: to replay only the
            operations inside it would lose its backward.
        after: how, from `function`, to the view.
    """

    base: torch.Tensor
    steps: tuple[ViewStep, ...] = ()
    function: torch.Tensor | None = None
    after: tuple[ViewStep, ...] = ()


@dataclass(frozen=True, slots=True)
class ChangeOfMetadata:
    """Sizes, strides or history written in place: `op(tensor, *args, **kwargs)`.

    Args:
        tensor: what was written.
        size: its sizes before.
        op: the operator.
        args: its other positional arguments.
        kwargs: its keyword arguments as pairs.
        grad: whether grad mode was on.
    """

    tensor: torch.Tensor
    size: torch.Size
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    grad: bool


class ViewLog(TorchDispatchMode):
    """Logs views; ask it with `root`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[int, _Entry] = {}
        self._serials = itertools.count()
        self.metadata: list[ChangeOfMetadata] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)  # none of them makes views
        whole = is_left_whole_in_inference(func)
        if whole and not any(map(is_wrapper, args)):
            # Elsewhere autograd has broken `view_as` and `reshape` up before they come here. Wrappers
            # get to see `view_as` itself, as in eager.
            with self:
                return broken_up(func, *args, **kwargs)
        if args and is_operator(func) and writes_arguments(func):
            self._refuse_overlapping_write(func, args[0])
        in_place = torch.Tag.inplace_view in getattr(func, "tags", ())
        size = args[0].size() if in_place else torch.Size()
        with _as_what_is_viewed(func, args):
            result = func(*args, **kwargs)
        if whole:
            if _share_memory(args[0], result):  # `reshape`, `to` and `dropout` do so where they can
                self._log(func, args, kwargs, result)
        elif getattr(func, "is_view", False) and func is not _LIFT:
            self._log(func, args, kwargs, result)
        elif in_place:
            self._log_in_place(func, args, kwargs)
            grad = torch.is_grad_enabled()
            self.metadata.append(ChangeOfMetadata(args[0], size, func, args[1:], tuple(kwargs.items()), grad))
        return result

    def _log(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        base, *rest = args
        if func in _LIKE_ANOTHER:
            func, rest = _LIKE_ANOTHER[func], [rest[0].size()]
        grad, serial = torch.is_grad_enabled(), next(self._serials)
        picks = enumerate(result) if isinstance(result, (list, tuple)) else ((None, result),)
        for pick, view in picks:
            if view is not base:
                step = ViewStep(func, tuple(rest), tuple(kwargs.items()), pick, grad, serial)
                self._entries[id(view)] = _Entry(view, base, (step,))

    def made_by_data(self, view: torch.Tensor) -> None:
        """`view` was made by `.data`, which looks like `detach` from here."""
        entry = self._entries.get(id(view))
        if entry is not None and entry.steps[-1].op is _DETACH:
            steps = (*entry.steps[:-1], replace(entry.steps[-1], op=data_of))
            self._entries[id(view)] = replace(entry, steps=steps)

    def _log_in_place(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """`view.t_()`: the view is one more step away from its base, and views of it are not."""
        changed, *rest = args
        twin = out_of_place(func)
        entry = self._entries.get(id(changed))
        for other in [other for other in self._entries.values() if other.base is changed]:
            if entry is None or twin is None:
                rebased = replace(other, base_changed=True)
            else:
                rebased = replace(other, base=entry.base, steps=(*entry.steps, *other.steps))
            self._entries[id(other.view)] = rebased
        if entry is not None and twin is not None:
            grad = torch.is_grad_enabled()
            steps = (ViewStep(twin, tuple(rest), tuple(kwargs.items()), None, grad),)
            if not changed._is_view():  # `x.detach().t_()` is no view to autograd, `x.detach().t()` is one
                steps = (*steps, ViewStep(_DETACH, (), (), None, grad, next(self._serials)))
            self._entries[id(changed)] = replace(entry, steps=(*entry.steps, *steps))
        elif entry is not None:
            self._entries[id(changed)] = replace(entry, base_changed=True)

    def _refuse_overlapping_write(self, func: OpOverload, target: Any) -> None:
        """Raise for a write into memory that one of the tensor's bases shows several times.

        Eager refuses most such writes itself; for the others functionalisation would add up the repeats.
        """
        shown = target if isinstance(target, torch.Tensor) else None
        while shown is not None:
            if _repeats_memory(shown):
                raise UnsupportedProgram(
                    f"`{func}` writes through an expanded tensor of size {list(shown.size())}, "
                    "whose elements share memory",
                    where=Origins().current(),
                    stage="joint",
                    fix="write the tensor before it is expanded, or `clone` the expanded one first",
                )
            entry = self._entries.get(id(shown))
            shown = None if entry is None else entry.base

    def made(self, tensor: torch.Tensor) -> int:
        """When a view was made, as a number that grows; before all others for what is no view."""
        return next((k for k, view in enumerate(self._entries) if view == id(tensor)), -1)

    def root(self, tensor: torch.Tensor, known: Container[int]) -> Root:
        """What `tensor` is a view of in the end, and how.

        The chain stops at a tensor whose id is `known`: `y.detach()[0]` has `y.detach()` for its `_base`, and
        the caller may hold both.
        """
        found = Root(tensor)
        entry = self._entries.get(id(tensor))
        while entry is not None:
            if found.function is None and made_by_custom_function(found.base):
                found = replace(found, function=found.base, steps=(), after=found.steps)
            if entry.base_changed:
                raise _changed_under_a_view()
            found = replace(found, base=entry.base, steps=(*entry.steps, *found.steps))
            entry = None if id(found.base) in known else self._entries.get(id(found.base))
        return found


def _changed_under_a_view() -> UnsupportedProgram:
    return UnsupportedProgram(
        "a view is returned of a tensor that has its size or strides written in place after the view",
        stage="joint",
        fix="use the function that is not in place (`t` for `t_`), or make the view afterwards",
    )


def _as_what_is_viewed(func: OpOverload, args: Sequence[Any]) -> AbstractContextManager[Any]:
    """In inference mode, a view of a tensor from outside of it is a normal tensor too."""
    if torch.is_inference_mode_enabled() and getattr(func, "is_view", False) and not args[0].is_inference():
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        return stack
    return nullcontext()


def _share_memory(base: torch.Tensor, result: Any) -> bool:
    views = result if isinstance(result, (list, tuple)) else [result]
    if not all(isinstance(tensor, torch.Tensor) for tensor in (base, *views)):
        return False
    memory = {memory_of(plain) for plain in plain_tensors(base)}
    return any(memory_of(plain) in memory for view in views for plain in plain_tensors(view))


def _repeats_memory(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
