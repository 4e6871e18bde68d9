"""Worlds of ranks for tests: 2 or 4 gloo processes that stay up for the whole pytest session.

Write a *case*: a module-level function that every rank runs, in a file that can be imported
(`tests/ranks/cases_writing.py`, or the test file itself). The default process group is up, the random
seed is 0, torch runs on one thread. What a case returns comes back, pickled, one item per rank::

    # tests/ranks/cases_writing.py
    def gathers(num_elements: int) -> float:
        shard = torch.full((num_elements,), float(dist.get_rank()))
        return funcol.all_gather_tensor(shard, 0, dist.group.WORLD).sum().item()

    # tests/ranks/test_writing.py
    pytestmark = pytest.mark.ranks

    def test_gathers(world2: World):
        assert world2.run(cases_writing.gathers, 8) == [8.0, 8.0]

`run` also takes `"tests.ranks.cases_writing:gathers"`. When a rank raises, dies or does not return in
time, `run` raises `RanksFailed` with the traceback, the output and (for a hang) the stacks of
*every* rank, and the processes are replaced before the next case. So:

- assert inside the case; what the case expects to raise, it catches (`with pytest.raises(...)`);
- a case need not clean up after a failure, but on success it must leave every rank in step: all
  collectives finished, every rank having made the same process groups;
- a case that kills or stops a rank on purpose has a world of its own, and looks at the *outcomes*::

    def test_survivors_name_the_dead():
        with fresh_world(2) as world:
            lost, died = world.outcomes(cases_loss.dies_in_a_step)
        assert isinstance(died, Died) and died.exitcode == -signal.SIGKILL
        assert isinstance(lost, Raised) and lost.kind == "RankLost"

Costs, on two cores: the first world of a session 5 s (a fork server imports torch once), each further
one 0.1-0.3 s, a case 2 ms. Fixtures: `world2`, `world4` (`tests/ranks/conftest.py`, or list this
module in `pytest_plugins`). The store lives in the pytest process, as it does in torchrun's agent;
`fresh_world(n, store="rank0")` and `store="file"` are the other ways in which ranks meet.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from aotdist.runtime.ranks.board import board_of_this_process
from aotdist.runtime.ranks.failing import go_on

Case = Callable[..., Any] | str
StoreKind = Literal["tcp", "rank0", "file"]

PRELOADED = [
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._inductor.compile_fx",
    "aotdist.api",
    "aotdist.artifacts.load",
    "aotdist.compiling",
    "aotdist.step.train_step",
    "tests.ranks.harness",
]
"""What the fork server imports once for all ranks. The last of torch's and what is ours they would import
when they first compile, each in 0.6 s, and with Inductor in 1.5 s more."""

GROUP_TIMEOUT = timedelta(seconds=60)
MANY_GROUPS = 12
"""Ranks that hold more process groups are replaced: gloo wakes up 100 times a second for each."""
START_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Returned:
    """The case returned; `num_groups` is how many process groups the rank has by now."""

    value: Any
    num_groups: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Raised:
    """The case raised; `kind` is the name of the error's class, `text` its message."""

    kind: str
    text: str
    trace: str


@dataclass(frozen=True)
class Died:
    """The process ended; negative exit codes are signals."""

    exitcode: int | None
    output: str


@dataclass(frozen=True)
class Stuck:
    """The case did not return in time; `output` ends with the stack of every thread."""

    output: str


Outcome = Returned | Raised | Died | Stuck


