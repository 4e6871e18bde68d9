"""The log of a traced program's views, and of its in-place changes of metadata, in order.

`aotdist.aliasing.view_mode` writes it while the program is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from aotdist.aliasing.metadata import Change, another_name
from aotdist.aliasing.views import (
    Opened,
    Root,
    ViewEntry,
    Views,
    detached_since,
    reshaped_since,
    share_memory,
    view_refusal,
)
from aotdist.facts import Inside, ViewStep
from aotdist.origins import current_source_line
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.autograd import history_of
from aotdist.torch_seam.functional import memory_of

_RESIZE = torch.ops.aten.resize_.default


class ViewLog:
    """How each view was made, and the in-place changes of metadata."""

    def __init__(self) -> None:
        self.views = Views()
        self.changes: list[Change] = []
        self._lost: dict[int, torch.Tensor] = {}
        """Views that are not what they were logged as, since what they were made of has changed."""
        self._moved: dict[int, torch.Tensor] = {}
        """Views that were given other memory."""

    def root(self, tensor: torch.Tensor, known: Container[int], *, through_node: bool = False) -> Root:
        """The tensor at the start of the chain of views that leads to `tensor`, and the steps from there.

        Args:
            tensor: the view.
            known: ids of tensors at which the chain stops: `y.detach()[0]` has `y.detach()` for its `_base`,
                and the caller may have both.
            through_node: whether gradients of the base arrive at the autograd node, which expects them with
                the base's placements: then a redistributed view counts as having a history of its own.
        """
        found = Root(tensor)
        entry = self.views.get(tensor)
        while entry is not None:
            self._refuse_lost_history(found.base)
            found = found.passing(entry.base if through_node else None)
            if id(found.base) in self._lost or id(entry.base) in self._moved:
                raise reshaped_since()
            found = replace(found, base=entry.base, steps=(*entry.steps, *found.steps))
            entry = None if id(found.base) in known else self.views.get(found.base)
        return found

    def changes_of(self, tensor: torch.Tensor) -> list[Change]:
        """The in-place changes of a tensor, in order."""
        return [change for change in self.changes if change.tensor is tensor]

    def move(self, tensor: torch.Tensor, op: Callable[..., Any], do: Callable[[], None], *args: Any) -> None:
        """Call `do()`, which does `op(tensor, *args)`, and note that the tensor has other memory now."""
        size, former = tensor.size(), another_name(tensor)
        self.views.forget(former)
        do()
        self.note_change(tensor, size, op, args, {}, bumps=0, former=former)

    def changes_history(self, tensor: torch.Tensor, op: Callable[..., Any], *args: Any) -> None:
        """Call `op(tensor, *args)`, which changes the tensor's history, and note it."""
        before = tensor.requires_grad, history_of(tensor) is None
        op(tensor, *args)
        if before != (tensor.requires_grad, history_of(tensor) is None):
            self.note_change(tensor, tensor.size(), op, args, {}, bumps=0, former=None)

    def note_change(
        self,
        tensor: torch.Tensor,
        size: torch.Size,
        op: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        bumps: int,
        former: torch.Tensor | None,
    ) -> Change:
        """Note a call of `op(tensor, *args, **kwargs)`; the other arguments are those of `Change`."""
        grown = another_name(tensor) if op is _RESIZE and tensor.numel() > size.numel() else None
        change = Change(
            tensor=tensor,
            serial=self.views.next_serial(),
            size=size,
            op=op,
            args=tuple(args),
            kwargs=tuple(kwargs.items()),
            grad=torch.is_grad_enabled(),
            bumps=bumps,
            former=former,
            grown=grown,
            where=current_source_line(),
        )
        self.changes.append(change)
        if tensor in self.views and change.reshapes():
            self._lost |= {id(view): view for view in self.views.of(tensor)}
            if change.moves():
                self._moved[id(tensor)] = tensor
        stays = grown is not None and former is not None and share_memory(former, tensor)
        if grown is not None and size.numel() and tensor in self.views and not stays:
            raise view_refusal(
                "a tensor is resized in place, and grows, while another shares its memory",
                "clone it first, or make a tensor of the size that you need",
            )
        if grown is not None and not stays:
            self._lost |= {id(view): view for view in self.views.of(tensor)}
        return change

    def refuse_lost(self, values: Sequence[Any], written: Sequence[torch.Tensor]) -> None:
        """Refuse uses of views whose memory or history is not known any more."""
        if is_recorded(values):
            for view in written:
                # Autograd slices the base's gradient by the strides of both: the base has new ones by now.
                if any(change.reshapes() for change in self._changes_of_base(view)):
                    raise reshaped_since()
        for value in values:
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if id(tensor) in self._lost:
                    raise reshaped_since()
                if tensor in self.views:
                    self._refuse_lost_history(tensor)

    def _refuse_lost_history(self, view: torch.Tensor) -> None:
        """Refuse a view whose history autograd makes again, by the view's operators, of a changed base."""
        if not view.requires_grad or not self.views.is_outdated(view):
            return
        for change in self._changes_of_base(view):
            if change.op is torch.Tensor.detach_:
                raise detached_since()
            if change.reshapes():
                raise reshaped_since()

    def _changes_of_base(self, view: torch.Tensor) -> list[Change]:
        """The changes of what is a view's base to autograd, since the view was made."""
        base, made = view._base, self.views.made(view)
        return [] if base is None else [change for change in self.changes_of(base) if change.serial > made]


def is_recorded(values: Sequence[Any]) -> bool:
    """Whether autograd records an operation on `values`."""
    if not torch.is_grad_enabled():
        return False
    flat = (one for value in values for one in (value if isinstance(value, (list, tuple)) else [value]))
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in flat)


# Views that no operator makes: tensors inside of wrappers.


def look_inside(log: ViewLog, tensors: Iterable[Any], inputs: Sequence[Opened]) -> None:
    """Log as views tensors from inside of wrapper inputs, and of views of these.

    In eager they share the inputs' memory, which here is written only after the region has run.

    Args:
        log: where the views are noted.
        tensors: results that may be such views, or views of such views.
        inputs: the inputs of the program.
    """
    memory = {memory_of(plain) for given in inputs for plain in given.plains()}
    for tensor in tensors:
        entry = _unseen(log, tensor, inputs, memory)
        while entry is not None:
            log.views.put(entry)
            entry = _unseen(log, tensor, inputs, memory)


def _unseen(log: ViewLog, tensor: Any, inputs: Sequence[Opened], memory: Container[int]) -> ViewEntry | None:
    """The entry for the base of a tensor, if that is from inside of a wrapper."""
    if not isinstance(tensor, torch.Tensor):
        return None
    base = log.root(tensor, ()).base
    if not any(memory_of(plain) in memory for plain in plain_tensors(base)):
        return None
    if any(base is given.tensor for given in inputs):
        return None
    return _inside(log.views, base, inputs)


def _inside(views: Views, inner: torch.Tensor, inputs: Sequence[Opened]) -> ViewEntry | None:
    """The step that takes a tensor out of a wrapper: of an input, of a base of views, or of a view."""
    logged = {id(tensor): tensor for entry in views for tensor in (entry.base, entry.view)}
    for given in inputs:
        logged.pop(id(given.tensor), None)
    for wrapper in (*inputs, *map(Opened.of, logged.values())):
        for path, tensor in wrapper.inside:
            if tensor is inner and not views.is_view_of(wrapper.tensor, inner):
                step = ViewStep(Inside(path), (), serial=views.next_serial())
                return ViewEntry(inner, wrapper.tensor, (step,), views.made(wrapper.tensor), None)
    return None
