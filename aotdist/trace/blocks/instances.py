"""Calls of blocks: the first two of a kind are traced, the others instantiated."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from aotdist.capture.in_backward import InBackward
from aotdist.origins import current_module, path_of
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.autograd import next_sequence_nr, node_base
from aotdist.torch_seam.block_gradients import tensor_ids_of_roots
from aotdist.torch_seam.control_flow import intercept_checkpoints
from aotdist.torch_seam.functional import FunctionalTensor, functional_value
from aotdist.torch_seam.modes import torch_functions_off
from aotdist.torch_seam.modules import (
    intercept_forwards,
    note_read,
    noting_no_reads,
    noting_reads,
)
from aotdist.torch_seam.tensors import storage_id
from aotdist.torch_seam.trees import pytree
from aotdist.trace.blocks import Copies
from aotdist.trace.blocks.backwards import Backwards
from aotdist.trace.blocks.functions import Functions
from aotdist.trace.blocks.kinds import Kind, Reads, Unfit, kind_of
from aotdist.trace.blocks.recording import (
    Copying,
    Recorded,
    Step,
    check_copyable,
    checked_outs,
    closes_over,
    gradients_of,
    meta_at,
    metadata_of_values,
    nodes_since,
    value_of,
)
from aotdist.trace.blocks.writes import Write, check_unwritten, counts_of, writes_since
from aotdist.trace.capture_mode import CaptureMode
from aotdist.trace.recorder import Recorder
from aotdist.trace.tracer import NotInstantiable

_FEWEST_OPERATORS = 16
"""A block of fewer is traced at each call: to compare and copy it takes as long."""

_FEW = "it records few operators"
Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """The first calls of one kind.

    Args:
        recorded: a recorded call, or the reason why calls cannot be copied.
        reads: the attributes that it read; a call that finds other values there is of another kind.
        has_changed: whether anything in Python outside of modules has changed since the call began.
        is_confirmed: whether a second call recorded the same.
    """

    recorded: Recorded | str
    reads: Reads
    has_changed: Callable[[], bool]
    is_confirmed: bool = False

    def is_for(self, kind: Kind) -> bool:
        """Whether it applies to a call of this kind."""
        return self.reads.hold_for(kind) and (isinstance(self.recorded, str) or not self.has_changed())


class Blocks:
    """The blocks of one trace.

    Args:
        recorder: records the program.
        capture_mode: the mode that the program runs in.
        in_python: watches Python outside of modules; None for a trace without instances.
    """

    def __init__(self, recorder: Recorder, capture_mode: CaptureMode, in_python: InBackward | None) -> None:
        self._recorder, self._capture_mode, self._in_python = recorder, capture_mode, in_python
        self._candidates: dict[Hashable, list[_Candidate]] = {}
        self._backwards = Backwards(recorder, capture_mode)
        self._instances: list[tuple[str, str]] = []
        self._reasons: dict[str, str] = {}

    def copies(self) -> Copies:
        """Which calls were copied, and why others were not."""
        reasons = {path: reason for path, reason in self._reasons.items() if reason is not _FEW}
        return Copies(tuple(self._instances), reasons)

    @contextlib.contextmanager
    def called(self) -> Generator[None]:
        """In this context, calls and checkpoints of modules are intercepted."""
        if self._in_python is None or not self._recorder.can_instantiate():
            yield
            return
        self._recorder.intercept_functions(Functions(self._recorder).call)
        with intercept_forwards(self._forward), intercept_checkpoints(self._checkpoint):
            yield

    def _forward(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        known = self._capture_mode.known_stand_in
        kind_now = functools.partial(kind_of, module, args, kwargs, known, runs_hooks=False)
        return self._run(current_module(), functools.partial(forward, *args, **kwargs), kind_now)

    def _checkpoint(self, checkpoint: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a checkpoint: a block, if what it runs is a module or a method of one."""
        module = _module_of(args[0]) if args else None
        path = None if module is None else path_of(module)
        if module is None or path is None:
            return checkpoint(*args, **kwargs)
        known = self._capture_mode.known_stand_in
        kind_now = functools.partial(kind_of, module, args, kwargs, known, runs_hooks=True)
        return self._run(path, functools.partial(checkpoint, *args, **kwargs), kind_now)

    def _run(self, path: str, call: Callable[[], Any], kind_now: Callable[[], Kind]) -> Any:
        """Trace a call of the module at `path`, or copy the nodes of an equal one.

        Args:
            path: qualified name of the module.
            call: calls the module's forward, or a checkpoint of the module.
            kind_now: gives the kind of the call, before or after it.
        """
        with noting_no_reads():
            try:
                kind = kind_now()
            except Unfit as unfit:
                self._reasons[path] = str(unfit)
                kind = None
            candidates = [] if kind is None else self._candidates.setdefault(kind.key, [])
            candidate = next((one for one in reversed(candidates) if kind and one.is_for(kind)), None)
        if kind is None:
            return call()
        if candidate is not None and isinstance(candidate.recorded, Recorded) and candidate.is_confirmed:
            return self._instance(candidate, kind, path)
        if candidate is not None and isinstance(candidate.recorded, str):
            self._reasons[path] = candidate.recorded
            return call()
        assert self._in_python is not None and self._in_python.watch_forward is not None, "see `called`"
        with noting_no_reads():
            has_changed = self._in_python.watch_forward()
        with noting_reads() as reads:
            result, recorded = self._recorded(path, call, kind, kind_now)
        with noting_no_reads():
            if has_changed() and isinstance(recorded, Recorded):
                recorded = "it changes something in Python"
            candidates.append(
                self._compared(candidate, _Candidate(recorded, Reads.of(kind, reads), has_changed))
            )
        if isinstance(reason := candidates[-1].recorded, str):
            self._reasons[path] = reason
        else:
            self._reasons.pop(path, None)  # of the module inside of a checkpoint, which is a part of this
        return result

    def _compared(self, before: _Candidate | None, now: _Candidate) -> _Candidate:
        """The candidate after a call was traced, given the one before it, if there was one."""
        if before is None or isinstance(now.recorded, str):
            return now
        assert isinstance(before.recorded, Recorded), "kinds that cannot be copied are not compared"
        difference = before.recorded.difference_from(now.recorded, self._recorder)
        if difference is None and before.reads != now.reads:
            difference = "two calls read different attributes"
        try:
            if difference is None:  # the whole model, for one, is called once, and nobody copies it
                before.recorded.metadata.update(metadata_of_values(before.recorded.steps))
                return replace(before, is_confirmed=True)
        except Unfit as unfit:
            difference = str(unfit)
        return replace(now, recorded=difference)

    def _recorded(
        self, path: str, call: Callable[[], Any], kind: Kind, kind_now: Callable[[], Kind]
    ) -> tuple[Any, Recorded | str]:
        """Trace a call: its result, and what it recorded, or why that cannot be copied."""
        recorder, tracer = self._recorder, self._recorder.tracer
        with torch_functions_off():
            plains = kind.plains()
            inputs, before = tuple(map(recorder.value, plains)), counts_of(plains)
        last, effects = next(iter(reversed(tracer.graph.nodes)), None), self._num_effects()
        num_writes = recorder.num_writes()
        first, counted = next_sequence_nr(), tracer.next_graph_seq_nr()
        result = call()
        nodes = [node for node in nodes_since(tracer.graph.nodes, last) if node.op != "placeholder"]
        if len(nodes) < _FEWEST_OPERATORS:
            return result, _FEW
        try:
            with torch_functions_off(), noting_no_reads():
                writes = writes_since(before, plains, set(nodes), recorder)
                if self._num_effects() != effects:
                    raise Unfit("it prints, checks or chooses by data, or hooks a gradient")
                if not kind_now().is_still(kind):
                    raise Unfit("it changes its own attributes, or its arguments")
                check_copyable(nodes, recorder)
                if recorder.num_writes() > num_writes and closes_over(nodes, inputs):
                    raise Unfit("it writes tensors, and computes with some that it closes over")
                outs, spec = pytree.tree_flatten(result)
                outs = checked_outs(outs, kind, set(nodes), recorder)
                edges, consumers, saves = gradients_of(outs, kind, first)
        except Unfit as unfit:
            return result, str(unfit)
        return result, Recorded(
            path=path,
            kind=kind,
            inputs=inputs,
            steps=tuple(map(Step.of, nodes)),
            writes=writes,
            outs=outs,
            spec=spec,
            first_seq=counted,
            num_seqs=tracer.next_graph_seq_nr() - counted,
            edges=edges,
            consumers=consumers,
            saves=saves,
            metadata={},
            parameters={number: dict(vars(one)["_parameters"]) for number, one in kind.modules.items()},
        )

    def _num_effects(self) -> tuple[int, ...]:
        """How many effects that no node shows the program has had."""
        mode, made = self._capture_mode, () if self._in_python is None else self._in_python.num_effects()
        num_guards = len(self._recorder.data_guards.given)
        return mode.num_hooks, len(mode.retained), len(mode.asked), num_guards, *made

    def _instance(self, candidate: _Candidate, kind: Kind, path: str) -> Any:
        model = candidate.recorded
        assert isinstance(model, Recorded), "it is confirmed"
        self._instances.append((path, model.path))
        note_read(candidate.reads.of_call(kind))
        recorder, tracer = self._recorder, self._recorder.tracer
        with torch_functions_off():
            plains = kind.plains()
            nodes = map(recorder.value, plains)
            memory = _memory(model.inputs, plains)
            offset = tracer.next_graph_seq_nr() - model.first_seq
            copying = Copying(
                recorder=recorder,
                copies=dict(zip(model.inputs, nodes, strict=True)),
                known=model.metadata,
                memory=memory,
                meta=functools.partial(meta_at, functools.cache(model.module_in(path)), offset),
            )
            last = tracer.num_serials + len(model.steps) - 1
            written = [(plains[write.position], write) for write in model.writes]
            call = _Call(self._backwards, model, copying, kind.tensors, written, last)
            given = [t for t, count in zip(kind.tensors, model.edges, strict=True) for _ in range(count)]
            tensors = _Instance.apply(call, *given) if given else call.forward()
        tracer.continue_seq_nrs_at(model.first_seq + offset + model.num_seqs)
        return model.returned(kind, tensors)


