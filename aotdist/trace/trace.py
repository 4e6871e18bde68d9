"""One trace: the forward and its writes, the backward and its writes; the result is a graph and facts.

The program runs once on stand-ins of its inputs. Its results are read right after the forward, so
that a value which the backward writes later is not mistaken for the forward's; then tangents are
added as arguments, shaped like the differentiable results, and autograd runs the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from aotdist.aliasing.view_log import ViewLog
from aotdist.aliasing.view_mode import ViewMode
from aotdist.facts import BackwardFacts, Facts, Untouched
from aotdist.program import Graph, PrimalIdx, Program, Row, Slot
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.modes import class_functions_off
from aotdist.torch_seam.optimizers import intercept_schedules
from aotdist.torch_seam.patches import formulas_under_modes, intercept_saved_tensor_hooks
from aotdist.torch_seam.tensors import intercept_swaps, swap_attributes
from aotdist.torch_seam.transforms import swapped_unseen
from aotdist.trace.backward_effects import BackwardTrace
from aotdist.trace.blocks import NO_COPIES, Copies
from aotdist.trace.blocks.instances import Blocks
from aotdist.trace.capture_mode import CaptureMode
from aotdist.trace.classes import users_code
from aotdist.trace.context import TraceContext, TraceOptions
from aotdist.trace.control_flow import call_higher_order
from aotdist.trace.failures import naming_failures, refusal, steps_inside
from aotdist.trace.forward_effects import ForwardEffects, read_forward
from aotdist.trace.later_backwards import LaterBackwards
from aotdist.trace.numbers import python_numbers
from aotdist.trace.numbers.symbols import Symbols
from aotdist.trace.recorder import Recorder
from aotdist.trace.stand_ins import Inputs


@dataclass(frozen=True, slots=True)
class Traced:
    """The result of a trace.

    Args:
        program: the program, with the closed-over tensors that it touched added to its inputs.
        graph: the joint graph, cut at its waypoints; `aotdist.program.Graph` has the order of its segments.
        facts: what the call has to do around the graph.
        fake_mode: the mode of the fake tensors in the graph's `meta["val"]`.
        symbols: its symbolic sizes, and what was assumed of them; compilers add to it later.
        later_backwards: traces other backwards than that in `graph`, if there can be any.
        traces: holds `later_backwards`, and may drop it and trace the program again on demand.
        copies: which blocks were copied rather than traced (`aotdist.trace.blocks`).
    """

    program: Program[PrimalIdx]
    graph: Graph
    facts: Facts
    fake_mode: FakeTensorMode
    symbols: Symbols
    later_backwards: LaterBackwards | None = None
    traces: Traces | None = None
    copies: Copies = NO_COPIES

    def has_backward(self) -> bool:
        """Whether a gradient can come back for any result."""
        return any(out.differentiable for out in self.facts.node_outs)

    def plain_ins(self) -> list[Slot]:
        """Names of the plain tensors that the graph takes, tangents left out."""
        return [slot for slot in self.graph.ins if slot.role == "primal"]


def trace(
    program: Program[PrimalIdx],
    recorder: Recorder,
    options: TraceOptions,
    *,
    name_closed_over: Callable[[torch.Tensor], Slot],
    outer: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Traced:
    """Trace `program` once.

    Args:
        program: what to trace; its `fn` may run hooks and methods of tensor subclasses as well.
        recorder: fresh, not entered.
        options: what to trace, and how.
        name_closed_over: names a real tensor that is none of the program's inputs.
        outer: for a part of another program: gives the stand-in there of a real tensor.

    Raises:
        UnsupportedProgram: the program needs data while it is traced, or what it does cannot be
            repeated outside.
    """
    symbols = Symbols(recorder.shape_env, options.dims)
    inputs = Inputs(recorder, symbols, options.bases)

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        example = outer(tensor) if outer is not None and recorder.is_given(tensor) else tensor
        known = inputs.of_example(example)
        return inputs.add(name_closed_over(example), example) if known is None else known

    log = ViewLog()
    context = TraceContext(
        options=options,
        recorder=recorder,
        inputs=inputs,
        stand_in=stand_in,
        view_mode=ViewMode(log),
    )
    with ExitStack() as stack:
        stack.enter_context(class_functions_off())
        stack.enter_context(recorder)
        sizes, numbers = recorder.shape_env is not None, bool(options.counts)
        stack.enter_context(python_numbers.followed(recorder.unbacked, sizes=sizes, numbers=numbers))
        tensors = list(map(inputs.add, program.ins, program.examples))
        stack.enter_context(symbols.counting(options.counts))
        stack.enter_context(context.view_mode)
        stack.enter_context(intercept_swaps(_refuse_swap))
        outs, capture_mode, blocks = _run_forward(context, program, tensors)
        stack.enter_context(swapped_unseen(capture_mode.swap))  # in the backward, too
        forward = read_forward(context, outs, capture_mode)
        of_backward, results, later = BackwardTrace(context, forward).effects()
    facts = _facts(context, forward, of_backward)
    seen = Program(program.fn, inputs.row().map(lambda s: s.slot), inputs.row().map(lambda s: s.example))
    symbols.note(recorder.sizes())
    graph = recorder.graph(forward.results + results, symbols)
    return Traced(seen, graph, facts, recorder.fake_mode, symbols, later, copies=blocks.copies())


def _facts(context: TraceContext, forward: ForwardEffects, backward: BackwardFacts) -> Facts:
    """What the later stages know of the program."""
    row, outputs, metadata = context.inputs.row(), forward.outputs, forward.metadata
    of_backward = (Untouched() for _ in range(len(row) - len(forward.writes)))
    return Facts(
        inputs=Row([*forward.writes, *of_backward]),
        outputs=Row(outputs.facts),
        order=outputs.order,
        node_outs=forward.node_outs,
        recipes=row.map(lambda one: one.recipe),
        backward=backward,
        rewinds=forward.rewinds,
        switched_on=metadata.switched_on,
        storages=tuple(sorted(set(metadata.moved(row)))),
        asked=tuple((idx, name, answer) for (idx, name), answer in forward.capture_mode.asked.items()),
        data_guards=tuple(context.recorder.data_guards.given),
        numbers=forward.numbers,
    )


def _run_forward(
    context: TraceContext, program: Program[PrimalIdx], tensors: Sequence[torch.Tensor]
) -> tuple[list[Any], CaptureMode, Blocks]:
    """Run the program on stand-ins of its inputs: its results, the mode that it ran in, and its blocks."""
    recorder, inputs, stand_in = context.recorder, context.inputs, context.stand_in
    inputs.show_attributes()
    capture_mode = CaptureMode(
        recorder,
        inputs,
        stand_in,
        context.view_mode,
        higher_order=functools.partial(call_higher_order, context, trace),
    )
    in_python = context.options.in_python if context.options.instantiate else None
    blocks = Blocks(recorder, capture_mode, in_python)
    with (
        swapped_unseen(capture_mode.swap),
        intercept_saved_tensor_hooks(capture_mode),
        users_code(capture_mode.swap),
        capture_mode,
        formulas_under_modes(),
        intercept_schedules(steps_inside),
        inputs.current(),
        naming_failures(context.log),
        blocks.called(),
    ):
        outs = program.fn(*tensors)
        context.view_mode.settle()
    recorder.draws.check()
    recorder.data_guards.forget()
    recorder.check_numbers()
    is_foreign = [isinstance(out, torch.Tensor) and recorder.is_foreign(out) for out in outs]
    outs = [stand_in(out) if is_real else out for out, is_real in zip(outs, is_foreign, strict=True)]
    return outs, capture_mode, blocks


def _refuse_swap(first: torch.Tensor, second: torch.Tensor) -> NoReturn:
    swap_attributes(first, second)  # PyTorch has exchanged them already
    raise refusal(
        "a tensor is swapped with another by `torch.utils.swap_tensors`",
        fix="swap them outside of the compiled function, or assign `.data`",
    )


class Traces:
    """Holds the trace of a program for later backwards; may drop it, and trace the program again on demand.

    Args:
        later: runs backwards through the trace; None if it was not kept.
        retrace: traces the program again; None where that may give another program.

    Attributes:
        is_used: whether a later backward was requested.
    """

    def __init__(
        self, later: LaterBackwards | None, retrace: Callable[[], LaterBackwards] | None = None
    ) -> None:
        self._later, self._retrace, self.is_used = later, retrace, False

    def get(self) -> LaterBackwards:
        """What runs backwards through the trace.

        Raises:
            UnsupportedProgram: the trace was dropped, and the program has changed since.
        """
        if self._later is None:
            assert self._retrace is not None, "otherwise the trace is never dropped"
            self._later = self._retrace()
        self.is_used = True
        return self._later

    def is_there(self) -> bool:
        """Whether the trace is in memory."""
        return self._later is not None

    def forget(self) -> None:
        """Drop the trace, unless it was used or the program cannot be traced again."""
        if self._retrace is not None and not self.is_used:
            self._later = None
