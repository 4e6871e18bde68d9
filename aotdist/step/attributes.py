"""What an optimizer, or an object that clips, holds in attributes, and in what hangs on them.

Python runs in the trace alone: what it counts there, in an attribute or in a list, would be counted once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.capture.code import is_users_class
from aotdist.capture.constants import is_constant, is_same
from aotdist.capture.source import ABSENT
from aotdist.errors import UnsupportedProgram
from aotdist.step.held import refill
from aotdist.torch_seam.trees import pytree

_CONTAINERS = (dict, list, set, deque)
_OF_SCHEDULES = "_opt_called"
"""An attribute of optimizers by which schedules tell that there was a step."""


@dataclass(frozen=True, slots=True)
class _Container:
    """A container, or the attributes of an object, and what was in it.

    Args:
        path: where it hangs on its owner; nothing for the owner's own attributes.
        now: the container.
        before: a copy of it.
    """

    path: str
    now: Any
    before: Any

    def changed(self) -> Iterator[tuple[str, Any]]:
        """Places that hold something else by now, and what; the whole container where others are there."""
        if isinstance(self.now, dict):
            for key in self.now.keys() | self.before.keys():
                value = self.now.get(key, ABSENT)
                if not is_same(value, self.before.get(key, ABSENT)):
                    yield _path(self.path, key), value
        elif len(self.now) != len(self.before):
            yield self.path, self.now
        elif isinstance(self.now, set):
            if self.now != self.before:
                yield self.path, self.now
        else:
            for at, (now, before) in enumerate(zip(self.now, self.before, strict=True)):
                if not is_same(now, before):
                    yield _path(self.path, at), now

    def put_back(self) -> None:
        """Let it hold what it held."""
        refill(self.now, self.before)


@contextlib.contextmanager
def unchanged(
    owner: Any, refusal: Callable[[str], UnsupportedProgram], apart: Iterable[Any] = (), *, tensors: bool
) -> Generator[None]:
    """What runs inside leaves the attributes of `owner` as they are, or they are put back.

    Args:
        owner: the object.
        refusal: what to raise, given what has changed.
        apart: containers that may change.
        tensors: whether places may be given tensors, which is done again at each call.

    Raises:
        UnsupportedProgram: something has changed.
    """
    held = list(_containers(owner, {id(container) for container in apart}))
    try:
        yield
        for path, value in (place for container in held for place in container.changed()):
            if path != _OF_SCHEDULES and not (tensors and _is_of_tensors(value)):
                raise refusal(path)
    except BaseException:
        for container in held:
            container.put_back()
        raise


def _containers(owner: Any, seen: set[int]) -> Iterator[_Container]:
    waiting: list[tuple[str, Any]] = [("", vars(owner))]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, torch.optim.Optimizer) or is_users_class(type(value)):
            value = getattr(value, "__dict__", None)
        if isinstance(value, _CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            yield _Container(path, value, value.copy())
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(_path(path, key), item) for key, item in items if not _is_apart(item)]


def _is_apart(value: Any) -> bool:
    """Whether what hangs on `value` is not the owner's, or is seen to elsewhere."""
    return is_constant(value) or isinstance(value, (torch.Tensor, torch.nn.Module, type))


def _is_of_tensors(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _path(path: str, key: Any) -> str:
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key if isinstance(key, int) else type(key).__name__}]"
