"""The training job with one rank that is killed, once; two arguments say in the midst of what, and which."""

import os
import signal
import sys

from aotdist import assumptions as tracing
from aotdist.launch import loop, train
from aotdist.launch.checkpoints import writer

WHEN, RANK = sys.argv.pop(1), int(sys.argv.pop(1))
PLACES = {
    "step": (loop, "clip_gradients"),
    "write": (writer, "facts_of"),
    "finish": (writer, "_write_durably"),
    "rename": (writer, "_sync"),
    "compile": (tracing, "trace"),
}
BEFORE = {"step": 4}
"""Calls that come to their end before the one that does not."""

module, name = PLACES[WHEN]
function = getattr(module, name)
calls = 0


def killing(*arguments, **options):
    global calls
    calls += 1
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_start and int(os.environ["RANK"]) == RANK and calls > BEFORE.get(WHEN, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*arguments, **options)


setattr(module, name, killing)
sys.exit(train.main())
