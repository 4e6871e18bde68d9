"""A part of torchrun's store for the ranks of one start, under a prefix that they agree on.

The store outlives the ranks, and no environment variable differs at each start: when a machine joins,
torchrun restarts all ranks without counting that as a restart, and the new machine counts from 0. So rank 0
chooses a random name, and every other rank asks for it under a random key, which no earlier start has used.
"""

from __future__ import annotations

import secrets
import time

from aotdist.errors import RankLost
from aotdist.torch_seam.groups import PrefixStore, Store

_POLL_S = 0.02


def store_of_start(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """A new part of the store, which the ranks of this start share.

    Args:
        store: of all ranks; earlier starts may have written to it.
        timeout_s: how long rank 0 waits for the others, which wait as long as the store's own timeout.

    Raises:
        RankLost: on rank 0, if some ranks did not come.
    """
    if rank == 0:
        name = secrets.token_hex(8)
        _answer(store, name, set(range(1, world_size)), timeout_s)
    else:
        key = secrets.token_hex(8)
        store.set(f"asks/{rank}", key)
        name = store.get(f"told/{key}").decode()
        store.set(f"knows/{name}/{rank}", "")
    return PrefixStore(f"start-{name}", store)


def _answer(store: Store, name: str, waiting: set[int], timeout_s: float) -> None:
    """Answer every key in the store, also keys of earlier starts, until all ranks have the name."""
    deadline = time.monotonic() + timeout_s
    while waiting:
        if time.monotonic() > deadline:
            missing = ", ".join(map(str, sorted(waiting)))
            raise RankLost(f"of the ranks, {missing} did not come within {timeout_s:g} s", stage="launch")
        for rank in sorted(waiting):
            if store.check([f"knows/{name}/{rank}"]):
                waiting.remove(rank)
            elif store.check([f"asks/{rank}"]):
                store.set(f"told/{store.get(f'asks/{rank}').decode()}", name)
        time.sleep(_POLL_S)
