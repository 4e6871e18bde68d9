"""The notice board: messages between ranks through the store in which they met.

A notice is a small JSON value under a key. Ranks poll for notices rather than wait in the store:
`TCPStore.wait` blocks the connection, which other threads of the process share, and prints two warnings at
each timeout; `FileStore.wait` looks once a second.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from aotdist.errors import RankLost
from aotdist.torch_seam import groups
from aotdist.torch_seam.groups import Store

T = TypeVar("T")

Party = tuple[int, ...]
"""Ranks that meet: two or more global ranks in ascending order. The first one leads."""

Run: TypeAlias = tuple[int, tuple[str, ...]]
"""The number of a party's last run, and digests of that run and the ones before, the last first."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.2
"""Seconds between two looks. The longest: 1,000 ranks waiting ask the store 5,000 times a second."""


class StoreGone(RankLost):
    """The store itself no longer answers."""


@dataclass(slots=True)
class Memory:
    """What one rank remembers between agreements in one store.

    Args:
        failures: number of compilations and agreements of this rank that failed.
        troubles: topics of errors that this rank has posted; it deletes them when it compiles again.
        failures_at: for each party, `failures` at this rank's last meeting with it.
        runs: for each party, by its key, the last runs.
        gave_up_at: for each party, by its key, the run at which this rank last raised an error.
        forwards: number of runs of forwards that communicate.
        known: ranks that have posted a run.
        says_at_the_end: whether the end of the process will be posted.
    """

    failures: int = 0
    troubles: set[str] = field(default_factory=set[str])
    failures_at: Counter[Party] = field(default_factory=Counter[Party])
    runs: dict[str, Run] = field(default_factory=dict[str, Run])
    gave_up_at: dict[str, int] = field(default_factory=dict[str, int])
    forwards: int = 0
    known: set[int] = field(default_factory=set[int])
    says_at_the_end: bool = False


_memories: WeakKeyDictionary[Store, dict[int, Memory]] = WeakKeyDictionary()
"""By store, so that a new process group does not find what the one before left behind; then by rank, because
ranks that are threads may share a store."""


@dataclass(frozen=True, slots=True)
class Board:
    """One rank's access to the notices.

    Args:
        store: the store that has them, the same for all ranks.
        rank: this rank's global number.

    Raises:
        StoreGone: from every method, when the store no longer answers.
    """

    store: Store
    rank: int

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return dist.get_world_size()

    @property
    def memory(self) -> Memory:
        """What this rank remembers between agreements in this store."""
        return _memories.setdefault(self.store, {}).setdefault(self.rank, Memory())

    def post(self, key: str, notice: object) -> None:
        """Post a notice, in place of an older one with the same key."""
        with self._reaching():
            self.store.set(_full(key), _encode(notice))

    def read(self, key: str) -> Any | None:
        """The notice, or None when there is none."""
        with self._reaching():
            return json.loads(self.store.get(_full(key))) if self.store.check([_full(key)]) else None

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all of these notices exist; one request to the store."""
        with self._reaching():
            return self.store.check([_full(key) for key in keys])

    def read_all(self, keys: Sequence[str]) -> list[Any]:
        """Notices that are known to exist; one request to the store."""
        with self._reaching():
            return [json.loads(notice) for notice in self.store.multi_get([_full(key) for key in keys])]

    def say(self, topic: str, notice: object) -> None:
        """Post this rank's notice on a topic."""
        self.post(f"{topic}/{self.rank}", notice)

    def said(self, topic: str, ranks: Sequence[int]) -> dict[int, Any]:
        """The notices of ranks on a topic, without those that have none.

        Two requests to the store if all have one, else two for each rank.
        """
        keys = [f"{topic}/{rank}" for rank in ranks]
        notices = self.read_all(keys) if self.has(keys) else [self.read(key) for key in keys]
        return {rank: notice for rank, notice in zip(ranks, notices, strict=True) if notice is not None}

    def unsay(self, topics: Iterable[str]) -> None:
        """Delete this rank's notices on these topics."""
        with self._reaching():
            for topic in topics:
                self.store.delete_key(_full(f"{topic}/{self.rank}"))

    def settle(self, key: str, notice: object) -> Any:
        """Post a notice unless there is one; returns the one that is there then. The first writer wins."""
        with self._reaching():
            return json.loads(self.store.compare_set(_full(key), "", _encode(notice)))

    def count(self, key: str) -> int:
        """Add one to a counter; its new value."""
        with self._reaching():
            return self.store.add(_full(key), 1)

    @contextmanager
    def _reaching(self) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:  # DistError is one; FileStore raises it bare
            raise StoreGone(
                f"the store that the ranks meet in no longer answers ({first_line(error)})",
                stage="runtime",
                fix="the process that hosts it has died: the launcher under torchrun, rank 0 without it; "
                "look at its log and start again",
            ) from error


def board_of_this_process() -> Board | None:
    """The board of the default process group; None without peers: no group, one rank, a fake group."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if dist.get_backend() == "fake":
        return None
    store = groups.default_store()
    return None if store is None else Board(store, dist.get_rank())


def poll(look: Callable[[float], T | None], first_pause_s: float = _FIRST_PAUSE_S) -> T:
    """Call `look` with growing pauses until it returns something else than None.

    A pause is at most a tenth of the time waited so far.

    Args:
        look: takes the seconds waited so far; returns None for "not yet".
        first_pause_s: the shortest pause.
    """
    start = time.monotonic()
    while (found := look(waited := time.monotonic() - start)) is None:
        time.sleep(min(max(first_pause_s, waited / 10), _LONGEST_PAUSE_S))
    return found


def spell(ranks: Iterable[int]) -> str:
    """Ranks as text: `rank 3`, `ranks 0-7`, `ranks 0, 2, 5`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    found = itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])
    stretches = [[rank for _, rank in pairs] for _, pairs in found]  # of consecutive numbers
    runs = [f"{s[0]}-{s[-1]}" if len(s) > 2 else ", ".join(map(str, s)) for s in stretches]
    shown = runs if len(runs) <= 8 else [*runs[:8], f"... ({len(ordered)} ranks)"]
    return f"ranks {', '.join(shown)}"


def party_key(party: Party) -> str:
    """A party as a short key: `0-7`, `0-56/8` (every eighth), `0,1,5`. `party_named` reads it back."""
    stride = party[1] - party[0]
    if party == tuple(range(party[0], party[-1] + 1, stride)):
        return f"{party[0]}-{party[-1]}" + (f"/{stride}" if stride > 1 else "")
    return ",".join(map(str, party))


def party_named(key: str) -> Party:
    """The party whose `party_key` this is."""
    if "-" not in key:
        return tuple(int(rank) for rank in key.split(","))
    ends, _, stride = key.partition("/")
    first, _, last = ends.partition("-")
    return tuple(range(int(first), int(last) + 1, int(stride or 1)))


def first_line(error: BaseException) -> str:
    """An error's message, or its type where it has none, on one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _full(key: str) -> str:
    return f"aotdist/{key}"


def _encode(notice: object) -> str:
    return json.dumps(notice, separators=(",", ":"))
