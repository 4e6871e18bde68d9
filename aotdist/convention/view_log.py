"""Remembers, while a program is traced, by which operation each view was made of which tensor.

A dispatch mode on top of all others sees every operation on the tensors that the user handles,
wrappers included, below autograd. So one log serves plain tensors and subclasses, under `no_grad`
and `detach` too, where autograd itself forgets what a view was made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import enable_reentrant_dispatch

from aotdist.capture.guise import Guises
from aotdist.capture.origins import Origins
from aotdist.convention.changes import INVERSES, Change, resize_as_out, set_memory
from aotdist.convention.memory import may_repeat, shows
from aotdist.convention.naming import another_name
from aotdist.convention.outdated_views import detached_since, lies_elsewhere, make_again, reshaped_since
from aotdist.convention.swapping import Exchange
from aotdist.convention.version import all_uncounted, bump, rewind, written_uncounted
from aotdist.errors import UnsupportedProgram
from aotdist.facts import Around, Inside, ViewStep, data_of
from aotdist.subclasses.protocol import (
    around_one,
    inner_tensors,
    is_wrapper,
    plain_tensors,
    wrapper_rule,
)
from aotdist.torch_seam.autograd import has_history_of_its_own, history_of
from aotdist.torch_seam.functional import FunctionalTensor, memory_of
from aotdist.torch_seam.modes import TorchDispatchMode, torch_functions_off
from aotdist.torch_seam.operators import (
    HigherOrderOperator,
    OpOverload,
    broken_up,
    is_left_whole_in_inference,
    is_operator,
    makes_views,
    out_names,
    out_of_place,
    written_by,
)
from aotdist.torch_seam.tensors import storage_id

_DETACH = torch.ops.aten.detach.default
_LIKE_ANOTHER = {
    torch.ops.aten.view_as.default: torch.ops.aten.reshape.default,
    torch.ops.aten.reshape_as.default: torch.ops.aten.reshape.default,
    torch.ops.aten.expand_as.default: torch.ops.aten.broadcast_to.default,
}
"""What does the same without a second tensor; only in inference mode they come here whole."""
_SET = torch.ops.aten.set_.source_Tensor
_FROM_STORAGES = frozenset(
    {torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset}
)
_SETS = frozenset({_SET, torch.ops.aten.set_.default})
_RESIZE = torch.ops.aten.resize_.default
_RESIZES = frozenset({_RESIZE, torch.ops.aten.resize_as_.default})
_GROWING = frozenset[Any]({_RESIZE, resize_as_out})
_AS_STRIDED_ = torch.ops.aten.as_strided_.default
_STRIDED = frozenset[Any]({torch.ops.aten.as_strided.default, torch.ops.aten.unfold.default})
_VIEW_AS_DTYPE = torch.ops.aten.view.dtype
_LIFT = torch.ops.aten.lift_fresh.default
"""What `torch.tensor` does with its data; to the program the result is no view of anything."""


@dataclass(frozen=True, slots=True)
class _Entry:
    view: torch.Tensor  # held, so that its id stays its own
    base: torch.Tensor
    steps: tuple[ViewStep, ...]
    made: int
    version: int | None  # of the base then
    inside: tuple[tuple[str, torch.Tensor], ...] = ()  # of the view then

    def is_outdated(self) -> bool:
        return self.version is not None and self.base._version > self.version

    def shares_history(self) -> bool:
        return all(step.grad and step.op not in (_DETACH, data_of) for step in self.steps)


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor on the way from a base to a view, with a history that replaying views would lose.

    Args:
        tensor: the tensor: a user's `autograd.Function` made it, say.
        after: how, from there, to the next such tensor, or to the view.
    """

    tensor: torch.Tensor
    after: tuple[ViewStep, ...] = ()


