"""Random operators as functions of a seed and an offset, the last two of the plain inputs.

A program that draws from the global generator is lowered to one that draws from Philox
(`random_numbers.py`). With the same seed and offset it draws the same numbers, so a backward can draw again
what the forward drew. The numbers are not eager's: PyTorch's CPU generator is not counter-based. Each call
draws its seed from the user's generator, one number, so `torch.manual_seed` determines all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.convention.random_numbers import RULES, Stream
from aotdist.errors import UnsupportedProgram
from aotdist.origins import Origins
from aotdist.program import Call, Slot
from aotdist.torch_seam.operators import OpOverload, argument_names, with_defaults
from aotdist.torch_seam.trees import pytree

SLOTS = (Slot("rng", "seed"), Slot("rng", "offset"))
"""The names of the two inputs."""


DRAWN_ON = ("cpu", "cuda")
"""Types of devices for which a stream is implemented."""


def draw_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Seed and offset of one call, made on `device` without a synchronisation."""
    seed = torch.empty((), dtype=torch.int64, device=device).random_()
    return seed, torch.zeros((), dtype=torch.int64, device=device)


def draws_nothing(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a random operator has a dropout probability of zero, as attention mostly has."""
    given = dict(zip(argument_names(func), with_defaults(func, args, kwargs), strict=False)) | dict(kwargs)
    return given.get("dropout_p") == 0


def functional_draw(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], stream: Stream, like: Any
) -> Any:
    """The result of a random operator, drawn from `stream`, with the strides of `like`.

    Raises:
        UnsupportedProgram: the operator is not known as a function of a stream, or draws from a generator.
    """
    options = {name: value for name, value in kwargs.items() if name != "generator"}
    tensors: list[torch.Tensor] = pytree.tree_leaves(like)
    if kwargs.get("generator") is not None:
        raise _refusal(f"`{func}` draws from a generator of its own")
    stream.device = tensors[0].device
    if func not in RULES or stream.device.type not in DRAWN_ON:
        raise _refusal(f"`{func}` on {stream.device} is not known as a function of seed and offset")
    drawn = RULES[func](stream, *args, **options)
    if isinstance(like, torch.Tensor):
        return _laid_out(drawn, like)
    return tuple(_laid_out(*pair) for pair in zip(drawn, like, strict=True))


def _laid_out(drawn: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if drawn.stride() == like.stride():
        return drawn
    order = sorted(range(like.dim()), key=lambda dim: -like.stride(dim))
    inverse = sorted(range(like.dim()), key=order.__getitem__)
    return drawn.permute(order).contiguous().permute(inverse)


def _refusal(what: str) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"{what}, which `functional_rng` asks for",
        where=Origins().current() or None,
        stage="joint",
        fix="draw that number outside of the compiled function, or compile without `functional_rng`",
    )


@dataclass(frozen=True, slots=True)
class RngPlan:
    """Where the seed and the offset of a call are made.

    Args:
        device: their device; None for a program that draws from the user's generator itself.
    """

    device: torch.device | None

    @property
    def draw(self) -> Callable[[], tuple[torch.Tensor, torch.Tensor]] | None:
        """The function that makes them."""
        return None if self.device is None else functools.partial(draw_state, self.device)

    def state(self) -> Sequence[torch.Tensor]:
        """Seed and offset of one call, if the graph takes them."""
        return () if self.device is None else draw_state(self.device)

    def lift(self, call: Call) -> Call:
        """Give `call` a seed and an offset."""
        return lambda plains: call([*plains, *self.state()])


HIDDEN_STATE = RngPlan(None)
"""The plan of a program whose graph takes no seed."""
