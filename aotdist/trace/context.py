"""The options of a trace, and the objects that its forward and its backward share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from aotdist.aliasing.view_log import ViewLog
from aotdist.aliasing.view_mode import ViewMode
from aotdist.capture.in_backward import InBackward
from aotdist.capture.source import Source
from aotdist.convention.bases import NO_BASES, BasePlan
from aotdist.torch_seam.autograd import accumulated_into
from aotdist.trace.failures import accumulates_inside
from aotdist.trace.numbers.symbols import Dims
from aotdist.trace.recorder import Recorder
from aotdist.trace.stand_ins import Inputs


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What to trace, and how.

    Args:
        training: record a backward for the differentiable results.
        bases: which of the inputs share memory.
        dims: which dimensions of which tensors have symbolic sizes; those that share memory have none.
        counts: places of numbers that the program reads and changes.
        cuts: the graph may be cut at waypoints (`aotdist.trace.observed_grads`), and may have results and
            arguments for a backward of some outputs only, and for a backward that runs twice.
        may_run_later: the backward may be traced again later, outside of the contexts around this call.
        in_python: notes what backwards change in Python.
        instantiate: record blocks once (`aotdist.trace.blocks`).
    """

    training: bool
    bases: BasePlan = NO_BASES
    dims: Dims = field(default_factory=dict)
    counts: Sequence[Source] = ()
    cuts: bool = False
    may_run_later: bool = False
    in_python: InBackward | None = None
    instantiate: bool = False


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The objects that the parts of one trace share.

    Args:
        options: what to trace, and how.
        recorder: records the program.
        inputs: the stand-ins.
        stand_in: gives the stand-in of a tensor that the program closes over.
        view_mode: follows the program's views, and its writes to metadata.
    """

    options: TraceOptions
    recorder: Recorder
    inputs: Inputs
    stand_in: Callable[[torch.Tensor], torch.Tensor]
    view_mode: ViewMode

    @property
    def log(self) -> ViewLog:
        """The program's views, and its writes to metadata."""
        return self.view_mode.log

    def refuse_accumulation(self) -> None:
        """Refuse `backward()` inside of the program: in its forward, in a hook, in a function's backward."""
        for stand_in in self.inputs.row():
            if accumulated_into(stand_in.leaf):
                raise accumulates_inside(f"`{stand_in.slot}` gets its `.grad` inside of the compiled module")
