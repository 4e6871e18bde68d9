"""The chains of views of a traced program, and its in-place changes of metadata, in order.

`aotdist.aliasing.view_mode` writes the log while the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from aotdist.aliasing.metadata import Change, another_name, lies_elsewhere
from aotdist.aliasing.view_refusals import detached_since, outgrown, reshaped_since, view_refusal
from aotdist.aliasing.views import Opened, Root, ViewEntry, Views, share_memory
from aotdist.facts import Around, Inside, ViewStep
from aotdist.subclasses.protocol import around_one, is_wrapper, plain_tensors
from aotdist.torch_seam.autograd import history_of
from aotdist.torch_seam.functional import memory_of

_RESIZE = torch.ops.aten.resize_.default


class ViewLog:
    """The chains of views, and in-place changes; `root` follows a chain."""

    def __init__(self) -> None:
        self.views = Views()
        self.changes: list[Change] = []
        self._outgrown: dict[int, torch.Tensor] = {}
        self._moved: dict[int, torch.Tensor] = {}
        self._parted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Views whose entries were moved to the base of their base, with their base to autograd."""
        self._as_made: dict[int, torch.Tensor] = {}

    def root(self, tensor: torch.Tensor, known: Container[int], *, through_node: bool = False) -> Root:
        """What `tensor` is a view of in the end, and how.

        Args:
            tensor: the view.
            known: the chain stops at a tensor whose id this holds: `y.detach()[0]` has `y.detach()` for its
                `_base`, and the caller may hold both.
            through_node: whether gradients of its base arrive at the node, which expects them laid out like
                the base: then redistributed views count as having a history of their own.
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
        """A tensor as it was before all its in-place changes; the same object at every call."""
        known = self._as_made.get(id(tensor))
        if known is None:
            known = tensor
            with torch.enable_grad():
                for change in reversed(self.changes_of(tensor)):
                    known = change.before_to_autograd(known)
            self._as_made[id(tensor)] = known
        return known

    def move(self, tensor: torch.Tensor, op: Callable[..., Any], do: Callable[[], None], *args: Any) -> None:
        """Call `do()`, which does `op(tensor, *args)`, and note that the tensor was moved to other memory."""
        size, former = tensor.size(), self._name(tensor)
        do()
        self.note_change(tensor, size, op, args, {}, bumps=0, former=former)

    def changes_history(self, tensor: torch.Tensor, op: Callable[..., Any], *args: Any) -> None:
        """Call `op(tensor, *args)`, which changes its history, and note it."""
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
        self._note(change)
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

    def _note(self, change: Change) -> None:
        self.changes.append(change)
        if change.moves() and change.tensor in self.views:
            self._moved[id(change.tensor)] = change.tensor

    def _name(self, tensor: torch.Tensor) -> torch.Tensor:
        """Another name for a tensor of the program's, of which the log knows nothing."""
        name = another_name(tensor)
        self.views.forget(name)
        return name

    def rebase_views_of(self, entry: ViewEntry) -> None:
        """Let the views of a view that is reshaped be views of its base."""
        for other in [other for other in self.views if other.base is entry.view]:
            if other.view._base is entry.view:
                self._parted[id(other.view)] = other.view, entry.view
            self.views.put(replace(other, base=entry.base, steps=(*entry.steps, *other.steps)))

    def refuse_lost(self, values: Sequence[Any], written: Sequence[torch.Tensor]) -> None:
        """Refuse views whose memory or history the log does not know."""
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
    """Whether autograd records what is done with values."""
    if not torch.is_grad_enabled():
        return False
    flat = (one for value in values for one in (value if isinstance(value, (list, tuple)) else [value]))
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in flat)


# Views that no operator makes: the tensors inside of a wrapper, and a wrapper around a tensor.


def look_inside(log: ViewLog, tensors: Iterable[Any], inputs: Sequence[Opened]) -> None:
    """Treat as views, from now on, the tensors inside of inputs that are wrappers, and wrappers of inputs.

    In eager they share the inputs' memory, which is written when the region has run. Tensors inside of views
    of inputs, and wrappers of those, count too.

    Args:
        log: where the views are noted.
        tensors: those that may be views, over several steps, of such tensors.
        inputs: the inputs of the program.
    """
    memory = {memory_of(plain) for given in inputs for plain in given.plains()}
    for tensor in tensors:
        entry = _unseen(log, tensor, inputs, memory)
        while entry is not None:
            log.views.put(entry)
            entry = _unseen(log, tensor, inputs, memory)


def _unseen(log: ViewLog, tensor: Any, inputs: Sequence[Opened], memory: Container[int]) -> ViewEntry | None:
    """How the base of a tensor comes out of a wrapper, or wraps another tensor: no mode sees that happen."""
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
