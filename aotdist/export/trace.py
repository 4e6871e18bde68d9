"""What is exported, one call and the inputs that its graph takes; and the trace of that call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from aotdist.capture.arguments import ConstantLeaf, fakes_of
from aotdist.capture.capture import capture
from aotdist.capture.captured import Captured, Returned, UserCall
from aotdist.capture.compile_lock import alone
from aotdist.capture.modules import StatePlace, StateTensor, swapped
from aotdist.compiled import running_eagerly
from aotdist.export.refusals import (
    check_loss,
    refuse_example,
    refuse_metadata_writes,
    refuse_mode_without_symbols,
    refuse_returned,
    refuse_strays,
)
from aotdist.facts import OutputFact
from aotdist.origins import short_tracebacks
from aotdist.partition.builder import collector_paused
from aotdist.program import PrimalIdx, Program, Row, Slot
from aotdist.settings import Settings
from aotdist.torch_seam.inductor import active_fake_mode
from aotdist.torch_seam.operators import OpOverload
from aotdist.trace.context import TraceOptions
from aotdist.trace.recorder import Recorder, RecordOptions
from aotdist.trace.trace import Traced, trace

_STATIC = Settings()


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """One input of an exported graph.

    Args:
        path: its name in messages; that of a parameter or a buffer is its qualified name.
        kind: where it comes from.
    """

    path: str
    value: Any
    kind: Literal["parameter", "buffer", "argument"]

    def requires_grad(self) -> bool:
        """Whether the loss is differentiated for it."""
        return isinstance(self.value, torch.Tensor) and self.value.requires_grad


@dataclass(frozen=True, slots=True)
class Call:
    """The call that is exported."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: tuple[tuple[Input, StatePlace], ...]

    def tied(self) -> list[tuple[int, StateTensor]]:
        """State that an earlier attribute holds too: its position in `state`, and its own attribute."""
        first: dict[int, StatePlace] = {}
        found: list[tuple[int, StateTensor]] = []
        for position, (leaf, (owner, name)) in enumerate(self.state):
            earlier_owner, earlier_name = first.setdefault(id(leaf.value), (owner, name))
            if earlier_owner is not owner or earlier_name != name:
                found.append((position, StateTensor(leaf.path, leaf.value, ((owner, name),))))
        return found


def state_of(mod: nn.Module) -> tuple[tuple[Input, StatePlace], ...]:
    """Parameters, then buffers, under each of their names, and the attribute that holds each."""
    found: list[tuple[Input, StatePlace]] = []
    kinds: tuple[Literal["parameter", "buffer"], ...] = ("parameter", "buffer")
    for kind in kinds:
        named = mod.named_parameters if kind == "parameter" else mod.named_buffers
        for path, value in named(remove_duplicate=False):
            prefix, _, name = path.rpartition(".")
            owner = vars(mod.get_submodule(prefix))[f"_{kind}s"]
            found.append((Input(path, value, kind), (owner, name)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ExportTrace:
    """The trace of a call.

    Args:
        trace: graph and facts; its primals are the tensors among `inputs`, then what else the program reads.
        cloned: results that were cloned, to be tensors of their own.
    """

    trace: Traced
    inputs: tuple[Input, ...]
    requires_grad: tuple[bool, ...]
    cloned: frozenset[int]

    def returned(self) -> Returned:
        """The structure of the result, and what the program assigns."""
        return Returned.of(self.trace.facts)

    def primals(self) -> list[tuple[PrimalIdx, Input]]:
        """The tensors among the inputs, with their positions among the primals of the trace."""
        tensors = (leaf for leaf in self.inputs if isinstance(leaf.value, torch.Tensor))
        return list(Row[PrimalIdx, Input](tensors).enumerate())

    def outputs(self) -> list[OutputFact]:
        """Facts of the results, then of the tensors that are assigned to attributes."""
        return list(self.trace.facts.outputs)[:-1]


@short_tracebacks
@alone
def trace_for_export(
    call: Call,
    decompositions: Mapping[OpOverload, Callable[..., Any]],
    *,
    loss: int | None = None,
    fresh: Collection[int] = (),
    settings: Settings = _STATIC,
) -> ExportTrace:
    """Trace a call. Every name of a parameter is an input, also where parameters are tied.

    Args:
        loss: which result is the loss, if any.
        fresh: results to clone, so that no result is an input or another result.
        settings: whether sizes of the arguments get symbols.
    """
    given: list[torch.Tensor] = []
    requires_grad: list[bool] = []
    tied = call.tied()

    def run(*args: Any, **kwargs: Any) -> Any:
        with swapped([state for _, state in tied], [given[position] for position, _ in tied]):
            return call.target(*args, **kwargs)

    with ExitStack() as scope, running_eagerly(), collector_paused():
        captured = capture(UserCall(call.target, run, call.args, call.kwargs, prints=False), settings, scope)
        captured.arguments.refuse_objects("export", "pass its tensors, or close over it")
        inputs = (*(leaf for leaf, _ in call.state), *_arguments(captured))
        tensors = [leaf for leaf in inputs if isinstance(leaf.value, torch.Tensor)]
        own = {id(leaf.value): position for position, (leaf, _) in reversed(list(enumerate(call.state)))}
        strays = [state for state in captured.environment.state if id(state.value) not in own]
        own |= {id(state.value): len(tensors) + k for k, state in enumerate(strays)}

        def fn(*stand_ins: torch.Tensor) -> list[Any]:
            given[:] = stand_ins
            arguments = stand_ins[len(call.state) : len(tensors)]
            state = (stand_ins[own[id(tensor.value)]] for tensor in captured.environment.state)
            outs = captured.program.fn(*arguments, *state)
            check_loss(outs, loss)
            requires_grad[:] = [isinstance(out, torch.Tensor) and out.requires_grad for out in outs]
            return [out.clone() if position in fresh else out for position, out in enumerate(outs)]

        named = [(item.path, item.value) for item in (*tensors, *strays)]
        for path, example in named:
            refuse_example(path, example)
        fakes = fakes_of(named, captured.all_closed_over, active_fake_mode())
        if captured.dims:
            refuse_mode_without_symbols(fakes)
        slots = Row[PrimalIdx, Slot](Slot("primal", path) for path, _ in named)
        program = Program(fn, slots, Row[PrimalIdx, torch.Tensor](example for _, example in named))
        recorder = Recorder(RecordOptions(decompositions), symbolic=bool(captured.dims), fakes=fakes)
        recorder.draws.allow(captured.environment.reached.generators)
        options = TraceOptions(training=torch.is_grad_enabled(), dims=captured.dims)
        traced = trace(program, recorder, options, name_closed_over=captured.name_closed_over)
    refuse_strays(traced, len(tensors))
    refuse_metadata_writes(traced)
    refuse_returned(Returned.of(traced.facts))
    return ExportTrace(traced, inputs, tuple(requires_grad[:-1]), frozenset(fresh))


def _arguments(captured: Captured) -> Iterator[Input]:
    """The leaves of the arguments."""
    tensors = iter(captured.program.examples)
    for leaf in captured.arguments.leaves:
        value = leaf.value if isinstance(leaf, ConstantLeaf) else next(tensors)
        yield Input(leaf.path, value, "argument")
