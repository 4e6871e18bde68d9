"""What one trace knows while it runs: the parties that its two halves are read off."""

from __future__ import annotations

from dataclasses import dataclass

from aotdist.convention.view_log import ViewLog
from aotdist.joint.classes import Classes
from aotdist.joint.failures import accumulated_inside
from aotdist.joint.inputs import Inputs
from aotdist.joint.recorder import Recorder
from aotdist.joint.storages import Storages
from aotdist.torch_seam.autograd import accumulated_into


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The parties of one trace.

    Args:
        recorder: records the program.
        inputs: the stand-ins.
        log: the program's views, and its writes to metadata.
        storages: what it knows of storages.
        classes: what the user's code sees of the tensors.
        training: see `trace`.
        cuts: see `trace`.
    """

    recorder: Recorder
    inputs: Inputs
    log: ViewLog
    storages: Storages
    classes: Classes
    training: bool
    cuts: bool

    def refuse_accumulation(self) -> None:
        """Refuse `backward()` inside of the program: in its forward, in a hook, in a function's backward."""
        for stand_in in self.inputs.row():
            if accumulated_into(stand_in.leaf):
                raise accumulated_inside(stand_in.slot)
