"""Errors for views, and for writes through them, that are refused."""

from __future__ import annotations

import torch

from aotdist.aliasing.memory import may_repeat
from aotdist.aliasing.views import Views
from aotdist.errors import UnsupportedProgram
from aotdist.origins import Origins
from aotdist.torch_seam.operators import OpOverload

_STRIDED = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten.unfold.default})


def refuse_overlapping_write(views: Views, func: OpOverload, target: torch.Tensor) -> None:
    """Raise for a write to a tensor whose own elements share memory, or to a view of such a tensor.

    Eager refuses most such writes itself; in the others, functionalisation would add up repeated elements.
    """
    shown: torch.Tensor | None = target
    while shown is not None:
        entry = views.get(shown)
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


def detached_since(where: str | None = None) -> UnsupportedProgram:
    """An error for a view whose history has to be rebuilt from that of its base, which has none now."""
    return view_refusal(
        "a view is used whose base was detached in place (`detach_`), and then written, after it was made",
        "make the view afterwards, or detach a tensor of its own (`x = x.detach()`)",
        where,
    )


def reshaped_since(how: str = "", where: str | None = None) -> UnsupportedProgram:
    """An error for a view whose base was reshaped since, and has a history now; `how` gives details."""
    return view_refusal(
        f"a view is used whose base was reshaped in place after it was made{how and f' ({how})'}",
        "make the view afterwards, or reshape without writing (`t` for `t_`)",
        where,
    )


def outgrown() -> UnsupportedProgram:
    """An error for a view whose base has other memory since."""
    return view_refusal(
        "a view is used whose base grew in place, or was given another storage, after it was made",
        "make the view afterwards, or resize the tensor before the compiled function",
    )


def view_refusal(what: str, fix: str, where: str | None = None) -> UnsupportedProgram:
    """An error that names a line of the user's; without `where`, the one that is being traced."""
    return UnsupportedProgram(what, where=where or Origins().current() or None, stage="joint", fix=fix)
