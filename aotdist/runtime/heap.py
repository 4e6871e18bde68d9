"""Memory on the C library's heap, which one step frees and the next one takes."""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_KEPT = (1 << 31) - 1
_MOST_ON_HEAP = 32 << 20
"""The most that `mallopt` takes, and the largest block that glibc puts on its heap."""
_TOLD_OTHERWISE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep what lies free at the end of its heap, up to 2 GiB, for the rest of the process.

    A compiled step frees its intermediates one after the other, up to the end of the heap. By itself glibc
    gives back to the system what is more than 62 MiB of it, and all blocks of over 32 MiB; in the next step
    they are zeroed and mapped page by page, for a sixth of the time of a small one (20,000 pages of 93 ms),
    in some processes and not in others, as blocks happen to lie. Other allocators do not mind, and one that
    the environment tells otherwise is left alone.
    """
    if any(name in os.environ for name in _TOLD_OTHERWISE):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Either setting ends glibc's own adjustments of both, so both are set.
        mallopt(_MMAP_THRESHOLD, _MOST_ON_HEAP)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
