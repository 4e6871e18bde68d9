"""The log of a traced program's views, and of its in-place changes of metadata, in order.

`aotdist.aliasing.view_mode` writes it while the program is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from aotdist.aliasing.metadata import Change, another_name, lies_elsewhere
from aotdist.aliasing.views import (
    Opened,
    Root,
    ViewEntry,
    Views,
    detached_since,
    outgrown,
    reshaped_since,
    share_memory,
    view_refusal,
)
from aotdist.facts import Around, Inside, ViewStep
from aotdist.subclasses.protocol import around_one, is_wrapper, plain_tensors
from aotdist.torch_seam.autograd import history_of
from aotdist.torch_seam.functional import memory_of

_RESIZE = torch.ops.aten.resize_.default


class ViewLog:
    """How each view was made, and the in-place changes of metadata."""

    def __init__(self) -> None:
        self.views = Views()
        self.changes: list[Change] = []
        self._outgrown: dict[int, torch.Tensor] = {}
        self._moved: dict[int, torch.Tensor] = {}
        self._parted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Views whose log entries were changed by `rebase_views_of`, each with its base to autograd."""
        self._as_made: dict[int, torch.Tensor] = {}

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
            _, parted = self._parted.get(id(found.base), (None, None))
            if parted is not None and (parted.requires_grad or id(parted) in known):
                raise reshaped_since()
            found = found.passing(entry.base if through_node else None)
            if id(found.base) in self._outgrown or id(entry.base) in self._moved:
                raise outgrown()
            found = replace(found, base=entry.base, steps=(*entry.steps, *found.steps))
            entry = None if id(found.base) in known else self.views.get(found.base)
        return found

    def changes_of(self, tensor: torch.Tensor) -> list[Change]:
        """The in-place changes of a tensor, in order."""
        return [change for change in self.changes if change.tensor is tensor]

    def as_made(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the form that it had before all its in-place changes; the same object at every call."""
        known = self._as_made.get(id(tensor))
        if known is None:
            known = tensor
            with torch.enable_grad():
                for change in reversed(self.changes_of(tensor)):
                    known = change.before_to_autograd(known)
            self._as_made[id(tensor)] = known
        return known

    def move(self, tensor: torch.Tensor, op: Callable[..., Any], do: Callable[[], None], *args: Any) -> None:
        """Call `do()`, which does `op(tensor, *args)`, and note that the tensor has other memory now."""
        size, former = tensor.size(), self._name(tensor)
        do()
        self.note_change(tensor, size, op, args, {}, bumps=0, former=former)

    def changes_history(self, tensor: torch.Tensor, op: Callable[..., Any], *args: Any) -> None:
        """Call `op(tensor, *args)`, which changes the tensor's history, and note it."""
        before = tensor.requires_grad, history_of(tensor) is None
        former = self._name(tensor) if history_of(tensor) is not None else None
        op(tensor, *args)
        if before != (tensor.requires_grad, history_of(tensor) is None):
            self.note_change(tensor, tensor.size(), op, args, {}, bumps=0, former=former)

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
        )
        self.changes.append(change)
        if change.moves() and tensor in self.views:
            self._moved[id(tensor)] = tensor
        stays = grown is not None and former is not None and share_memory(former, tensor)
        if grown is not None and size.numel() and tensor in self.views and not stays:
            raise view_refusal(
                "a tensor is resized in place, and grows, while another shares its memory",
                "clone it first, or make a tensor of the size that you need",
            )
        if grown is not None and not stays:
            views = (entry.view for entry in self.views)
            self._outgrown |= {id(view): view for view in views if self.views.is_view_of(view, tensor)}
        return change

    def _name(self, tensor: torch.Tensor) -> torch.Tensor:
        """`another_name` of a tensor, without an entry in the log."""
        name = another_name(tensor)
        self.views.forget(name)
        return name

    def rebase_views_of(self, entry: ViewEntry) -> None:
        """Log views of a view that is being reshaped as views of its base."""
        for other in [other for other in self.views if other.base is entry.view]:
            if other.view._base is entry.view:
                self._parted[id(other.view)] = other.view, entry.view
            self.views.put(replace(other, base=entry.base, steps=(*entry.steps, *other.steps)))

    def refuse_lost(self, values: Sequence[Any], written: Sequence[torch.Tensor]) -> None:
        """Refuse uses of views whose memory or history is not known any more."""
        if is_recorded(values):
            for view in written:
                base = view._base
                # Autograd slices the base's gradient by the strides of both: the base has new ones by now.
                if base is not None and lies_elsewhere(base, self._changes_since_made(view, base)):
                    raise outgrown()
        for value in values:
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if id(tensor) in self._outgrown:
                    raise outgrown()
                if tensor in self.views:
                    self._refuse_lost_history(tensor)

    def _refuse_lost_history(self, view: torch.Tensor) -> None:
        base = view._base
        if base is None or not view.requires_grad or not self.views.is_outdated(view):
            return
        changes = self._changes_since_made(view, base)
        if any(change.op is torch.Tensor.detach_ for change in changes):
            raise detached_since()
        if lies_elsewhere(base, changes):
            raise outgrown()

    def _changes_since_made(self, view: torch.Tensor, base: torch.Tensor) -> list[Change]:
        return [change for change in self.changes_of(base) if change.serial > self.views.made(view)]


