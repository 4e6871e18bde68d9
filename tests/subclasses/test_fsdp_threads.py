"""Threads beside an FSDP2 model that log, and that write checkpoints, see nothing of captures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

import aotdist
from tests.ranks.harness import World
from tests.subclasses.fsdp_models import Net, different_grads, line, same_bits, seeded, shard_blocks

pytestmark = pytest.mark.ranks


class Log:
    """Reads a model's parameters, over and over, in a thread of its own.

    Args:
        model: the model.

    Attributes:
        norms: what is to be read, by how often the parameters were written.
        writes: how often they were written: an even number, unless that is just happening.
        looks: how often they were read.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.norms, self.writes, self.looks = model, dict[int, list[torch.Tensor]](), 0, 0
        self.is_over, self.failure = threading.Event(), list[BaseException]()
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> Log:
        self.norms[0] = self._expected()
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.is_over.set()
        self.thread.join()

    def write(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer write the parameters."""
        self.writes += 1
        optimizer.step()
        self.norms[self.writes + 1] = self._expected()
        self.writes += 1

    def _expected(self) -> list[torch.Tensor]:
        return [param.to_local().norm() for param in self.model.parameters()]

    def _run(self) -> None:
        try:
            while not self.is_over.is_set():
                self._look()
                time.sleep(0.001)
        except BaseException as failure:
            self.failure.append(failure)

    def _look(self) -> None:
        writes, params = self.writes, list(self.model.parameters())
        assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in params)
        norms = [p.detach().norm().to_local() for p in params]
        state = self.model.state_dict()
        if writes == self.writes and not writes % 2:
            assert all(same_bits(a, b) for a, b in zip(norms, self.norms[writes], strict=True))
            assert all(
                value.to_local().data_ptr() == p.to_local().data_ptr()
                for value, p in zip(
                    state.values(), (self.model.get_parameter(name) for name in state), strict=True
                )
            )
            self.looks += 1


def logged_case(steps: int, shapes: int) -> int:
    """Train, evaluate and compile for new shapes while a thread logs; returns how often it looked."""
    eager, model = (seeded(lambda: shard_blocks(Net(), line(2))) for _ in range(2))
    aotdist.compile(model, backend="fx")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (eager, model)]
    with Log(model) as log:
        for step in range(steps):
            torch.manual_seed(10 * step + dist.get_rank())
            ids = torch.randint(0, 11, (1 + step % shapes, 3))
            losses = [
                each(ids).square() for each in (eager, model)
            ]  # without a minimum, it is NaN at step 73
            for loss in losses:
                loss.backward()
            assert same_bits(*losses) and losses[0].isfinite()
            assert different_grads(eager, model) == []
            optimizers[0].step()
            log.write(optimizers[1])
            for each in (eager, model):
                each.zero_grad()
            with torch.no_grad():
                assert same_bits(eager(ids), model(ids))
    if log.failure:
        raise log.failure[0]
    return log.looks


@pytest.mark.parametrize(
    "steps, shapes", [(12, 3), pytest.param(1000, 20, marks=(pytest.mark.sweep, pytest.mark.timeout(1200)))]
)
@pytest.mark.filterwarnings("ignore:aotdist. `.*` was compiled")
def test_a_thread_that_logs(world2: World, steps: int, shapes: int) -> None:
    assert min(world2.run(logged_case, steps, shapes, timeout=60.0 + steps)) > steps


def saved_case(folder: str) -> list[int]:
    """Checkpoints are written, and objects gathered, by threads while models are compiled.

    Returns:
        how many models were, until the objects were gathered and until the checkpoints were there.
    """
    group, failures = dist.new_group(backend="gloo"), list[BaseException]()
    model = seeded(lambda: shard_blocks(Net(), line(2)))
    state = model.state_dict()

    def gather() -> None:
        try:
            for number in range(100):
                found: list[int | None] = [None, None]
                dist.all_gather_object(found, number, group=group)
                assert found == [number, number]
        except BaseException as failure:
            failures.append(failure)

    def compile_one() -> None:
        small = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
        aotdist.compile(small, backend="fx")
        small(torch.ones(1, 2)).sum().backward()

    counts: list[int] = []
    thread = threading.Thread(target=gather)
    thread.start()
    counts.append(_repeated(compile_one, thread.is_alive))
    for number in range(2):
        saved = async_save(state, checkpoint_id=f"{folder}/{number}", process_group=group)
        counts.append(_repeated(compile_one, lambda saved=saved: not saved.done()))
        saved.result()
    if failures:
        raise failures[0]
    other = seeded(lambda: shard_blocks(Net(), line(2)))
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    load(other.state_dict(), checkpoint_id=f"{folder}/1", process_group=group)
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    return counts


def _repeated(run: Callable[[], None], goes_on: Callable[[], bool]) -> int:
    """Run something as long as that says, and once more; how often."""
    count = 1
    while goes_on():
        run()
        count += 1
    run()
    return count


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_checkpoints_are_saved_while_models_are_compiled(world2: World, tmp_path: Path) -> None:
    for counts in world2.run(saved_case, str(tmp_path), timeout=60.0):
        assert min(counts) > 1
