"""Views that no operator makes: the tensors inside of a wrapper, and a wrapper around a tensor."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from aotdist.convention.view_log import ViewLog
from aotdist.convention.views import Opened, ViewEntry, Views
from aotdist.facts import Around, Inside, ViewStep
from aotdist.subclasses.protocol import around_one, is_wrapper, plain_tensors
from aotdist.torch_seam.functional import memory_of


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
