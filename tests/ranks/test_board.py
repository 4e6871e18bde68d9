"""The notice board in each kind of store, and how parties are written down."""

import threading
import time

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from aotdist.runtime.ranks.board import Board, StoreGone, party_key, party_named, poll, spell


@pytest.fixture(params=["tcp", "file", "memory"])
def board(request, tmp_path):
    match request.param:
        case "tcp":
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        case "file":
            store = dist.FileStore(str(tmp_path / "store"), 1)
        case _:
            store = dist.HashStore()
    return Board(dist.PrefixStore("default_pg", store), 0)


def test_notices_come_back(board):
    notice = {"ranks": [0, 1], "why": "schön", "none": None}
    board.post("a", notice)
    board.post("b", [])
    assert board.read("a") == notice and board.read("b") == [] and board.read("c") is None
    assert board.has(["a", "b"]) and not board.has(["a", "c"])
    assert board.read_all(["b", "a"]) == [[], notice]


def test_what_ranks_say_on_a_topic(board):
    board.say("doing", {"what": "compiling"})
    Board(board.store, 2).say("doing", [])
    assert board.said("doing", [2, 0]) == {2: [], 0: {"what": "compiling"}}
    assert board.said("doing", [0, 1, 2]) == {0: {"what": "compiling"}, 2: []}
    assert board.said("doing", []) == board.said("done", [0, 1]) == {}
    board.unsay(["doing", "never said"])
    assert board.said("doing", [0, 2]) == {2: []}


def test_the_first_to_settle_wins(board):
    assert board.settle("verdict", ["yes"]) == ["yes"]
    assert board.settle("verdict", ["no"]) == ["yes"] == board.read("verdict")


def test_counters_count(board):
    assert [board.count("n") for _ in range(3)] == [1, 2, 3]


def test_memory_belongs_to_one_rank_in_one_store(board):
    board.memory.failures += 1
    assert Board(board.store, 0).memory.failures == 1
    assert Board(board.store, 1).memory.failures == 0
    assert Board(dist.PrefixStore("again", board.store), 0).memory.failures == 0


def test_a_store_whose_host_is_gone_says_so(capfd):
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(dist.TCPStore("127.0.0.1", host.port, is_master=False), 1)
    board.post("a", 1)
    del host
    with pytest.raises(StoreGone, match="no longer answers"):
        board.read("a")
    capfd.readouterr()  # c10d's own warnings about the broken connection


def test_polling_looks_again_until_there_is_something():
    found: list[str] = []
    threading.Timer(0.05, found.append, ["it"]).start()
    start = time.monotonic()
    assert poll(lambda waited: found[0] if found else None) == "it"
    assert time.monotonic() - start > 0.04


PARTIES = st.sets(st.integers(0, 2000), min_size=2, max_size=40).map(lambda ranks: tuple(sorted(ranks)))


@given(PARTIES)
def test_a_party_is_read_back_from_its_key(party):
    assert party_named(party_key(party)) == party


@given(st.integers(0, 100), st.integers(1, 64), st.integers(2, 1000))
def test_a_regular_party_has_a_short_key(first, stride, size):
    party = tuple(range(first, first + stride * size, stride))
    assert party_named(party_key(party)) == party and len(party_key(party)) < 16


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2, 3, 5], "ranks 0-3, 5"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (20 ranks)"),
    ],
)
def test_ranks_are_spelled_as_people_write_them(ranks, words):
    assert spell(ranks) == words
