"""The training job with one rank that breaks at its third step; two arguments say how, and which."""

import os
import signal
import sys

from aotdist import UnsupportedProgram
from aotdist.launch import loop, train

HOW, RANK = sys.argv.pop(1), int(sys.argv.pop(1))
take_step = loop.Trainer._take_step


def broken_step(self, state):
    if state.step == 2 and self.world.place.rank == RANK:
        match HOW:
            case "raises":
                raise ValueError("this rank is broken")
            case "refuses":
                raise UnsupportedProgram("only this rank refuses")
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
    return take_step(self, state)


loop.Trainer._take_step = broken_step
sys.exit(train.main())
