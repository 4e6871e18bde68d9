"""What a traced step hands back, beside what it writes in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.joint.scalars import TracedNumber
from aotdist.step.held import HeldItem, HeldState
from aotdist.torch_seam.trees import pytree

DTYPES: Mapping[type, torch.dtype] = {float: torch.float64, int: torch.int64}
"""The dtypes of tensors that carry Python's numbers without a loss."""


@dataclass(slots=True)
class Done:
    """What a step hands back.

    Args:
        result: what `loss_fn` returned.
        norm: of the gradients, before they were clipped.
        tensors: what replaces tensors that the optimizer holds, by position.
        numbers: new values of numbers that it holds, by position, as tensors.
        grads: new gradients, by the name of their parameter.
        given: what is added to gradients of the step's arguments, by position.
        reached: names of the parameters that the backward gave gradients to.
    """

    result: Any = None
    norm: torch.Tensor | None = None
    tensors: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    numbers: dict[int, list[torch.Tensor]] = field(default_factory=dict[int, list[torch.Tensor]])
    grads: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    given: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    reached: tuple[str, ...] = ()

    def note(self, held: HeldState, stand_ins: Mapping[int, torch.Tensor], put: Sequence[Any]) -> None:
        """Note what the optimizer's step has assigned.

        Args:
            held: what the optimizer held before.
            stand_ins: those of its tensors, by identity: they were written, not assigned.
            put: what was put in the place of its numbers.

        Raises:
            UnsupportedProgram: it is of another kind than what was there.
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
            else:
                raise _other_kind(place, value)

    def put(self, held: HeldState) -> None:
        """Assign to the optimizer what its step has assigned, at a call."""
        for at, tensor in self.tensors.items():
            held.tensors[at].put(tensor)
        for at, numbers in self.numbers.items():
            held.numbers[at].put(*(number.item() for number in numbers))


pytree.register_pytree_node(
    Done,
    lambda done: ([done.result, done.norm, done.tensors, done.numbers, done.grads, done.given], done.reached),
    lambda parts, reached: Done(*parts, reached=reached),
)


def _parts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


def _kinds(value: Any) -> list[type]:
    return [part.kind if isinstance(part, TracedNumber) else type(part) for part in _parts(value)]


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
