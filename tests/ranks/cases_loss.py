"""What ranks do in the tests of lost ranks: a step with collectives, in the middle of which one goes."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from aotdist.errors import RankLost
from aotdist.runtime.ranks import LossWatch, agree, board_of_this_process
from aotdist.runtime.ranks.sequence import groups_with_peers
from aotdist.settings import Settings
from tests.ranks.cases_agreement import collective, mesh_groups

SETTINGS = Settings(rank_timeout_s=20.0)
LOST = 7
"""Exit code of a rank that heard of a loss."""


def watch_over(groups: list[str]) -> LossWatch:
    """The watch around what communicates in these groups."""
    board = board_of_this_process()
    assert board is not None
    members = {rank for name in groups for rank in groups_with_peers()[name].party}
    return LossWatch(board, "train_step", sorted(members - {board.rank}))


def all_reduce(group: str) -> None:
    started = torch.ops._c10d_functional.all_reduce(torch.ones(1000), "sum", group)
    torch.ops._c10d_functional.wait_tensor(started)


def train(groups: list[str], num_steps: int, leave_at: int | None, way: str = "kill") -> None:
    """Steps with one all-reduce in each group; this rank leaves before step `leave_at`.

    A rank that loses another prints the error and ends its process, as an uncaught error would.
    """
    program = [collective(numel=1000, group=group) for group in groups]
    agree(program, label="train_step", settings=SETTINGS)
    watch = watch_over(groups)
    for step in range(num_steps):
        if step == leave_at:
            leave(way)
        start = time.monotonic()
        try:
            with watch:
                for group in groups:
                    all_reduce(group)
        except RankLost as error:
            print(f"{error}\nafter {time.monotonic() - start:.1f} s", flush=True)
            os._exit(LOST)


def leave(way: str) -> None:
    match way:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.stdout.flush()
            os._exit(1)
        case "sleep":
            time.sleep(5)


def leaves_in_a_step(leaving_rank: int, way: str = "kill") -> None:
    train([dist.group.WORLD.group_name], 200, 100 if dist.get_rank() == leaving_rank else None, way)


def leaves_a_mesh(leaving_rank: int) -> None:
    dp, tp = mesh_groups()
    train([tp, dp], 200, 100 if dist.get_rank() == leaving_rank else None)


def sleeps_through_the_timeout(sleeping_rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    train([group.group_name], 20, 10 if dist.get_rank() == sleeping_rank else None, "sleep")


def other_errors_pass() -> tuple[str, float]:
    """An error of the user's own inside the watched region: which one arrives, and after how long."""
    watch = watch_over([dist.group.WORLD.group_name])
    start = time.monotonic()
    try:
        with watch:
            torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "nothing", 0.0


def cost_of_watching(num_times: int) -> float:
    """Seconds to enter and leave, once."""
    agree([collective()], label="train_step", settings=SETTINGS)
    watch = watch_over([dist.group.WORLD.group_name])
    start = time.perf_counter()
    for _ in range(num_times):
        with watch:
            pass
    return (time.perf_counter() - start) / num_times
