"""Plays scenes eagerly and through `torch.compile(backend="aotdist")`, and compares what their user sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotdist.dynamo import Region, backend, regions
from tests.semantics.observation import Around, Scene, Sight, assert_same, nullcontext, play

FX = {"backend": "fx"}


def compiled(target: Any, *, dynamic: bool | None = None, **options: Any) -> Any:
    """What `torch.compile(target, backend="aotdist")` is, the backend's name being known or not."""
    return torch.compile(target, backend=backend, dynamic=dynamic, options=FX | options)


def played(
    build: Callable[[], Sequence[Scene]],
    compile: Callable[[Any], Any],
    *,
    around: Around = nullcontext,
    seed: int = 0,
) -> list[Sight]:
    """What the user sees of all scenes, whose function `compile` was applied to."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    scenes = build()
    call = compile(scenes[0].fn)
    torch.manual_seed(seed + 1)
    return [sight for scene in scenes for sight in play(scene, call, around=around)]


def same_as_eager(
    fn: Any,
    *arguments: Callable[[], tuple[Any, ...]],
    dynamic: bool | None = None,
    around: Around = nullcontext,
    **options: Any,
) -> list[Region]:
    """Call `fn` with each of the arguments, eagerly and compiled; assert that nobody can tell the difference.

    Returns:
        what Dynamo handed over, in order.
    """

    def build() -> list[Scene]:
        return [Scene(fn, make()) for make in arguments]

    eager = played(build, lambda target: target, around=around)
    before = set(regions())
    ours = played(build, lambda target: compiled(target, dynamic=dynamic, **options), around=around)
    assert_same(eager, ours)
    return [region for region in regions() if region not in before]
