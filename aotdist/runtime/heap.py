"""Memory on the C library's heap, which one step frees and the next one takes."""

from __future__ import annotations

import functools

import torch

_BLOCK_BYTES = 31 << 20


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep what lies free at the end of its heap, up to 62 MiB, for the rest of the process.

    It gives back to the system what is more than twice the largest block that was ever freed, up to 32 MiB a
    block. A compiled step frees its intermediates one after the other, up to the end of the heap; given back,
    they are zeroed and mapped page by page in the next step, for a tenth of the time of a small one. So a
    block of nearly that size is made and freed, which is never touched, and so takes no memory itself.
    Other allocators, and one told otherwise (`MALLOC_TRIM_THRESHOLD_`), do not mind.
    """
    torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
