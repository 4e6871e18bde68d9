"""What a traced step returns: its result, and the values that it assigns rather than writes in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aotdist.errors import PassesPrograms, UnsupportedProgram
from aotdist.step.held import HeldItem, HeldState
from aotdist.subclasses.protocol import SparseRows
from aotdist.torch_seam.symbols import number_kind
from aotdist.torch_seam.trees import pytree
from aotdist.trace.numbers.scalars import DTYPES, TracedNumber


class Varies(PassesPrograms):
    """Raised where a step assigns a hyperparameter that its program has as a constant.

    Args:
        key: its name.
    """

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key


@dataclass(slots=True)
class StepResult:
    """What a step returns; a pytree of tensors.

    Args:
        result: what the user's function returned, and the arguments of the schedules' steps (see
            `aotdist.step.stepping.TracedSteps`); traced numbers in them are tensors.
        read: positions of these numbers among the leaves of `result`.
        assigned: inputs of the step with their new gradients.
        cleared: inputs whose gradient is None now.
        overwritten: sparse tensors of the caller's, each with its new content.
        bumps: how often each of these was written.
        tensors: new tensors in the place of some that the optimizers hold, by position.
        numbers: new values of numbers that they hold, by position, as tensors.
        trace: the number of the trace, among those of its program.
    """

    result: Any = None
    read: tuple[int, ...] = ()
    assigned: list[tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=list[tuple[torch.Tensor, torch.Tensor]]
    )
    cleared: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    overwritten: list[tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=list[tuple[torch.Tensor, torch.Tensor]]
    )
    bumps: tuple[int, ...] = ()
    tensors: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    numbers: dict[int, list[torch.Tensor]] = field(default_factory=dict[int, list[torch.Tensor]])
    trace: int = 0

    def note_results(self, result: Any, later: Sequence[Any]) -> None:
        """Note what the user's function returned, and the arguments of the schedules' steps."""
        leaves, spec = pytree.tree_flatten((result, list(later)))
        self.read = tuple(at for at, leaf in enumerate(leaves) if isinstance(leaf, TracedNumber))
        for at in self.read:
            leaves[at] = leaves[at].scalars.carrying(leaves[at])
        self.result = pytree.tree_unflatten(leaves, spec)

    def read_results(self) -> tuple[Any, list[Any]]:
        """What `note_results` was given, with numbers read off their tensors."""
        if not self.read:
            return self.result
        leaves, spec = pytree.tree_flatten(self.result)
        for at in self.read:
            leaves[at] = leaves[at].item()
        return pytree.tree_unflatten(leaves, spec)

    def note_replaced(
        self, held: HeldState, stand_ins: Mapping[int, torch.Tensor], put: Sequence[Any]
    ) -> None:
        """Note which tensors and numbers the optimizers have replaced.

        Args:
            held: what the optimizers held before.
            stand_ins: of its tensors, by identity; where one is still there, nothing was replaced.
            put: the traced numbers that its numbers were replaced by for the trace.

        Raises:
            UnsupportedProgram: a value was replaced by one of another kind.
            Varies: a hyperparameter was replaced that is a constant of the program.
        """
        tensors = {(id(place.owner), place.key): at for at, place in enumerate(held.tensors)}
        numbers = {(id(place.owner), place.key): at for at, place in enumerate(held.numbers)}
        for place, value in held.changed():
            here = (id(place.owner), place.key)
            if isinstance(value, torch.Tensor) and stand_ins.get(id(place.value)) is value:
                continue
            if here in tensors and isinstance(value, torch.Tensor):
                self.tensors[tensors[here]] = value
            elif here in numbers and _kinds(value) == _kinds(place.value):
                if value is not put[numbers[here]]:
                    self.numbers[numbers[here]] = _as_tensors(value)
            elif (
                here not in numbers
                and set(kinds := _kinds(value)) <= DTYPES.keys()
                and kinds == _kinds(place.value)
            ):
                raise Varies(place.key)
            else:
                raise _other_kind(place, value)

    def note_overwritten(self, begun: Sequence[tuple[torch.Tensor, SparseRows]]) -> None:
        """Note the sparse tensors that were written, given each with the copy that the trace wrote."""
        written = [(before, now) for before, now in begun if now.num_writes]
        self.overwritten = [(before, now.again()) for before, now in written]
        self.bumps = tuple(now.num_writes for _, now in written)

    def assign(self, held: HeldState) -> None:
        """Assign, after a call, what the step assigns."""
        for at, tensor in self.tensors.items():
            held.tensors[at].put(tensor)
        for at, numbers in self.numbers.items():
            held.numbers[at].put(*(number.item() for number in numbers))
        for (before, now), bumps in zip(self.overwritten, self.bumps, strict=True):
            before.copy_(now)
            torch.autograd.graph.increment_version([before] * (bumps - 1))
        for leaf, grad in self.assigned:
            leaf.grad = grad
        for leaf in self.cleared:
            leaf.grad = None


def _flatten(done: StepResult) -> tuple[list[Any], Any]:
    written = [done.assigned, done.cleared, done.overwritten]
    return [done.result, *written, done.tensors, done.numbers], (done.read, done.bumps, done.trace)


def _unflatten(parts: Iterable[Any], rest: Any) -> StepResult:
    result, assigned, cleared, overwritten, *others = parts
    read, bumps, trace = rest
    return StepResult(result, read, assigned, cleared, overwritten, bumps, *others, trace=trace)


pytree.register_pytree_node(StepResult, _flatten, _unflatten)


def _parts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


def _kinds(value: Any) -> list[type]:
    kinds = (part.kind if isinstance(part, TracedNumber) else number_kind(part) for part in _parts(value))
    return [kind or type(part) for kind, part in zip(kinds, _parts(value), strict=True)]


def _as_tensors(value: Any) -> list[torch.Tensor]:
    pairs = zip(_parts(value), _kinds(value), strict=True)
    return [torch.scalar_tensor(number, dtype=DTYPES[kind]) for number, kind in pairs]


def _other_kind(place: HeldItem, value: Any) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"the optimizer assigns a {type(value).__name__} to `{place.path}`, where a "
        f"{type(place.value).__name__} was",
        stage="capture",
        fix="let it keep a tensor, or a number of the same type",
    )
