"""The corner of torchrun's store that belongs to one start of the ranks, and to those that came to it alone.

The store outlives the ranks, and nothing that torchrun tells them is new at each start: a machine that joins
starts all ranks again without counting it, and counts from 0 itself. So rank 0 makes a name up, and every
rank asks it for that name by a word that has never been in the store before.
"""

from __future__ import annotations

import secrets
import time

from aotdist.errors import RankLost
from aotdist.torch_seam.groups import PrefixStore, Store

_POLL_S = 0.02


def own_corner(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """A part of the store that this start's ranks share, and nobody has written to.

    Args:
        store: that all ranks have, whatever earlier starts have left in it.
        rank: of this process.
        world_size: ranks that come.
        timeout_s: how long they may take; the store's own limit is for the others than rank 0.

    Raises:
        RankLost: on rank 0, when some did not come.
    """
    if rank == 0:
        name = secrets.token_hex(8)
        _tell(store, name, set(range(1, world_size)), timeout_s)
    else:
        word = secrets.token_hex(8)
        store.set(f"asks/{rank}", word)
        name = store.get(f"told/{word}").decode()
        store.set(f"knows/{name}/{rank}", "")
    return PrefixStore(f"start-{name}", store)


def _tell(store: Store, name: str, waiting: set[int], timeout_s: float) -> None:
    """Answers every word that a rank has left, also that of one which is gone, until the living ones know."""
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
