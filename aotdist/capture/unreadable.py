"""What hangs on an object among the arguments, and is no data: a program that reads it is refused."""

from __future__ import annotations

from typing import Any

from aotdist.errors import UnsupportedProgram


class Unreadable:
    """Stands for an iterator, a lock, an array of numpy's.

    Whoever does anything with it, but to ask whether it is None, gets an error.

    Args:
        path: where it hangs, as the user would write it.
        kind: its class, by name.
    """

    def __init__(self, path: str, kind: str) -> None:
        object.__setattr__(self, "_says", (path, kind))

    def __getattribute__(self, name: str) -> Any:
        path, kind = object.__getattribute__(self, "_says")
        raise UnsupportedProgram(
            f"`{path}` is a {kind}, which is neither a tensor nor a constant, and the program reads it",
            stage="capture",
            fix="read it before the call, and pass what it says",
        )

    def _refuse(self, *_: Any) -> Any:
        return self.anything

    __bool__ = __len__ = __iter__ = __next__ = __call__ = __getitem__ = __eq__ = _refuse
    __enter__ = __exit__ = __hash__ = __contains__ = __setattr__ = __add__ = __mul__ = _refuse


def is_unreadable(value: Any) -> bool:
    """Whether `value` is such a stand-in; `isinstance` would ask it for its class."""
    return type(value) is Unreadable
