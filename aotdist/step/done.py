"""What a traced step hands back, beside what it writes in place."""

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
    """A hyperparameter is assigned that a program is specialised on so far.

    Args:
        key: its name.
    """

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key


@dataclass(slots=True)
class Done:
    """What a step hands back.

    Args:
        result: what the user's function returned; numbers that the trace follows are tensors in it.
        read: positions of these numbers among the leaves of `result`.
        assigned: leaves, as the call found them, with their new gradients.
        cleared: leaves that have no gradient any more.
        overwritten: sparse tensors of the call, each with what it holds now.
        bumps: how often each of these was written.
        tensors: what replaces tensors that the optimizers hold, by position.
        numbers: new values of numbers that they hold, by position, as tensors.
        later: arguments of what is done when the call has run; see `aotdist.step.turns.Turns`.
        trace: which trace of its program it comes from.
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
    later: list[Any] = field(default_factory=list[Any])
    trace: int = 0

    def give(self, result: Any) -> None:
        """Note what the user's function returned."""
        leaves, spec = pytree.tree_flatten(result)
        self.read = tuple(at for at, leaf in enumerate(leaves) if isinstance(leaf, TracedNumber))
        for at in self.read:
            leaves[at] = leaves[at].scalars.carrying(leaves[at])
        self.result = pytree.tree_unflatten(leaves, spec)

    def given(self) -> Any:
        """What the user's function returned, at a call."""
        if not self.read:
            return self.result
        leaves, spec = pytree.tree_flatten(self.result)
        for at in self.read:
            leaves[at] = leaves[at].item()
        return pytree.tree_unflatten(leaves, spec)

    def note(self, held: HeldState, stand_ins: Mapping[int, torch.Tensor], put: Sequence[Any]) -> None:
        """Note what the optimizers' steps have assigned.

        Args:
            held: what the optimizers held before.
            stand_ins: those of its tensors, by identity: they were written, not assigned.
            put: what was put in the place of its numbers.

        Raises:
            UnsupportedProgram: it is of another kind than what was there.
            Varies: it is a hyperparameter that programs are specialised on.
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

    def overwrite(self, begun: Sequence[tuple[torch.Tensor, SparseRows]]) -> None:
        """Note which sparse tensors of the call were written: in what stands for them."""
        written = [(before, now) for before, now in begun if now.num_writes]
        self.overwritten = [(before, now.again()) for before, now in written]
        self.bumps = tuple(now.num_writes for _, now in written)

    def put(self, held: HeldState) -> None:
        """Assign, at a call, what the step has assigned."""
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


def _flatten(done: Done) -> tuple[list[Any], Any]:
    written = [done.assigned, done.cleared, done.overwritten]
    return [done.result, *written, done.tensors, done.numbers, done.later], (
        done.read,
        done.bumps,
        done.trace,
    )


def _unflatten(parts: Iterable[Any], rest: Any) -> Done:
    result, assigned, cleared, overwritten, *others = parts
    read, bumps, trace = rest
    return Done(result, read, assigned, cleared, overwritten, bumps, *others, trace=trace)


pytree.register_pytree_node(Done, _flatten, _unflatten)


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
