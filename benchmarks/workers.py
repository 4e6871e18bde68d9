"""Running a function in fresh processes: alone, or on several ranks under torchrun."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

Job = TypeVar("Job")
Answer = TypeVar("Answer")

NUM_CORES = len(os.sched_getaffinity(0))


def threads_per_rank(num_ranks: int) -> int:
    """Intra-op threads of one rank: the cores shared out. On 2 cores 2 ranks get 1, torchrun's default."""
    return max(1, NUM_CORES // num_ranks)


def call(
    label: str,
    work: Callable[[Job], Answer],
    job: Job,
    *,
    num_ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 900.0,
) -> Answer:
    """`work(job)` in a fresh process, or in `num_ranks` of them in a gloo group; rank 0 answers.

    Args:
        label: what the terminal shows, with the seconds that it took.
        work: a function that can be imported by name.
        job: anything that pickles.
        num_ranks: 1 for a plain process, more for torchrun.
        environment: variables to add.
        timeout_s: after which the processes are ended.

    Raises:
        RuntimeError: a process failed; its output is in the message.
        subprocess.TimeoutExpired: it took too long; `output` is what it wrote, and where it was last.
    """
    start = time.perf_counter()
    print(f"  {label}", end="", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        job_file, answer_file = Path(folder, "job"), Path(folder, "answer")
        job_file.write_bytes(pickle.dumps((work, job)))
        threads = str(threads_per_rank(num_ranks))
        environ = os.environ | {"OMP_NUM_THREADS": threads} | dict(environment or {})
        command = [*_launcher(num_ranks), "-m", "benchmarks.workers", str(job_file), str(answer_file)]
        try:
            _finish(command, environ, timeout_s, Path(folder, "log"))
        finally:
            print(f": {time.perf_counter() - start:.0f} s", flush=True)
        return cast("Answer", pickle.loads(answer_file.read_bytes()))


def _launcher(num_ranks: int) -> list[str]:
    if num_ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]


def _finish(command: list[str], environ: Mapping[str, str], timeout_s: float, log: Path) -> None:
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            _end(process)
            error.output = log.read_text(errors="replace")
            raise
        except BaseException:
            _end(process)
            raise
    if code != 0:
        raise RuntimeError(f"a worker ended with {code}:\n{log.read_text(errors='replace')}")


def _end(process: subprocess.Popen[bytes]) -> None:
    # torchrun ends its ranks on SIGTERM; killed outright it would leave them behind.
    process.terminate()
    try:
        process.wait(timeout=40)
    except subprocess.TimeoutExpired:
        process.kill()


def _main(job_file: str, answer_file: str) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)  # who ends it, because it hangs, reads where
    work, job = cast("tuple[Callable[[Any], Any], Any]", pickle.loads(Path(job_file).read_bytes()))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    answer = work(job)
    if os.environ.get("RANK", "0") == "0":
        Path(answer_file).write_bytes(pickle.dumps(answer))
    # Left to the interpreter's shutdown, 2 of 5 profiled FSDP2 runs died after their last line of work with
    # "terminate called without an active exception" (torch 2.13, gloo), even though the group had been
    # destroyed: a thread of gloo's lets go of a tensor while Python shuts down (pytorch#179291). The answer
    # is written: leave without a shutdown.
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