class RanksFailed(AssertionError):
    """What every rank did, when not all of them returned."""

    def __init__(self, case: str, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        parts = [f"--- rank {rank} {_tell(outcome)}" for rank, outcome in enumerate(outcomes)]
        super().__init__("\n".join([f"{case} failed on {len(outcomes)} ranks", *parts]))


def _tell(outcome: Outcome) -> str:
    match outcome:
        case Returned(value=value):
            return f"returned {value!r:.200}"
        case Raised(trace=trace):
            return f"raised\n{trace}"
        case Died(exitcode, output):
            return f"died with exit code {exitcode}\n{output}"
        case Stuck(output):
            return f"did not return in time\n{output}"


@dataclass
class Rank:
    """One process, as the pytest process sees it."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    log: Path
    seen: int = 0

    def output(self) -> str:
        """What it printed since the last time."""
        text = self.log.read_bytes()[self.seen :].decode(errors="replace")
        self.seen += len(text.encode())
        return text.strip()

    def outcome(self) -> Outcome:
        """Its answer, known to be waiting in the pipe, or how it died."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(5)
            return Died(self.process.exitcode, self.output())

    def stacks(self) -> Stuck:
        """Where it hangs."""
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        time.sleep(0.3)
        return Stuck(self.output())

    def end(self) -> None:
        """Kill and forget."""
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


@dataclass
class World:
    """Ranks that run one case after the other; started on first use.

    They are replaced after a failure, and when their cases have left too many process groups behind.
    """

    num_ranks: int
    store: StoreKind = "tcp"
    _ranks: list[Rank] = field(default_factory=list)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _tcp_store: dist.TCPStore | None = None

    def run(self, case: Case, *args: Any, timeout: float = 60.0) -> list[Any]:
        """What the case returns on each rank, in the order of ranks.

        Raises:
            RanksFailed: on some rank it raised, died or took longer than `timeout` seconds.
        """
        outcomes = self.outcomes(case, *args, timeout=timeout)
        if not all(isinstance(outcome, Returned) for outcome in outcomes):
            raise RanksFailed(_name(case), outcomes)
        return [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]

    def outcomes(self, case: Case, *args: Any, timeout: float = 60.0) -> list[Outcome]:
        """What became of each rank; never raises for what happens in one."""
        if not self._ranks:
            self._start()
        request = pickle.dumps((_name(case), args))
        for rank in self._ranks:
            rank.output()
            rank.pipe.send_bytes(request)
        found = self._collect(timeout)
        if not all(isinstance(one, Returned) and one.num_groups <= MANY_GROUPS for one in found):
            self.close()
        return found

    def printed(self) -> str:
        """What the ranks have printed since the last case began."""
        return "\n".join(rank.output() for rank in self._ranks)

    def close(self) -> None:
        """End the ranks; the next case starts new ones."""
        for rank in self._ranks:
            rank.end()
        self._ranks, self._tcp_store = [], None
        if self._folder is not None:
            self._folder.cleanup()

    def _collect(self, timeout: float) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        pending = {rank.pipe: number for number, rank in enumerate(self._ranks)}
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                number = pending.pop(pipe)  # type: ignore[call-overload]
                found[number] = self._ranks[number].outcome()
        return [found.get(number) or rank.stacks() for number, rank in enumerate(self._ranks)]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = Path(self._folder.name)
        self._ranks = [self._spawn(number, folder) for number in range(self.num_ranks)]
        self._introduce(folder)
        started = self._collect(START_TIMEOUT_S)
        if not all(isinstance(outcome, Returned) for outcome in started):
            self.close()
            raise RanksFailed("starting the world", started)

    def _spawn(self, number: int, folder: Path) -> Rank:
        here, there = multiprocessing.Pipe()
        log = folder / f"rank{number}.log"
        process = fork_server().Process(
            target=_serve, args=(number, self.num_ranks, there, str(log)), daemon=True
        )
        process.start()
        there.close()
        log.touch()
        return Rank(process, here, log)

    def _introduce(self, folder: Path) -> None:
        """Tell every rank where the store is."""
        place: str | int = str(folder / "store")
        if self.store == "tcp":
            self._tcp_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            place = self._tcp_store.port
        elif self.store == "rank0":
            self._ranks[0].pipe.send(0)
            place = self._ranks[0].pipe.recv()
        for rank in self._ranks[1:] if self.store == "rank0" else self._ranks:
            rank.pipe.send(place)


@contextlib.contextmanager
def fresh_world(num_ranks: int, store: StoreKind = "tcp") -> Iterator[World]:
    """A world of one's own, for cases that break it."""
    world = World(num_ranks, store)
    try:
        yield world
    finally:
        world.close()


@functools.cache
def _lasting_world(num_ranks: int) -> World:
    return World(num_ranks)


@pytest.fixture(scope="session")
def world2() -> Iterator[World]:
    """Two ranks for the whole session."""
    yield _lasting_world(2)
    _lasting_world(2).close()


@pytest.fixture(scope="session")
def world4() -> Iterator[World]:
    """Four ranks for the whole session."""
    yield _lasting_world(4)
    _lasting_world(4).close()


@functools.cache
def fork_server() -> multiprocessing.context.ForkServerContext:
    """Starts processes by forking one that has imported torch; for tests that start their own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _name(case: Case) -> str:
    return case if isinstance(case, str) else f"{case.__module__}:{case.__qualname__}"


# What follows runs in the ranks.


def _serve(rank: int, num_ranks: int, pipe: Connection, log: str) -> None:
    """The whole life of a rank: join the world, then run cases until the pytest process is gone."""
    gc.freeze()  # what the fork server imported
    _print_to(log)
    pipe.send_bytes(pickle.dumps(_attempt(_join, rank, num_ranks, pipe)))
    with contextlib.suppress(EOFError):
        while True:
            name, args = pickle.loads(pipe.recv_bytes())
            torch.manual_seed(0)
            pipe.send_bytes(_pickled(_attempt(_run, name, args)))
    os._exit(0)  # the pytest process is gone: nobody is left to close the process group with


def _print_to(log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def _join(rank: int, num_ranks: int, pipe: Connection) -> None:
    for name in [name for name in os.environ if name.startswith("AOTDIST_")]:
        del os.environ[name]
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine's own name need not resolve
    torch.set_num_threads(1)
    store = _meet(num_ranks, pipe)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=GROUP_TIMEOUT)


def _meet(num_ranks: int, pipe: Connection) -> dist.Store:
    place = pipe.recv()
    if isinstance(place, str):
        return dist.FileStore(place, num_ranks)
    store = dist.TCPStore("127.0.0.1", place, is_master=place == 0, wait_for_workers=False)
    if place == 0:
        pipe.send(store.port)
    return store


def _run(name: str, args: tuple[Any, ...]) -> Any:
    module, _, function = name.partition(":")
    case = functools.reduce(getattr, function.split("."), importlib.import_module(module))
    if (board := board_of_this_process()) is not None:
        go_on(board)  # a refusal that the case before caught holds until this rank compiles again
    return case(*args)


def _attempt(function: Callable[..., Any], *args: Any) -> Returned | Raised:
    try:
        return Returned(function(*args), num_groups=dist.get_pg_count())
    except BaseException as error:  # pytest's own failures and skips are BaseExceptions
        return Raised(type(error).__name__, str(error), traceback.format_exc())


def _pickled(outcome: Returned | Raised) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        return pickle.dumps(_attempt(_cannot_send, error))


def _cannot_send(error: Exception) -> None:
    raise TypeError("what the case returned cannot be pickled") from error
