"""The log of a traced program's views, and of its in-place changes of metadata, in order.

`aotdist.aliasing.view_mode` writes it while the program is traced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from aotdist.aliasing.memory import may_repeat
from aotdist.aliasing.metadata import Change, another_name
from aotdist.aliasing.views import (
    Opened,
    Root,
    ViewEntry,
    detached_since,
    reshaped_since,
    share_storage,
    view_refusal,
)
from aotdist.facts import Inside, ViewStep
from aotdist.origins import current_source_line
from aotdist.subclasses.protocol import inner_tensors, plain_tensors
from aotdist.torch_seam.autograd import history_of
from aotdist.torch_seam.functional import memory_of
from aotdist.torch_seam.operators import OpOverload

_RESIZE = torch.ops.aten.resize_.default
_STRIDED = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten.unfold.default})


class ViewLog:
    """How each view was made, and the in-place changes of metadata."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._entries: dict[int, ViewEntry] = {}
        """How each view was made, by the view's identity."""
        self._serials = itertools.count()
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
        entry = self.entry_of(tensor)
        while entry is not None:
            self._refuse_lost_history(found.base)
            found = found.passing(entry.base if through_node else None)
            if id(found.base) in self._lost or id(entry.base) in self._moved:
                raise reshaped_since()
            found = replace(found, base=entry.base, steps=(*entry.steps, *found.steps))
            entry = None if id(found.base) in known else self.entry_of(found.base)
        return found

    def next_serial(self) -> int:
        """A serial number greater than all before."""
        return next(self._serials)

    def entry_of(self, tensor: torch.Tensor) -> ViewEntry | None:
        """How a tensor was made, if it is a view."""
        return self._entries.get(id(tensor))

    def entries(self) -> Collection[ViewEntry]:
        """How each view was made."""
        return self._entries.values()

    def put(self, entry: ViewEntry) -> None:
        """Note how a view was made, in the place of an earlier entry."""
        self._entries[id(entry.view)] = entry

    def views_of(self, base: torch.Tensor) -> list[torch.Tensor]:
        """The views of `base`, direct and through others."""
        return [entry.view for entry in self.entries() if self.is_view_of(entry.view, base)]

    def is_view_of(self, view: torch.Tensor, base: torch.Tensor) -> bool:
        """Whether a tensor is a view of `base`, directly or through others."""
        return any(passed is base for passed in self.bases(view))

    def made_at(self, tensor: torch.Tensor) -> int:
        """The serial number of when a view was made; -1 for a tensor that is no view."""
        entry = self.entry_of(tensor)
        return -1 if entry is None else entry.made

    def bases(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The tensor that `tensor` is a view of, the one that this is a view of, and so on."""
        return (entry.base for entry in self._chain(tensor))

    def bases_by_operators(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """As `bases`, up to a step into a wrapper, which autograd does not record."""
        chain = self._chain(tensor)
        recorded = itertools.takewhile(lambda entry: not isinstance(entry.steps[-1].op, Inside), chain)
        return (entry.base for entry in recorded)

    def _chain(self, tensor: torch.Tensor) -> Iterator[ViewEntry]:
        """The entry of a view, that of its base, and so on."""
        entry = self.entry_of(tensor)
        while entry is not None:
            yield entry
            entry = self.entry_of(entry.base)

    def steps_from(self, base: torch.Tensor, view: torch.Tensor) -> tuple[ViewStep, ...]:
        """The steps from `base` to a view."""
        steps: tuple[ViewStep, ...] = ()
        while view is not base:
            entry = self._entries[id(view)]
            steps, view = (*entry.steps, *steps), entry.base
        return steps

    def holds_others(self, view: torch.Tensor) -> bool:
        """Whether a tensor inside of a view has been replaced by another since it was made."""
        entry = self.entry_of(view)
        pairs = zip(inner_tensors(view), () if entry is None else entry.inside, strict=False)
        return any(now is not before for (_, now), (_, before) in pairs)

    def is_outdated(self, tensor: torch.Tensor) -> bool:
        """Whether the base of a view, or of one between that and the view, was written since.

        Autograd then rebuilds the history of the view, from the base that it knows.
        """
        return any(entry.is_outdated() for entry in self._chain(tensor))

    def has_outdated_views(self, base: torch.Tensor) -> bool:
        """Whether a tensor has outdated views that require grad."""
        return any(view.requires_grad and self.is_outdated(view) for view in self.views_of(base))

    def changes_of(self, tensor: torch.Tensor) -> list[Change]:
        """The in-place changes of a tensor, in order."""
        return [change for change in self.changes if change.tensor is tensor]

    def move(self, tensor: torch.Tensor, op: Callable[..., Any], do: Callable[[], None], *args: Any) -> None:
        """Call `do()`, which does `op(tensor, *args)`, and note that the tensor has other memory now."""
        size, former = tensor.size(), another_name(tensor)
        self._entries.pop(id(former), None)
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
            serial=self.next_serial(),
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
        is_view = self.entry_of(tensor) is not None
        if is_view and change.reshapes():
            self._lost |= {id(view): view for view in self.views_of(tensor)}
            if change.moves():
                self._moved[id(tensor)] = tensor
        stays = grown is not None and former is not None and share_storage(former, tensor)
        if grown is not None and size.numel() and is_view and not stays:
            raise view_refusal(
                "a tensor is resized in place, and grows, while another shares its memory",
                "clone it first, or make a tensor of the size that you need",
            )
        if grown is not None and not stays:
            self._lost |= {id(view): view for view in self.views_of(tensor)}
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
                if isinstance(tensor, torch.Tensor) and self.entry_of(tensor) is not None:
                    self._refuse_lost_history(tensor)

    def _refuse_lost_history(self, view: torch.Tensor) -> None:
        """Refuse a view whose history autograd makes again, by the view's operators, of a changed base."""
        if not view.requires_grad or not self.is_outdated(view):
            return
        for change in self._changes_of_base(view):
            if change.op is torch.Tensor.detach_:
                raise detached_since()
            if change.reshapes():
                raise reshaped_since()

    def refuse_overlapping_write(self, func: OpOverload, target: torch.Tensor) -> None:
        """Raise for a write to a tensor whose own elements share memory, or to a view of such a tensor.

        Eager refuses most such writes itself; in the others, functionalisation would add up repeated
        elements.
        """
        shown: torch.Tensor | None = target
        while shown is not None:
            entry = self.entry_of(shown)
            strided = entry is not None and entry.steps[-1].op in _STRIDED
            expanded = any(
                stride == 0 and size > 1 for size, stride in zip(shown.size(), shown.stride(), strict=True)
            )
            if expanded or (strided and may_repeat(shown)):
                made = "an expanded" if expanded else "a strided"
                raise view_refusal(
                    f"`{func}` writes through {made} tensor of size {list(shown.size())}, "
                    "whose elements share memory",
                    "write the tensor before it is expanded, or `clone` the expanded one first",
                )
            shown = None if entry is None else entry.base

    def _changes_of_base(self, view: torch.Tensor) -> list[Change]:
        """The changes of what is a view's base to autograd, since the view was made."""
        base, made = view._base, self.made_at(view)
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
            log.put(entry)
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
    return _inside(log, base, inputs)


def _inside(log: ViewLog, inner: torch.Tensor, inputs: Sequence[Opened]) -> ViewEntry | None:
    """The step that takes a tensor out of a wrapper: of an input, of a base of views, or of a view."""
    logged = {id(tensor): tensor for entry in log.entries() for tensor in (entry.base, entry.view)}
    for given in inputs:
        logged.pop(id(given.tensor), None)
    for wrapper in (*inputs, *map(Opened.of, logged.values())):
        for path, tensor in wrapper.inside:
            if tensor is inner and not log.is_view_of(wrapper.tensor, inner):
                step = ViewStep(Inside(path), (), serial=log.next_serial())
                return ViewEntry(inner, wrapper.tensor, (step,), log.made_at(wrapper.tensor), None)
    return None
