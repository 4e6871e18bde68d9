"""Starts the ranks of a scenario, each in a process of its own, and says what became of them."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import torch
import torch.distributed as dist

from aotdist.torch_seam.groups import TCPStore
from benchmarks.ranks.part import Diary, Part
from benchmarks.ranks.scenarios import SCENARIOS, Scenario
from benchmarks.ranks.vocabulary import Odd, Seen, Way, deadline_s, timeout_s

_PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "aotdist",
    "tyro",
    "benchmarks.ranks.page",
    "benchmarks.ranks.worlds",
]
"""What is imported once for all ranks."""

_GRACE_S = 3.0
"""How long a rank that is absent has, when all others have ended, to see that."""

Values = tuple[dict[str, float], ...]
"""What a rank computed, step by step."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What became of one rank, and what it computed."""

    seen: Seen
    values: Values


def watched(scenario: str, way: Way, odd: Odd = "one") -> list[Watched]:
    """Run a scenario in fresh processes."""
    chosen = SCENARIOS[scenario]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        diaries = [Diary(Path(folder, f"rank{rank}")) for rank in range(chosen.num_ranks)]
        ends = _ends(scenario, way, odd, diaries)
        found = [_watched(diary, *end) for diary, end in zip(diaries, ends, strict=True)]
        if chosen.kind == "absent" and found[chosen.odd_rank].seen.end == "hang":
            found[chosen.odd_rank] = Watched(Seen("absent"), found[chosen.odd_rank].values)
        return found


def _ends(scenario: str, way: Way, odd: Odd, diaries: Sequence[Diary]) -> list[tuple[int | None, float]]:
    """The exit code of each rank, None for a hang, and when it ended."""
    chosen = SCENARIOS[scenario]
    pipes = [multiprocessing.Pipe() for _ in diaries]
    processes: list[ForkServerProcess] = []
    for rank, (_, there) in enumerate(pipes):
        odd_here = odd == "all" or (odd == "one" and rank == chosen.odd_rank)
        args = (scenario, way, rank, odd_here, there, diaries[rank])
        processes.append(_context().Process(target=_serve, args=args, daemon=True))
        processes[-1].start()
        there.close()
    store = _introduce(chosen, [here for here, _ in pipes])
    ends = _waited(processes, chosen, way)
    for process in processes:
        process.kill()
        process.join()
    del store
    return ends


def _waited(
    processes: Sequence[ForkServerProcess], scenario: Scenario, way: Way
) -> list[tuple[int | None, float]]:
    """The exit code of each rank, None for one that has not ended, and when that was."""
    absent = {scenario.odd_rank} if scenario.kind == "absent" else set[int]()
    deadline = time.monotonic() + deadline_s(way)
    ended: dict[int, tuple[int | None, float]] = {}
    pending = {process.sentinel: rank for rank, process in enumerate(processes)}
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        for sentinel in ready:
            rank = pending.pop(sentinel)  # type: ignore[call-overload]
            processes[rank].join()
            ended[rank] = processes[rank].exitcode, time.monotonic()
        if absent == {*pending.values()}:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    return [ended.get(rank, (None, time.monotonic())) for rank in range(len(processes))]


def _introduce(scenario: Scenario, pipes: Sequence[Connection]) -> TCPStore | None:
    """Tell every rank where the store is, which has to be kept if it is the launcher's."""
    if scenario.store == "launcher":
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port, others = store.port, pipes
    else:
        pipes[0].send(0)
        store, port, others = None, pipes[0].recv(), pipes[1:]
    for pipe in others:
        pipe.send(port)
    return store


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _watched(diary: Diary, code: int | None, ended: float) -> Watched:
    lines = diary.read()
    began = [line["at"] for line in lines if line["what"] in ("joined", "begins")]
    values = tuple(line["values"] for line in lines if line["what"] == "finishes")
    raised = next((line for line in lines if line["what"] == "raises"), None)
    end, said = _end(code), ""
    if code is not None and code >= 0 and raised is not None:
        end, said, ended = raised["kind"], raised["said"], raised["at"]
    elif code == 0:
        end, ended = "finished", lines[-1]["at"]
    seconds = ended - (began[-1] if began else ended)
    return Watched(Seen(end, said, round(seconds, 1), len(values)), values)


def _end(code: int | None) -> str:
    if code is None:
        return "hang"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


# What follows runs in the ranks.


def _serve(scenario: str, way: Way, rank: int, odd: bool, pipe: Connection, diary: Diary) -> None:
    """The whole life of a rank, as that of a script: an error that nobody catches ends it."""
    chosen = SCENARIOS[scenario]
    gc.freeze()  # what was imported before the fork would take 4 s to take apart at the end
    log = os.open(f"{diary.file}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable()
    code = 0
    try:
        _join(chosen, way, rank, pipe)
        diary.write("joined")
        chosen.act(Part(odd, way, diary))
        diary.write("leaves")
        dist.destroy_process_group()
    except BaseException as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        diary.write("raises", kind=type(error).__name__, said=said)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    if way == "eager":
        os._exit(code)
    ctypes.pythonapi.Py_Exit(code)  # of a script that aotdist is in, the interpreter's shutdown is a part


def _join(scenario: Scenario, way: Way, rank: int, pipe: Connection) -> None:
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine's own name need not resolve
    torch.set_num_threads(1)
    port = pipe.recv()
    store = TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False)
    if port == 0:
        pipe.send(store.port)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=scenario.num_ranks,
        timeout=timedelta(seconds=timeout_s(way)),
    )
    torch.manual_seed(0)


def compared(found: Sequence[Watched], expected: Sequence[Values], exactly: bool) -> tuple[Seen, ...]:
    """What became of the ranks, each held to the values that it should have computed."""
    pairs = zip(found, expected, strict=True)
    return tuple(
        _with_silent(each.seen, _first_other(each.values, values, exactly)) for each, values in pairs
    )


def _with_silent(seen: Seen, silent: str) -> Seen:
    return Seen(seen.end, seen.said, seen.seconds, seen.num_steps, silent)


def _first_other(found: Values, expected: Values, exactly: bool) -> str:
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
        for name, value in ours.items():
            other = theirs[name]
            if value != other if exactly else not math.isclose(value, other, rel_tol=1e-4):
                return f"{name} of step {step + 1}: {value:.6g} for {other:.6g}"
    return ""
