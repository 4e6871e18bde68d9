"""What is refused of views and of writes through them, and the errors that say so."""

from __future__ import annotations

import torch

from aotdist.aliasing.memory import may_repeat
from aotdist.aliasing.views import Views
from aotdist.errors import UnsupportedProgram
from aotdist.origins import Origins
from aotdist.torch_seam.operators import OpOverload

_STRIDED = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten.unfold.default})


def refuse_overlapping_write(views: Views, func: OpOverload, target: torch.Tensor) -> None:
    """Raise for a write to a tensor of which several elements, or several of a base's, share memory.

    Eager refuses most such writes itself; for the others functionalisation would add up the repeats.
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
            raise _refusal(
                f"`{func}` writes through {made} tensor of size {list(shown.size())}, "
                "whose elements share memory",
                fix="write the tensor before it is expanded, or `clone` the expanded one first",
            )
        shown = None if entry is None else entry.base


def detached_since(where: str | None = None) -> UnsupportedProgram:
    """An error for a view whose history is to be made again from that of its base, which has none now."""
    return _refusal(
        "a view is used whose base was detached in place (`detach_`), and then written, after it was made",
        fix="make the view afterwards, or detach a tensor of its own (`x = x.detach()`)",
        where=where,
    )


def reshaped_since(how: str = "", where: str | None = None) -> UnsupportedProgram:
    """An error for a view whose base has been reshaped since, and has got a history; `how` says more."""
    return _refusal(
        f"a view is used whose base was reshaped in place after it was made{how and f' ({how})'}",
        fix="make the view afterwards, or reshape without writing (`t` for `t_`)",
        where=where,
    )


def grows_as_a_view() -> UnsupportedProgram:
    """An error for a tensor that grows while another shares its memory."""
    return _refusal(
        "a tensor is resized in place, and grows, while another shares its memory",
        fix="clone it first, or make a tensor of the size that you need",
    )


def outgrown() -> UnsupportedProgram:
    """An error for a view whose base has moved to other memory since."""
    return _refusal(
        "a view is used whose base grew in place, or was given another storage, after it was made",
        fix="make the view afterwards, or resize the tensor before the compiled function",
    )


def uncounted_with_history(func: OpOverload) -> UnsupportedProgram:
    """An error for a write with history that autograd does not count, so that older views keep theirs."""
    return _refusal(
        f"`{func}` writes a list with wrappers while autograd records: in eager, views from before keep the "
        "gradients that they had",
        fix="write each by itself (`x.mul_(2)` for `torch._foreach_mul_([x], 2)`), or under `no_grad`",
    )


def strided_in_place() -> UnsupportedProgram:
    """An error for a program that lets a tensor show other memory than it did, in place."""
    return _refusal(
        "`as_strided_` lets a tensor show other elements in place",
        fix="let it be another tensor: `x = x.as_strided(size, stride)`",
    )


def from_storage() -> UnsupportedProgram:
    """An error for a program that sets a tensor to a storage, of which a trace has none."""
    return _refusal(
        "a tensor is set to a storage, which has no memory while it is captured",
        fix="set it to a tensor: `x.set_(y)`",
    )


def _refusal(what: str, *, fix: str, where: str | None = None) -> UnsupportedProgram:
    return UnsupportedProgram(what, where=where or Origins().current() or None, stage="joint", fix=fix)
