"""The ranks of one start find each other in a store that earlier starts have used."""

import threading

import pytest
import torch.distributed as dist

from aotdist import RankLost
from aotdist.launch.corner import own_corner


def start(store, world_size):
    """What each rank of a start finds in its corner, after all have written there."""
    corners, ready = {}, threading.Barrier(world_size)

    def come(rank):
        corner = own_corner(store, rank, world_size, 20)
        fresh = not corner.check([f"address/{rank}"])
        ready.wait(20)
        corner.set(f"address/{rank}", str(rank))
        ready.wait(20)
        corners[rank] = fresh, [corner.get(f"address/{other}") for other in range(world_size)]

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return corners


def test_starts_one_after_the_other_share_nothing():
    store = dist.HashStore()
    for world_size in (3, 2, 4, 1, 3):
        addresses = [str(rank).encode() for rank in range(world_size)]
        assert start(store, world_size) == {rank: (True, addresses) for rank in range(world_size)}


def test_a_word_of_a_rank_that_is_gone_brings_nobody():
    store = dist.HashStore()
    store.set("asks/1", "of an earlier start")
    with pytest.raises(RankLost, match="of the ranks, 1, 2 did not come within 0.1 s"):
        own_corner(store, 0, 3, 0.1)
