"""The backward of a recorded call, run by itself, for the instances of the block to copy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from aotdist.subclasses.protocol import Recipe, plain_tensors, rebuild, recipe_of
from aotdist.torch_seam.autograd import retains_grad
from aotdist.torch_seam.block_gradients import hooks_off, run_backward_up_to
from aotdist.torch_seam.functional import FakeTensor, FunctionalTensor, functional_value
from aotdist.torch_seam.proxies import track
from aotdist.trace.blocks.kinds import Unfit, likeness
from aotdist.trace.blocks.recording import Recorded, Step, checked_nodes, likeness_of, likenesses_of
from aotdist.trace.recorder import Recorder


class NotInstantiable(Exception):
    """An instance cannot do what the block itself would do; the program is traced without instances."""


def comes_of_instances(error: BaseException | None) -> bool:
    """Whether an error was raised because of one."""
    while error is not None and not isinstance(error, NotInstantiable):
        error = error.__cause__ or error.__context__
    return error is not None


Value = tuple[tuple[Node, ...], Recipe]
"""The nodes of a tensor's plain tensors, and how it is put together."""


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """The gradients that a block sends to one tensor.

    Args:
        pieces: each of them, in order; None for those that do not come.
        total: their sum.
        sums: the nodes that add them up.
    """

    pieces: tuple[Value | None, ...]
    total: Value | None
    sums: frozenset[Node]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedBackward:
    """A backward of a recorded call.

    Args:
        tangents: for the plain tensors of the gradients that arrived, the nodes that stood for them.
        steps: what was recorded.
        sent: what the block sends to each tensor that it was given.
    """

    tangents: tuple[Node, ...]
    steps: tuple[Step, ...]
    sent: tuple[Sent, ...]


class Backwards:
    """The backwards of the recorded calls of one trace.

    Args:
        recorder: records the program.
        num_hooks: how many hooks of gradients the program has registered: they would be called.
    """

    def __init__(self, recorder: Recorder, num_hooks: Callable[[], int]) -> None:
        self._recorder, self._num_hooks = recorder, num_hooks
        self._known: dict[tuple[int, Hashable], RecordedBackward] = {}
        self._running: list[Recorded] = []
        """The calls whose backwards run now, the innermost last: there are blocks in blocks."""

    def of(
        self, model: Recorded, grads: Sequence[torch.Tensor | None], needed: tuple[bool, ...]
    ) -> RecordedBackward:
        """The backward of a recorded call for such gradients.

        Args:
            model: the call.
            grads: gradients of its results.
            needed: which of the gradients that it sends are.
        """
        memories: dict[int, int] = {}
        key = id(model), (tuple(None if g is None else likeness(g, memories) for g in grads), needed)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._run(model, grads, needed)
        return known

    def is_given_from_outside(self, tensor: torch.Tensor) -> bool:
        """Whether a block whose backward runs now was given a tensor: others may send gradients to it."""
        return any(tensor is each for model in self._running for each in model.kind.tensors)

    def _run(
        self, model: Recorded, grads: Sequence[torch.Tensor | None], needed: tuple[bool, ...]
    ) -> RecordedBackward:
        if not any(grad is not None for grad in grads):
            return RecordedBackward(
                (), (), tuple(Sent((None,) * count, None, frozenset()) for count in model.edges)
            )
        recorder = self._recorder
        pieces: list[list[torch.Tensor]] = [[] for _ in model.edges]
        handles = [
            node.register_hook(_noting(pieces, self._running, model, node))
            for node in {c[0]: None for c in model.consumers}
        ]
        outs = model.tensors()
        if any(map(retains_grad, outs)):
            raise NotInstantiable("the gradient of a block's result is retained")
        if self._num_hooks():
            raise NotInstantiable("the program hooks gradients")
        self._running.append(model)
        try:
            with hooks_off([*outs, *model.kind.tensors]), recorder.aside() as aside:
                tangents: list[Node] = []
                firsts = [None if grad is None else _stand_in_for(grad, recorder, tangents) for grad in grads]
                ends = [(out, first) for out, first in zip(outs, firsts, strict=True) if first is not None]
                firsts_needed = _first_of_each(model.edges, needed)
                wanted = [
                    t for t, is_needed in zip(model.kind.tensors, firsts_needed, strict=True) if is_needed
                ]
                totals = run_backward_up_to([out for out, _ in ends], wanted, [first for _, first in ends])
                sums = dict(zip([id(t) for t in wanted], totals, strict=True))
                sent = tuple(
                    _sent(some, count, sums.get(id(tensor)), recorder)
                    for some, count, tensor in zip(pieces, model.edges, model.kind.tensors, strict=True)
                )
                steps = [Step.of(node) for node in aside.nodes if model.made(node)]
                checked_nodes([step.node for step in steps], recorder)
                model.likenesses.update(likenesses_of(steps))
        except Unfit as unfit:
            raise NotInstantiable(str(unfit)) from None
        finally:
            self._running.pop()
            for handle in handles:
                handle.remove()
        return RecordedBackward(tuple(tangents), tuple(steps), sent)


def _stand_in_for(grad: torch.Tensor, recorder: Recorder, nodes: list[Node]) -> torch.Tensor:
    """A tensor like a gradient that arrives, by itself; `nodes` gets the nodes of its plain tensors."""
    plains: list[FunctionalTensor] = []
    for plain in plain_tensors(grad):
        value = functional_value(plain)  # type: ignore[arg-type]
        assert isinstance(value, FakeTensor), "it was computed in the trace"
        fake = likeness_of(value).made(recorder.fake_mode, None)
        node = recorder.tracer.graph.create_node("placeholder", f"tangent_{len(nodes)}")
        node.meta["val"] = fake
        track(fake, node, recorder.tracer)
        nodes.append(node)
        plains.append(recorder.traced_value(node))
    return rebuild(recipe_of(grad), plains)


def _first_of_each(edges: Sequence[int], needed: Sequence[bool]) -> list[bool]:
    """For each tensor, whether its gradient is needed."""
    remaining = iter(needed)
    return [any([next(remaining) for _ in range(count)]) for count in edges]


def _noting(pieces: list[list[torch.Tensor]], running: list[Recorded], model: Recorded, node: Any) -> Any:
    """A hook that notes what an autograd node sends to what the block was given."""
    places = [(sent, position) for each, sent, position in model.consumers if each is node]

    def note(grad_inputs: Sequence[torch.Tensor | None], grad_outputs: Any) -> None:
        if running[-1] is not model:
            return
        for sent, position in sorted(places):
            grad = grad_inputs[sent]
            if grad is not None:
                pieces[position].append(grad)

    return note


def _sent(pieces: Sequence[torch.Tensor], count: int, total: torch.Tensor | None, recorder: Recorder) -> Sent:
    """What a block sends to one tensor, in `count` places."""
    values = [value_of(piece, recorder) for piece in pieces]
    value = None if total is None else value_of(total, recorder)
    ends = {node for nodes, _ in values for node in nodes}
    pending, sums = [] if value is None else list(value[0]), set[Node]()
    while pending:
        node = pending.pop()
        if node not in ends and node not in sums:
            sums.add(node)
            pending += node.all_input_nodes
    return Sent((*values, *[None] * (count - len(values))), value, frozenset(sums))


def value_of(tensor: torch.Tensor, recorder: Recorder) -> Value:
    """The nodes of a traced tensor's plain tensors, and how it is put together."""
    return tuple(map(recorder.value, plain_tensors(tensor))), recipe_of(tensor)
