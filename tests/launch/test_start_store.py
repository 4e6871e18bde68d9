"""The ranks of one start find each other in a store that earlier starts have used."""

import threading

import pytest
import torch.distributed as dist

from aotdist import RankLost
from aotdist.launch.start_store import store_of_start


def start(store, world_size):
    """What each rank of a start finds in its part of the store, after all have written there."""
    parts, ready = {}, threading.Barrier(world_size)

    def come(rank):
        part = store_of_start(store, rank, world_size, 20)
        fresh = not part.check([f"address/{rank}"])
        ready.wait(20)
        part.set(f"address/{rank}", str(rank))
        ready.wait(20)
        parts[rank] = fresh, [part.get(f"address/{other}") for other in range(world_size)]

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return parts


def test_starts_one_after_the_other_share_nothing():
    store = dist.HashStore()
    for world_size in (3, 2, 4, 1, 3):
        addresses = [str(rank).encode() for rank in range(world_size)]
        assert start(store, world_size) == {rank: (True, addresses) for rank in range(world_size)}


def test_a_key_of_a_rank_that_is_gone_brings_nobody():
    store = dist.HashStore()
    store.set("asks/1", "of an earlier start")
    with pytest.raises(RankLost, match="of the ranks, 1, 2 did not come within 0.1 s"):
        store_of_start(store, 0, 3, 0.1)
