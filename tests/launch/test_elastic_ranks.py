"""Runs that outlive their launchers: a machine joins or leaves, torchrun is killed, two go on at once.

Machines are torchruns of one rank each, on this one.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from aotdist.launch import train
from aotdist.launch.checkpoints.manifest import complete_checkpoints
from aotdist.launch.metrics import EndRecord
from tests.launch.harness import REPOSITORY, Job, losses, start_torchrun, step_records, wait_for_steps

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.sweep, pytest.mark.timeout(400)]

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def wait_until(holds, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@dataclass
class Machines:
    """Torchruns that meet at one address, and how many there are of them is left to them."""

    job: Job
    port: int
    log: Path

    def start(self, *options):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
            *("--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self.port}"),
            *("--rdzv-id=elastic", "--local-addr=localhost"),
            "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
            *("-m", "aotdist.launch.train", *self.job.arguments("elastic", "--resume=auto", *options)),
        ]
        # torch 2.13: a torchrun that joins waits for ever for the address of a store that is shared.
        environment = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=REPOSITORY)


@pytest.fixture
def machines(job, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return Machines(job, port, tmp_path / "log")


def test_a_run_goes_on_by_itself_when_a_machine_joins_leaves_and_joins_again(job, machines):
    options = ["--checkpoint.every=20", "--data.batch-size=8", "--optim.steps=600", "--run.log-every=5"]
    assert train.main(job.arguments("alone", *options)) == 0
    slow = [*options, "--run.validate-every=5", "--run.validation-batches=8"]
    with contextlib.ExitStack() as started:
        first = started.enter_context(ending(machines.start(*slow)))
        wait_for_steps(job, "elastic", 10)
        second = started.enter_context(ending(machines.start(*slow)))
        wait_until(lambda: said(machines).count("with 2 ranks, not 1: a step still takes 8") == 1)
        wait_for_steps(job, "elastic", len(losses(job.records("elastic"))) + 20)
        second.kill()
        wait_until(lambda: said(machines).count("with 1 rank, not 2: a step still takes 8") == 1)
        started.enter_context(ending(machines.start(*slow)))
        wait_until(lambda: said(machines).count("with 2 ranks, not 1: a step still takes 8") == 2)
        assert first.wait(200) == 0, said(machines)
    found, alone = step_records(job.records("elastic")), step_records(job.records("alone"))
    assert [(r.step, r.tokens) for r in found] == [(r.step, r.tokens) for r in alone]
    assert [r.loss for r in found] == pytest.approx([r.loss for r in alone], rel=1e-3)


def said(machines):
    return " ".join(machines.log.read_text().split())


@contextlib.contextmanager
def ending(process):
    """Ends a torchrun with its ranks, however the test goes."""
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def test_ranks_whose_torchrun_is_killed_save_and_end_and_one_goes_on_with_their_run(job):
    options = ["--checkpoint.every=50", "--run.log-every=5"]
    words = ["-m", "aotdist.launch.train", *job.arguments("orphans", *options, steps=100_000)]
    process = start_torchrun(*words, num_ranks=2)
    folder = job.folder / "orphans"
    wait_for_steps(job, "orphans", 10)
    process.kill()
    assert train.main(["--resume", str(folder)]) == 1  # they are still there
    said = process.communicate(timeout=60)[1]  # until the last rank has ended
    assert all(f"[rank {rank}] its torchrun, process {process.pid}, is gone" in said for rank in range(2))
    stopped = job.records("orphans")[-1]
    assert isinstance(stopped, EndRecord) and stopped.status == "stopped"
    assert int(complete_checkpoints(folder / "checkpoints")[0].name.removeprefix("step-")) == stopped.step
    command = [sys.executable, "-m", "aotdist.launch.train", "--resume", str(folder)]
    command += [f"--optim.steps={stopped.step + 400}"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) for _ in range(2)]
    errors = [each.communicate(timeout=100)[1] for each in both]
    assert sorted(each.returncode for each in both) == [0, 1], errors
    assert "RunInUse: process " in "".join(errors)
    steps = [record.step for record in step_records(job.records("orphans"))]
    assert steps == list(range(1, stopped.step + 401))


def test_a_run_that_is_killed_with_its_launcher_is_taken_over_at_once(job):
    words = [*job.arguments("killed", "--checkpoint.every=5", steps=100_000)]
    process = subprocess.Popen([sys.executable, "-m", "aotdist.launch.train", *words], env=ENVIRONMENT)
    wait_for_steps(job, "killed", 12)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert train.main(["--resume", str(job.folder / "killed"), "--optim.steps=1"]) == 0
