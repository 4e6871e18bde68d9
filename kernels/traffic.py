"""What a kernel moves between memory and registers."""

from __future__ import annotations

from collections.abc import Mapping

from aotdist.kernels.index import num_places
from aotdist.kernels.ir import Kernel
from aotdist.kernels.polynomial import hint_of


def bytes_moved(kernel: Kernel, num_elements: Mapping[str, int]) -> int:
    """Bytes that a kernel reads and writes in the call that is traced, each tensor's once.

    Args:
        kernel: what runs.
        num_elements: of every tensor that it reads or writes, by name.
    """
    touched: dict[str, int] = {}
    item_bytes: dict[str, int] = {}
    for access in (*kernel.loads(), *kernel.stores):
        touched[access.buffer] = touched.get(access.buffer, 0) + hint_of(num_places([access.index]))
        item_bytes[access.buffer] = access.stored.itemsize
    return sum(min(count, num_elements[name]) * item_bytes[name] for name, count in touched.items())
