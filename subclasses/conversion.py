"""Which linear layers of a module are converted in place: what `to_float8` and `sparsify_24` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from aotdist.errors import BadSettings

Filter = Callable[[str, nn.Linear], bool]


def refuse_what_is_no_module(given: Any) -> None:
    """Raise `BadSettings` for anything but a module, whose layers could be converted."""
    if not isinstance(given, nn.Module):
        raise BadSettings(f"cannot convert layers of a {type(given).__name__}", fix="pass a module")


def sort_linears(
    module: nn.Module, reason_against: Callable[[str, nn.Linear], str | None]
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The linear layers to convert, and why each of the others is left alone; both by path.

    Args:
        module: its layers are looked at, itself too.
        reason_against: what keeps a layer from being converted, if anything does.
    """
    chosen: dict[str, nn.Linear] = {}
    skipped: dict[str, str] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        path = name or "(root)"
        reason = reason_against(path, layer)
        if reason is None:
            chosen[path] = layer
        else:
            skipped[path] = reason
    return chosen, skipped


def left_out(filter: Filter | None, path: str, layer: nn.Linear) -> str | None:
    """A reason against a layer that the caller's filter leaves out.

    Raises:
        BadSettings: the filter is none.
    """
    if filter is not None and not callable(filter):
        raise BadSettings(
            f"`filter` is {filter!r}", fix="pass a function that takes a path and a layer, or None"
        )
    return "was left out by the filter" if filter is not None and not filter(path, layer) else None


def in_words(skipped: dict[str, str]) -> str:
    """Why layers were left alone, in one line."""
    return "; ".join(f"`{path}` {reason}" for path, reason in skipped.items())
