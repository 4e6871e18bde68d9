"""Entry point of the training job: `torchrun --nproc-per-node 2 -m aotdist.launch.train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aotdist.launch import shutdown
from aotdist.launch.config import PROGRAM, parse_options
from aotdist.launch.job import run_job
from aotdist.launch.parallel import Place, leave
from aotdist.launch.resuming import command_sets_batch
from aotdist.launch.run_lock import RunLock


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run the job and return the exit code: 0 done, 1 failed, 2 wrong options, 128 + n on signal n.

    Args:
        arguments: the words after the program's name; `sys.argv` if None.
        program: its name in help and errors.
    """
    words = sys.argv[1:] if arguments is None else arguments
    place = Place()  # until the rank is known, each process reports errors
    with shutdown.StopRequest() as stop, shutdown.watching_launcher(stop), RunLock() as lock:
        try:
            place = Place.from_environment()
            options = parse_options(words, speaks=place.rank == 0, program=program)
            sets_batch = command_sets_batch(words, options, place)
            run_job(options, place, stop, lock, sets_batch=sets_batch)
            return shutdown.EXIT_DONE
        except BaseException as error:  # every error is reported in one place
            return shutdown.end(error, place, stop)
        finally:
            leave()


if __name__ == "__main__":
    sys.exit(main())