def _module_of(function: Any) -> nn.Module | None:
    """The module that a function calls: itself, one whose method it is, or that of a `partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function.__self__ if isinstance(function, types.MethodType) else function
    return owner if isinstance(owner, nn.Module) else None


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One instance of a block.

    Args:
        backwards: the backwards of recorded calls.
        model: the recorded call.
        copying: how its nodes become those of this call.
        given: the tensors that this call can reach.
        written: which of their plain tensors it writes, and how.
        last: the serial of its last node in the forward.
    """

    backwards: Backwards
    model: Recorded
    copying: Copying
    given: tuple[torch.Tensor, ...]
    written: Sequence[tuple[FunctionalTensor, Write]]
    last: int

    def forward(self) -> list[torch.Tensor]:
        """Record the forward, and return its results."""
        self.copying.copy(self.model.steps)
        for tensor, write in self.written:
            self.copying.recorder.write(tensor, self.copying.copies[write.node], write.num_versions)
        values = (value_of(out, self.copying.recorder) for out in self.model.tensors())
        return [self.copying.put_together(*value) for value in values]

    def backward(
        self, grads: Sequence[torch.Tensor | None], needed: tuple[bool, ...]
    ) -> list[torch.Tensor | None]:
        """Record the backward, and return the gradients that the block sends. May be called several times."""
        recorder, copying = self.copying.recorder, self.copying.snapshot()
        check_unwritten([(tensor, copying.copies[write.node]) for tensor, write in self.written], recorder)
        recorded = self.backwards.of(self.model, grads, needed)
        plains = [plain for grad in grads if grad is not None for plain in plain_tensors(grad)]
        for tangent, plain in zip(recorded.tangents, plains, strict=True):
            copying.copies[tangent] = recorder.value(plain)
            copying.memory[storage_id(tangent.meta["val"])] = functional_value(plain)  # type: ignore[arg-type]
        roots = tensor_ids_of_roots()
        adds_up = [
            count < 2 or self._adds_up(tensor, roots)
            for tensor, count in zip(self.given, self.model.edges, strict=True)
        ]
        left_out = {
            node for one, adds in zip(recorded.sent, adds_up, strict=True) if not adds for node in one.sums
        }
        copying.copy([step for step in recorded.steps if step.node not in left_out])
        found: list[torch.Tensor | None] = []
        for one, adds in zip(recorded.sent, adds_up, strict=True):
            rest = (None,) * (len(one.pieces) - 1)
            pieces = (one.total, *rest) if adds and one.pieces else one.pieces
            found += (None if piece is None else copying.put_together(*piece) for piece in pieces)
        return found

    def _adds_up(self, tensor: torch.Tensor, roots: Collection[int]) -> bool:
        """Whether the block itself sums the gradients that it sends to a tensor.

        It does if these come first: autograd sums in the order in which gradients arrive, and users of the
        tensor that follow the block in the program have sent theirs before.

        Args:
            tensor: what the block is given, and sends several gradients to.
            roots: the identities of the tensors that the backward starts from.
        """
        if self.backwards.is_given_from_outside(tensor) or id(tensor) in roots:
            return False
        nodes = [self.copying.recorder.value(plain) for plain in plain_tensors(tensor)]
        users = {user for node in nodes for user in node.users if "function" not in user.meta}
        return all(user.meta["serial"] <= self.last for user in users)


class _Instance(node_base()):  # type: ignore[misc]  # a base that is made at run time
    """The autograd node of an instance."""

    passes_gradients_on = True

    @staticmethod
    def forward(ctx: Any, call: _Call, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Results of the block."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        if call.model.saves:
            ctx.save_for_backward(given[0])  # freed with the graph, as what the block saves
        results = call.forward()
        without = [
            new for new, out in zip(results, call.model.tensors(), strict=True) if not out.requires_grad
        ]
        ctx.mark_non_differentiable(*without)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Gradients of what the block is given."""
        if torch.is_grad_enabled():
            raise NotInstantiable(
                "blocks of one kind are traced once; `Settings(instantiate=False)` traces each"
            )
        with torch_functions_off():
            return (None, *ctx.call.backward(grads, tuple(ctx.needs_input_grad[1:])))


def _memory(inputs: Sequence[Node], plains: Sequence[FunctionalTensor]) -> dict[int, torch.Tensor]:
    """For the memory of what a recorded call was given, what lies there in another call."""
    pairs = zip(inputs, plains, strict=True)
    return {storage_id(node.meta["val"]): functional_value(plain) for node, plain in pairs}