def is_recorded(values: Sequence[Any]) -> bool:
    """Whether autograd records an operation on `values`."""
    if not torch.is_grad_enabled():
        return False
    flat = (one for value in values for one in (value if isinstance(value, (list, tuple)) else [value]))
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in flat)


# Views that no operator makes: a tensor inside of a wrapper, and a wrapper around a tensor.


def look_inside(log: ViewLog, tensors: Iterable[Any], inputs: Sequence[Opened]) -> None:
    """Log as views tensors from inside of wrapper inputs, and wrappers around inputs.

    In eager they share the inputs' memory, which here is written only after the region has run. Tensors
    inside of views of inputs, and wrappers around these, count, too.

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
    """The entry for the base of a tensor, if that is from inside of a wrapper, or a wrapper of a tensor."""
    if not isinstance(tensor, torch.Tensor):
        return None
    base = log.root(tensor, ()).base
    if not any(memory_of(plain) in memory for plain in plain_tensors(base)):
        return None
    if any(base is given.tensor for given in inputs):
        return None
    entry = _inside(log.views, base, inputs)
    return _around(log.views, base) if entry is None and is_wrapper(base) else entry


def _inside(views: Views, inner: torch.Tensor, inputs: Sequence[Opened]) -> ViewEntry | None:
    """The step that takes a tensor out of a wrapper: of an input, of a base of views, or of a view."""
    logged = {id(tensor): tensor for entry in views for tensor in (entry.base, entry.view)}
    for given in inputs:
        logged.pop(id(given.tensor), None)
    for wrapper in (*inputs, *map(Opened.of, logged.values())):
        for path, tensor in wrapper.inside:
            if tensor is inner and not views.is_view_of(wrapper.tensor, inner):
                return _without_operator(views, inner, wrapper.tensor, Inside(path))
    return None


def _around(views: Views, wrapper: torch.Tensor) -> ViewEntry | None:
    """The step that puts a tensor into a wrapper, if that wraps one tensor only."""
    inside = around_one(wrapper)
    if inside is None:
        return None
    inner, recipe = inside
    return _without_operator(views, wrapper, inner, Around(recipe))


def _without_operator(
    views: Views, view: torch.Tensor, base: torch.Tensor, op: Callable[..., Any]
) -> ViewEntry:
    return ViewEntry(view, base, (ViewStep(op, (), serial=views.next_serial()),), views.made(base), None)