@dataclass(frozen=True, slots=True)
class Root:
    """Where a view comes from.

    Args:
        base: the tensor that it is a view of in the end.
        steps: how, from there, to the first of `made`, or to the view itself.
        made: the tensors on the way with histories of their own: all that are no views to autograd, which may
            be the base of others, and the last that is one.
    """

    base: torch.Tensor
    steps: tuple[ViewStep, ...] = ()
    made: tuple[Made, ...] = ()

    def all_steps(self) -> tuple[ViewStep, ...]:
        """How, from the base to the view."""
        return (*self.steps, *(step for made in self.made for step in made.after))

    def passing(self, before: torch.Tensor | None) -> Root:
        """The same, where the tensor at which it has arrived so far is one of `made`, if it has to be.

        Args:
            before: what it is a view of, if its gradient is not to arrive there as autograd would have it.
        """
        matters = has_history_of_its_own(self.base) and not (self.made and self.base._is_view())
        matters = matters or (before is not None and _is_redistributed(self.base, before))
        return replace(self, steps=(), made=(Made(self.base, self.steps), *self.made)) if matters else self


@dataclass(frozen=True, slots=True)
class Opened:
    """A tensor, and what lies inside of it, by path; the program may put other tensors there."""

    tensor: torch.Tensor
    inside: tuple[tuple[str, torch.Tensor], ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Opened:
        """With what is there now."""
        return cls(tensor, tuple(inner_tensors(tensor)))

    def plains(self) -> list[torch.Tensor]:
        """The plain tensors: those inside, or the tensor itself."""
        return [inner for _, inner in self.inside if not is_wrapper(inner)] or [self.tensor]


@dataclass(frozen=True, slots=True)
class Uncounted:
    """A write that autograd's version counter does not count, so that views made before are not made again.

    Args:
        tensor: what was written.
        serial: when.
        is_recorded: whether it may have got a history by that.
    """

    tensor: torch.Tensor
    serial: int
    is_recorded: bool


class Storages(Protocol):
    """What is known of the storages of traced tensors."""

    def part(self, storage: Any, dtype: torch.dtype, *where: Any, **more: Any) -> torch.Tensor:
        """A tensor that lies in a storage as `set_` says."""
        ...

    def follow(self, view: torch.Tensor, base: torch.Tensor) -> bool:
        """Let a view lie in the memory that its base has grown to; False if it cannot be."""
        ...


class ViewLog(TorchDispatchMode):
    """Logs views; ask it with `root`.

    Args:
        guises: what the user's code sees of the tensors, if it sees something else.
    """

    supports_higher_order_operators = True

    def __init__(self, guises: Guises | None = None) -> None:
        super().__init__()
        self._guises = guises or Guises()
        self._entries: dict[int, _Entry] = {}
        self._outgrown: dict[int, torch.Tensor] = {}
        self._moved: dict[int, torch.Tensor] = {}
        self._parted: dict[int, torch.Tensor] = {}
        """By view: what it is a view of to autograd, where the log has gone on to what that was made of."""
        self._reshaped: list[torch.Tensor] = []
        self._from_base: dict[int, tuple[ViewStep, ...]] = {}
        """By view: how it was made of what it is a view of to autograd, before that was reshaped."""
        self._serials = itertools.count()
        self.storages: Storages | None = None
        self._as_made: dict[int, torch.Tensor] = {}
        self._reads_data = False
        self._is_off = False
        self.changes: list[Change] = []
        self.uncounted: list[Uncounted] = []

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
        with self._guises.off(self._guises.among((*args, *kwargs.values()))):
            result = self._dispatch(func, args, kwargs)
        return self._guises.show(result)

    def _dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)  # none of them makes views
        whole = is_left_whole_in_inference(func)
        if whole and not any(map(is_wrapper, args)):
            # Elsewhere autograd has broken `view_as` and `reshape` up before they come here. Wrappers
            # get to see `view_as` itself, as in eager. What it is broken up into is not inside of anything.
            with self, nullcontext() if makes_views(func) else enable_reentrant_dispatch():
                return broken_up(func, *args, **kwargs)
        targets = [*written_by(func, args, kwargs)] if is_operator(func) else []
        for target in targets:
            self._refuse_overlapping_write(func, target)
        if self.changes:
            self._refuse_lost((*args, *kwargs.values()), targets)
        if whole or (getattr(func, "is_view", False) and func is not _LIFT):
            with nullcontext() if whole else _as_what_is_viewed(func, args):
                result = self._view_by(func)(*args, **kwargs)
            # `reshape`, `to`, `dropout` make views where they can; autograd conjugates numbers, too.
            if isinstance(args[0], torch.Tensor) and (not whole or share_memory(args[0], result)):
                self._log(func, args, kwargs, result)
            return result
        if torch.Tag.inplace_view in getattr(func, "tags", ()):
            return self._log_in_place(func, args, kwargs)
        results = out_names(func) if is_operator(func) else ()
        if results:
            return self._log_outs(func, args, kwargs, results)
        uncounted = written_uncounted(args)
        if uncounted:
            serial, records = next(self._serials), _is_recorded((*args, *kwargs.values()))
            self.uncounted += [Uncounted(target, serial, records) for target in targets]
        with all_uncounted(uncounted):
            return func(*args, **kwargs)

    def _log(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        base, *rest = args
        if func in _LIKE_ANOTHER:
            func, rest = _LIKE_ANOTHER[func], [rest[0].size()]
        grad, serial = torch.is_grad_enabled(), next(self._serials)
        picks = enumerate(result) if isinstance(result, (list, tuple)) else ((None, result),)
        for pick, view in picks:
            if view is not base:
                step = ViewStep(func, tuple(rest), tuple(kwargs.items()), pick, grad, serial)
                made, version = next(self._serials), None if base.is_inference() else base._version
                self._entries[id(view)] = _Entry(view, base, (step,), made, version, Opened.of(view).inside)

    def data_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor.data`, which looks like `detach` from here."""
        self._reads_data = True
        try:
            view = tensor.data
        finally:
            self._reads_data = False
        entry = self._entries.get(id(view))
        if entry is not None and entry.steps[-1].op is _DETACH:
            steps = (*entry.steps[:-1], replace(entry.steps[-1], op=data_of))
            self._entries[id(view)] = replace(entry, steps=steps)
        return view

    def _view_by(self, func: OpOverload) -> Callable[..., Any]:
        """`func`, as `.data` calls it: above autograd, so that writes of what lies inside are counted."""
        return _detached_for_data if self._reads_data and func is _DETACH else func

    def _log_in_place(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """`view.t_()`: the view is one more step away from its base, and views of it are not."""
        op, do = func, func
        if func is _AS_STRIDED_:
            self._refuse_looking_around(args[0], *args[1:], **kwargs)
        if func in _FROM_STORAGES:
            args = (args[0], self._in_storage(args[1], args[0].dtype, *args[2:], **kwargs))
            op, do, kwargs = set_memory, _SET, {}
        changed, *rest = args
        size, stride = changed.size(), changed.stride()
        former = None if func in INVERSES else another_name_from_below(changed)
        edge = None
        if do in _SETS:
            with enable_reentrant_dispatch():
                edge = _edge_of_leaf(changed)
        result = do(*args, **kwargs)
        if func in _RESIZES:
            if changed.size() == size and changed.stride() == stride:
                return result
            op, rest, kwargs = _RESIZE, [tuple(changed.size())], _format_of(changed)
        change = self._change(changed, size, op, rest, kwargs, bumps=1, former=former, edge=edge)
        if not change.moves():
            self._make_views_again(changed)
        twin = out_of_place(func)
        entry = self._entries.get(id(changed))
        if entry is not None:
            self._rebase_views_of(entry)
        if entry is not None and twin is not None:
            # Autograd makes the history of a view again after any write: grad mode matters when it is made.
            grad = entry.steps[-1].grad if changed._is_view() else change.grad
            steps = (ViewStep(twin, tuple(rest), tuple(kwargs.items()), None, grad, change.serial),)
            if not changed._is_view():  # `x.detach().t_()` is no view to autograd, `x.detach().t()` is one
                steps = (*steps, ViewStep(_DETACH, (), (), None, change.grad, next(self._serials)))
            self._entries[id(changed)] = replace(entry, steps=(*entry.steps, *steps))
            self._reshaped.append(changed)
        return result

    def _rebase_views_of(self, entry: _Entry) -> None:
        """Let views of a view that is reshaped be views of what that is one of."""
        for other in [other for other in self._entries.values() if other.base is entry.view]:
            if other.view._base is entry.view:
                self._parted[id(other.view)] = entry.view
            rebased = replace(other, base=entry.base, steps=(*entry.steps, *other.steps))
            self._entries[id(other.view)] = rebased

    def _refuse_looking_around(
        self,
        view: torch.Tensor,
        size: Sequence[int],
        stride: Sequence[int],
        storage_offset: int | None = None,
    ) -> None:
        """Eager sends gradients of what else it shows nowhere, and after a write to what its base is."""
        if id(view) not in self._entries or not view.requires_grad or not view._is_view():
            return
        if not shows(view, size, stride, storage_offset):
            raise UnsupportedProgram(
                "`as_strided_` lets a view with a history show elements that it did not show",
                where=Origins().current() or None,
                stage="joint",
                fix="make the view by `as_strided` of its base",
            )

    def _make_views_again(self, base: torch.Tensor) -> None:
        """Let what is known as a view of `base`, which was reshaped in place, be one of what that is now.

        The operators that made it, by which autograd makes its history again, hold for what the base was.
        """
        for view in [entry.view for entry in self._entries.values() if entry.view._base is base]:
            with enable_reentrant_dispatch():
                self._make_again(view, base, self._from_base.get(id(view)) or self._steps_from(base, view))

    def settle(self) -> None:
        """Let views that were reshaped in place by the call before be what they are now, to autograd, too."""
        while self._reshaped:
            view = self._reshaped.pop()
            base = view._base
            if base is not None:
                known, last = self._from_base.get(id(view)), self._entries[id(view)].steps[-1]
                steps = (*known, last) if known else self._steps_from(base, view)
                rewind(base, 1)  # as if it was made before, so that its history is made again
                self._make_again(view, base, steps)
                bump(base, 1)

    def _make_again(self, view: torch.Tensor, base: torch.Tensor, steps: tuple[ViewStep, ...]) -> None:
        with self._guises.off(self._guises.among([view])):
            if not isinstance(view, FunctionalTensor) or view.is_inference():
                return  # the history of a wrapper follows from where it lies
            self._from_base[id(view)] = steps
            self._is_off = True
            try:
                make_again(view, self._as_at(base, steps[0].serial), steps)
            finally:
                self._is_off = False

    def _as_at(self, base: torch.Tensor, serial: int) -> torch.Tensor:
        """A tensor as it was when the trace was so far, by views of what it is now."""
        for change in reversed(self.changes_of(base)):
            base = change.before(base) if change.serial > serial else base
        return base

    def _steps_from(self, base: torch.Tensor, view: torch.Tensor) -> tuple[ViewStep, ...]:
        """How a view was made of what it is one of to autograd, or of what that looks the same as."""
        steps: tuple[ViewStep, ...] = ()
        while view is not base and id(view) in self._entries:
            entry = self._entries[id(view)]
            steps, view = (*entry.steps, *steps), entry.base
        return steps

    def _in_storage(self, *where: Any, **more: Any) -> torch.Tensor:
        assert self.storages is not None, "a trace has them"
        with self, torch.no_grad(), torch_functions_off():
            return self.storages.part(*where, **more)

    def _log_outs(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]
    ) -> Any:
        """An operator may give its `out=` another size."""
        outs = [kwargs[name] for name in names if isinstance(kwargs.get(name), torch.Tensor)]
        before = [(out.size(), another_name(out)) for out in outs]
        result = func(*args, **kwargs)
        for out, (size, former) in zip(outs, before, strict=True):
            _refuse_resized_inside(out, former)
            if out.size() != size:
                shape = [tuple(out.size()), out.stride()]
                self._change(out, size, resize_as_out, shape, {}, bumps=1, former=former)
        return result

    def share(self, view: torch.Tensor) -> None:
        """All that is a view of `view`, if it is one itself, is to be made of the same tensor."""
        entry = self._entries.get(id(view))
        if entry is not None:
            steps = (*entry.steps[:-1], replace(entry.steps[-1], shared=True))
            self._entries[id(view)] = replace(entry, steps=steps)

    def move(self, tensor: torch.Tensor, op: Callable[..., Any], do: Callable[[], None], *args: Any) -> None:
        """Call `do()`, which is `op(tensor, *args)`, and note that the tensor has other memory then."""
        size, former = tensor.size(), self._name(tensor)
        # For another dtype, autograd has gradients arrive elsewhere from now on.
        is_other = isinstance(args[0], torch.Tensor) and args[0].dtype != tensor.dtype
        edge = _edge_of_leaf(tensor) if is_other else None
        do()
        self._change(tensor, size, op, args, {}, bumps=0, former=former, edge=edge)

    def _name(self, tensor: torch.Tensor) -> torch.Tensor:
        """Another name for what the program has, which the log forgets."""
        name = another_name(tensor)
        self._entries.pop(id(name), None)
        return name

    def resize_storage(
        self, tensor: torch.Tensor, op: Callable[..., Any], num_bytes: int, refill: torch.Tensor | None
    ) -> None:
        """Note that the storage of a tensor has another size; `refill` names what it holds from now on."""
        if refill is not None:
            self._entries.pop(id(refill), None)
        former = self._name(tensor)
        self._note(
            Change(
                tensor=tensor,
                serial=next(self._serials),
                size=tensor.size(),
                op=op,
                args=(num_bytes,),
                former=former,
                grown=refill,
            )
        )

    def base_on(self, storage: int) -> torch.Tensor | None:
        """A tensor, itself no view, that lies in a storage, if views were made of any."""
        for entry in self._entries.values():
            if id(entry.base) not in self._entries and storage_id(entry.base) == storage:
                return entry.base
        return None

    def changes_history(self, tensor: torch.Tensor, op: Callable[..., Any], *args: Any) -> None:
        """Call `op(tensor, *args)`, which changes its history, and note it."""
        before = tensor.requires_grad, history_of(tensor) is None
        former = self._name(tensor) if history_of(tensor) is not None else None
        op(tensor, *args)
        if before != (tensor.requires_grad, history_of(tensor) is None):
            self._change(tensor, tensor.size(), op, args, {}, bumps=0, former=former)

    def _change(
        self,
        tensor: torch.Tensor,
        size: torch.Size,
        op: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        bumps: int,
        former: torch.Tensor | None,
        edge: GradientEdge | None = None,
    ) -> Change:
        grown = another_name(tensor) if op in _GROWING and tensor.numel() > size.numel() else None
        change = Change(
            tensor=tensor,
            serial=next(self._serials),
            size=size,
            op=op,
            args=tuple(args),
            kwargs=tuple(kwargs.items()),
            grad=torch.is_grad_enabled(),
            bumps=bumps,
            former=former,
            grown=grown,
            edge=edge,
        )
        self._note(change)
        stays = grown is not None and former is not None and share_memory(former, tensor)
        if grown is not None and size.numel() and id(tensor) in self._entries and not stays:
            raise _grows_as_a_view()
        if grown is not None and not stays:
            views = [e.view for e in self._entries.values() if self._is_view_of(e.view, tensor)]
            self._outgrown |= {id(view): view for view in views if not self._follow(view, tensor)}
        return change

    def _follow(self, view: torch.Tensor, base: torch.Tensor) -> bool:
        return self.storages is not None and self.storages.follow(view, base)

    def _note(self, change: Change) -> None:
        self.changes.append(change)
        if change.moves() and id(change.tensor) in self._entries:
            self._moved[id(change.tensor)] = change.tensor

    def _is_view_of(self, view: torch.Tensor, base: torch.Tensor) -> bool:
        return any(passed is base for passed in self.bases(view))

    def is_or_shows(self, tensor: torch.Tensor, base: torch.Tensor) -> bool:
        """Whether a tensor is `base`, or a view of it."""
        return tensor is base or self._is_view_of(tensor, base)

    def _refuse_lost(self, values: Sequence[Any], written: Sequence[torch.Tensor]) -> None:
        """Refuse views that show other memory, or have another history, than the log can tell."""
        for view in written if _is_recorded(values) else ():
            base = view._base
            # Autograd cuts gradients of a base by where the two lie: the view as ever, the base as it is now.
            if base is not None and lies_elsewhere(base, self._changes_since_made(view, base)):
                raise _outgrown()
        for value in values:
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if id(tensor) in self._outgrown:
                    raise _outgrown()
                if id(tensor) in self._entries:
                    self._refuse_lost_history(tensor)

    def _refuse_lost_history(self, view: torch.Tensor) -> None:
        base = view._base
        if base is None or not view.requires_grad or not self.is_outdated(view):
            return
        changes = self._changes_since_made(view, base)
        if any(change.op is torch.Tensor.detach_ for change in changes):
            raise detached_since()
        if lies_elsewhere(base, changes):
            raise _outgrown()

    def _changes_since_made(self, view: torch.Tensor, base: torch.Tensor) -> list[Change]:
        return [change for change in self.changes_of(base) if change.serial > self.made(view)]

    def _refuse_overlapping_write(self, func: OpOverload, target: torch.Tensor) -> None:
        """Raise for a write into memory that one of the tensor's bases shows several times.

        Eager refuses most such writes itself; for the others functionalisation would add up the repeats.
        """
        shown: torch.Tensor | None = target
        while shown is not None:
            entry = self._entries.get(id(shown))
            strided = entry is not None and entry.steps[-1].op in _STRIDED
            expanded = _repeats_memory(shown)
            if expanded or (strided and may_repeat(shown)):
                made = "an expanded" if expanded else "a strided"
                raise UnsupportedProgram(
                    f"`{func}` writes through {made} tensor of size {list(shown.size())}, "
                    "whose elements share memory",
                    where=Origins().current(),
                    stage="joint",
                    fix="write the tensor before it is expanded, or `clone` the expanded one first",
                )
            shown = None if entry is None else entry.base

    def exchange(self, exchange: Exchange) -> None:
        """Two tensors have become each other: what is known of the one is known of the other."""
        of = exchange.of
        views = {key: of(entry.view) for key, entry in self._entries.items()}
        self._parted = {id(views[key]): of(base) for key, base in self._parted.items()}
        self._from_base = {id(views[key]): steps for key, steps in self._from_base.items()}
        entries = [replace(e, view=of(e.view), base=of(e.base), inside=()) for e in self._entries.values()]
        self._entries = {id(entry.view): entry for entry in entries}
        self._outgrown = {id(tensor): tensor for tensor in map(of, self._outgrown.values())}
        self._moved = {id(tensor): tensor for tensor in map(of, self._moved.values())}
        self.changes = [
            replace(change, tensor=of(change.tensor), args=tuple(map(of, change.args)))
            for change in self.changes
        ]

    def look_inside(self, tensors: Iterable[Any], inputs: Sequence[Opened]) -> None:
        """Take for views, from now on, what lies inside of inputs that are wrappers, and what wraps inputs.

        Eager has it in their memory, which is written when the region has run. What lies inside of views of
        inputs, or wraps those, counts too.

        Args:
            tensors: what may be a view, in the end, of such a tensor.
            inputs: what the program was given.
        """
        memory = {memory_of(plain) for given in inputs for plain in given.plains()}
        for tensor in tensors:
            entry = self._unseen(tensor, inputs, memory)
            while entry is not None:
                self._entries[id(entry.view)] = entry
                entry = self._unseen(tensor, inputs, memory)

    def _unseen(self, tensor: Any, inputs: Sequence[Opened], memory: Container[int]) -> _Entry | None:
        """How the base of a tensor comes from a wrapper, or from what it wraps, which no mode sees."""
        if not isinstance(tensor, torch.Tensor):
            return None
        base = self.root(tensor, ()).base
        if not any(memory_of(plain) in memory for plain in plain_tensors(base)):
            return None
        if any(base is given.tensor for given in inputs):
            return None
        entry = self._inside(base, inputs)
        return self._around(base) if entry is None and is_wrapper(base) else entry

    def _inside(self, inner: torch.Tensor, inputs: Sequence[Opened]) -> _Entry | None:
        """Out of which wrapper to take a tensor: an input, or a tensor that views were made of, or a view."""
        logged = {
            id(tensor): tensor for entry in self._entries.values() for tensor in (entry.base, entry.view)
        }
        for given in inputs:
            logged.pop(id(given.tensor), None)
        for wrapper in (*inputs, *map(Opened.of, logged.values())):
            for path, tensor in wrapper.inside:
                if tensor is inner and not self._is_view_of(wrapper.tensor, inner):
                    return self._without_operator(inner, wrapper.tensor, Inside(path))
        return None

    def _around(self, wrapper: torch.Tensor) -> _Entry | None:
        """What to put into a wrapper, if that is one tensor alone."""
        inside = around_one(wrapper)
        if inside is None:
            return None
        inner, recipe = inside
        return self._without_operator(wrapper, inner, Around(recipe))

    def _without_operator(self, view: torch.Tensor, base: torch.Tensor, op: Callable[..., Any]) -> _Entry:
        return _Entry(view, base, (ViewStep(op, (), serial=next(self._serials)),), self.made(base), None)

    def _is_recorded_since(self, entry: _Entry) -> bool:
        """Whether the base of a view got another history, of which autograd does not know, after the view."""
        return any(
            write.is_recorded and write.serial > entry.made and self.is_or_shows(write.tensor, entry.base)
            for write in self.uncounted
        )

    def made(self, tensor: torch.Tensor) -> int:
        """When a view was made, as a number that grows; before all others for what is no view."""
        entry = self._entries.get(id(tensor))
        return -1 if entry is None else entry.made

    def bases(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """What `tensor` is a view of, what that is a view of, and so on."""
        entry = self._entries.get(id(tensor))
        while entry is not None:
            yield entry.base
            entry = self._entries.get(id(entry.base))

    def bases_by_operators(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Those of them that autograd may know: not a wrapper for what lies inside of it, nor the reverse."""
        entry = self._entries.get(id(tensor))
        while entry is not None and not isinstance(entry.steps[-1].op, (Inside, Around)):
            yield entry.base
            entry = self._entries.get(id(entry.base))

    def holds_others(self, view: torch.Tensor) -> bool:
        """Whether a tensor inside of a view has been replaced by another since it was made."""
        entry = self._entries.get(id(view))
        pairs = zip(inner_tensors(view), () if entry is None else entry.inside, strict=False)
        return any(now is not before for (_, now), (_, before) in pairs)

    def is_outdated(self, tensor: torch.Tensor) -> bool:
        """Whether a view, or one on the way to it, was made before a write of what it is a view of.

        Autograd makes its history again then, from the base that it knows, whatever was between.
        """
        entry = self._entries.get(id(tensor))
        while entry is not None:
            if entry.is_outdated():
                return True
            entry = self._entries.get(id(entry.base))
        return False

    def was_made_before_a_write(self, tensor: torch.Tensor) -> bool:
        """Whether a view itself was made before a write of what it is a view of."""
        entry = self._entries.get(id(tensor))
        return entry is not None and entry.is_outdated()

    def has_outdated_views(self, base: torch.Tensor) -> bool:
        """Whether there are such views of a tensor, with a history."""
        views = [entry.view for entry in self._entries.values()]
        return any(v.requires_grad and self._is_view_of(v, base) and self.is_outdated(v) for v in views)

    def changes_of(self, tensor: torch.Tensor) -> list[Change]:
        """What was done in place to a tensor, in order."""
        return [change for change in self.changes if change.tensor is tensor]

    def as_made(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as it was before all that was done to it in place; the same object at every call."""
        known = self._as_made.get(id(tensor))
        if known is None:
            known = tensor
            with torch.enable_grad():
                for change in reversed(self.changes_of(tensor)):
                    known = change.before_to_autograd(known)
            self._as_made[id(tensor)] = known
        return known

    def root(self, tensor: torch.Tensor, known: Container[int], *, through_node: bool = False) -> Root:
        """What `tensor` is a view of in the end, and how.

        Args:
            tensor: the view.
            known: the chain stops at a tensor whose id this holds: `y.detach()[0]` has `y.detach()` for its
                `_base`, and the caller may hold both.
            through_node: gradients of its base arrive at the node, which expects them to be laid out as that
                is: views that were redistributed are among those with histories of their own.
        """
        found = Root(tensor)
        entry = self._entries.get(id(tensor))
        while entry is not None:
            self._refuse_lost_history(found.base)
            parted = self._parted.get(id(found.base))
            if parted is not None and (parted.requires_grad or id(parted) in known):
                raise reshaped_since()
            found = found.passing(entry.base if through_node else None)
            if id(found.base) in self._outgrown or id(entry.base) in self._moved:
                raise _outgrown()
            if entry.shares_history() and self._is_recorded_since(entry):
                raise _keeps_its_history()
            found = replace(found, base=entry.base, steps=(*entry.steps, *found.steps))
            entry = None if id(found.base) in known else self._entries.get(id(found.base))
        return found


def _edge_of_leaf(tensor: torch.Tensor) -> GradientEdge | None:
    if not (tensor.requires_grad and tensor.is_leaf):
        return None
    with torch.enable_grad():
        return get_gradient_edge(tensor)


def another_name_from_below(tensor: torch.Tensor) -> torch.Tensor:
    """The same, from where autograd has been left behind."""
    with enable_reentrant_dispatch():
        return another_name(tensor)


def _refuse_resized_inside(out: torch.Tensor, former: torch.Tensor) -> None:
    """Refuse a wrapper that does not have the sizes of what is in it any more: eager leaves it so."""
    inside = zip(plain_tensors(out), plain_tensors(former), strict=True)
    if is_wrapper(out) and any(plain.size() != before.size() for plain, before in inside):
        raise UnsupportedProgram(
            f"a {type(out).__name__} is given as `out=` of an operator whose result has another size",
            where=Origins().current() or None,
            stage="joint",
            fix="give it the size of the result before",
        )


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


def _grows_as_a_view() -> UnsupportedProgram:
    return UnsupportedProgram(
        "a tensor is resized in place, and grows, while another shares its memory",
        where=Origins().current() or None,
        stage="joint",
        fix="clone it first, or make a tensor of the size that you need",
    )


def _outgrown() -> UnsupportedProgram:
    return UnsupportedProgram(
        "a view is used of a tensor whose size grew in place, or whose storage was replaced, after the view",
        where=Origins().current() or None,
        stage="joint",
        fix="make the view afterwards, or resize the tensor before the compiled function",
    )


def _keeps_its_history() -> UnsupportedProgram:
    return UnsupportedProgram(
        "an operator of lists with wrappers writes a tensor after a view of it was made: in eager the view "
        "keeps the gradient that it had before",
        stage="joint",
        fix="write it by itself (`x.mul_(2)` for `torch._foreach_mul_([x], 2)`), or make the view afterwards",
    )


def _is_recorded(values: Sequence[Any]) -> bool:
    """Whether autograd records what is done with values."""
    if not torch.is_grad_enabled():
        return False
    flat = (one for value in values for one in (value if isinstance(value, (list, tuple)) else [value]))
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in flat)


def _detached_for_data(tensor: torch.Tensor) -> torch.Tensor:
    return wrapper_rule(type(tensor)).data_of(tensor) if is_wrapper(tensor) else _DETACH(tensor)


def _as_what_is_viewed(func: OpOverload, args: Sequence[Any]) -> AbstractContextManager[Any]:
    """In inference mode, a view of a tensor from outside of it is a normal tensor too, if its dtype is."""
    is_view = getattr(func, "is_view", False) and func is not _VIEW_AS_DTYPE
    if torch.is_inference_mode_enabled() and is_view and not args[0].is_inference():
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        return stack
    return nullcontext()


def share_memory(base: torch.Tensor, result: Any) -> bool:
    """Whether a result, one tensor or several, lies in memory of `base`; wrappers by what is in them."""
    views = result if isinstance(result, (list, tuple)) else [result]
    if not all(isinstance(tensor, torch.Tensor) for tensor in (base, *views)):
        return False
    memory = {memory_of(plain) for plain in plain_tensors(base)}
    return any(memory_of(plain) in memory for view in views for plain in plain_tensors(view))


def _is_redistributed(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether gradients of `view` are laid out otherwise than those of `base`."""
    is_same_kind = is_wrapper(view) and type(view) is type(base)
    return (
        is_same_kind
        and history_of(view) is not None
        and wrapper_rule(type(view)).is_redistributed(view, base)
    )


def _repeats_memory(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
