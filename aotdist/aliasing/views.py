"""The data of the view log: how a view was made, and the chain of views from a base; errors for views."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.facts import ViewStep
from aotdist.origins import current_source_line
from aotdist.subclasses.protocol import inner_tensors, is_wrapper, plain_tensors, recipe_of, wrapper_rule
from aotdist.torch_seam.autograd import has_history_of_its_own, history_of
from aotdist.torch_seam.functional import memory_of


@dataclass(frozen=True, slots=True)
class ViewEntry:
    """How a view was made.

    Args:
        view: the view; kept alive so that no other tensor gets its id.
        base: the tensor that it was made of.
        steps: the operations that made it.
        made: a serial number of when it was made.
        version: the base's version counter then; None where it has none.
        inside: the tensors inside of the view then, by path, if it is a wrapper.
    """

    view: torch.Tensor
    base: torch.Tensor
    steps: tuple[ViewStep, ...]
    made: int
    version: int | None
    inside: tuple[tuple[str, torch.Tensor], ...] = ()

    def is_outdated(self) -> bool:
        """Whether the base was written since."""
        return self.version is not None and self.base._version > self.version


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor between a base and a view, with a history that replaying views would lose.

    Args:
        tensor: the tensor, for example the result of a user's `autograd.Function`.
        after: the steps from there to the next such tensor, or to the view.
    """

    tensor: torch.Tensor
    after: tuple[ViewStep, ...] = ()


@dataclass(frozen=True, slots=True)
class Root:
    """The chain of operations that leads to a view.

    Args:
        base: the tensor at its start.
        steps: the steps from there to the first of `made`, or to the view itself.
        made: the tensors in between whose history is not that of a view of `base`: each that autograd takes
            for no view (it may be the base of others), and the last one that it takes for a view.
    """

    base: torch.Tensor
    steps: tuple[ViewStep, ...] = ()
    made: tuple[Made, ...] = ()

    def all_steps(self) -> tuple[ViewStep, ...]:
        """All steps from the base to the view."""
        return (*self.steps, *(step for made in self.made for step in made.after))

    def passing(self, before: torch.Tensor | None) -> Root:
        """The same with `base` added to `made`, if replaying views would lose its history.

        Args:
            before: what `base` is a view of; a redistribution between the two has a history, too.
        """
        matters = has_history_of_its_own(self.base) and not (self.made and self.base._is_view())
        matters = matters or (before is not None and _is_redistributed(self.base, before))
        return replace(self, steps=(), made=(Made(self.base, self.steps), *self.made)) if matters else self


@dataclass(frozen=True, slots=True)
class Opened:
    """A tensor and the tensors inside of it, by path, before the program could replace these."""

    tensor: torch.Tensor
    inside: tuple[tuple[str, torch.Tensor], ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Opened:
        """A tensor with what is inside of it now."""
        return cls(tensor, tuple(inner_tensors(tensor)))

    def plains(self) -> list[torch.Tensor]:
        """The plain tensors inside of it, or the tensor itself."""
        return [inner for _, inner in self.inside if not is_wrapper(inner)] or [self.tensor]


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a plain tensor of one lies in a storage of the other's, overlapping or not."""
    return any(_are_in(a, b))


def lies_in(base: torch.Tensor, result: Any) -> bool:
    """Whether all plain tensors of a result do: two jagged tensors may share nothing but their offsets."""
    found = _are_in(base, result)
    return bool(found) and all(found)


def is_another_name(name: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether two tensors have the same elements of the same memory and the same layout."""
    parts = [plain_tensors(one) for one in (name, tensor)]
    places = [[(memory_of(p), p.storage_offset(), p.is_conj(), p.is_neg()) for p in plain] for plain in parts]
    return places[0] == places[1] and recipe_of(name) == recipe_of(tensor)


def _are_in(base: torch.Tensor, result: Any) -> list[bool]:
    views = result if isinstance(result, (list, tuple)) else [result]
    if not all(isinstance(tensor, torch.Tensor) for tensor in (base, *views)):
        return []
    memory = {memory_of(plain) for plain in plain_tensors(base)}
    return [memory_of(plain) in memory for view in views for plain in plain_tensors(view)]


def _is_redistributed(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether gradients of `view` have other placements than those of `base`."""
    is_same_kind = is_wrapper(view) and type(view) is type(base)
    return (
        is_same_kind
        and history_of(view) is not None
        and wrapper_rule(type(view)).is_redistributed(view, base)
    )


# Errors for uses of views that are refused.


def detached_since(where: str | None = None) -> UnsupportedProgram:
    """An error for a view whose history has to be rebuilt from that of its base, which has none now."""
    return view_refusal(
        "a view is used whose base was detached in place (`detach_`), and then written, after it was made",
        "make the view afterwards, or detach a tensor of its own (`x = x.detach()`)",
        where,
    )


def reshaped_since(how: str = "", where: str | None = None) -> UnsupportedProgram:
    """An error for a view whose base has other sizes, strides or memory since; `how` gives details."""
    return view_refusal(
        "a view is used whose base was reshaped in place after it was made, or was given another storage"
        f"{how and f' ({how})'}",
        "make the view afterwards, or reshape without writing (`t` for `t_`)",
        where,
    )


def view_refusal(what: str, fix: str, where: str | None = None) -> UnsupportedProgram:
    """An error that names a line of the user's; without `where`, the one that is being traced."""
    return UnsupportedProgram(what, where=where or current_source_line() or None, stage="joint", fix=fix)
