"""Entry point of the training job: `torchrun --nproc-per-node 2 -m aotdist.launch.train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aotdist.launch import shutdown
from aotdist.launch.config import PROGRAM, parse_options
from aotdist.launch.going_on import says_batch_anew
from aotdist.launch.job import run_job
from aotdist.launch.parallel import Place, leave
from aotdist.launch.run_lock import RunLock


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Runs the job and returns the exit code: 0 done, 1 failed, 2 wrong options, 128 + n on signal n.

    Args:
        arguments: the words after the program's name; `sys.argv` when None.
        program: what help and errors call it.
    """
    words = sys.argv[1:] if arguments is None else arguments
    place = Place()  # until it is known, what goes wrong is everyone's to say
    with shutdown.StopRequest() as stop, shutdown.watching_launcher(stop), RunLock() as lock:
        try:
            place = Place.from_environment()
            options = parse_options(words, speaks=place.rank == 0, program=program)
            is_batch_anew = says_batch_anew(words, options, place)
            run_job(options, place, stop, lock, is_batch_anew=is_batch_anew)
            return shutdown.EXIT_DONE
        except BaseException as error:  # the last door: every fault leaves through one report
            return shutdown.end(error, place, stop)
        finally:
            leave()


if __name__ == "__main__":
    sys.exit(main())
