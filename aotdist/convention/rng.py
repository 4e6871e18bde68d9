"""Random operators as functions of a seed and an offset, the last two of the plain inputs.

A program that draws from the global generator is lowered to one that draws from Philox. With the same seed
and offset it draws the same numbers, so a backward can draw again what the forward drew. The numbers are not
eager's: PyTorch's CPU generator is not counter-based. Each call draws its seed from the user's generator, one
number, so `torch.manual_seed` determines all others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from aotdist.aliasing.memory import restrided
from aotdist.errors import UnsupportedProgram
from aotdist.origins import current_source_line
from aotdist.program import Call, Slot
from aotdist.torch_seam.operators import OpOverload, argument_names, own_operator, with_defaults
from aotdist.torch_seam.trees import pytree

SLOTS = (Slot("rng", "seed"), Slot("rng", "offset"))
"""The names of the two inputs."""

DRAWN_ON = ("cpu", "cuda")
"""Types of devices for which a stream is implemented."""

Draw: TypeAlias = Callable[["Stream", Sequence[int], torch.dtype], torch.Tensor]
Rule: TypeAlias = Callable[..., Any]
"""`rule(stream, *args, **kwargs)`: the result of an operator without its generator, with any strides."""

# Philox-4x32-10: random words as a function of a seed and an offset.
#
# Block `n` of the stream of a seed is four words of 32 bits, which depend on the seed and `n` alone.
# Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); words and constants are those
# of their library Random123, the seed being the key and `n` the low half of the counter.

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_BUMPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

Words: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox_4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four words for each counter.

    Shapes: every tensor is int64 and holds 32 bits an element; keys broadcast against counters.
    """
    a, b, c, d = counter
    low, high = key
    for _ in range(_ROUNDS):
        # The product of two words has 64 bits, which int64 holds; the topmost is its sign.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            _high(second) ^ b ^ low,
            second & _MASK,
            _high(first) ^ d ^ high,
            first & _MASK,
        )
        low, high = (low + _BUMPS[0]) & _MASK, (high + _BUMPS[1]) & _MASK
    return a, b, c, d


def _high(value: torch.Tensor) -> torch.Tensor:
    """The upper of two words."""
    # Not `>>`: partitions and compilers do not support the operator that it calls.
    return torch.bitwise_right_shift(value, 32) & _MASK


def _words(seed: torch.Tensor, offset: torch.Tensor, start: int, count: int) -> torch.Tensor:
    blocks = torch.arange(num_blocks(count), dtype=torch.int64, device=seed.device) + (offset + start)
    zero = torch.zeros_like(blocks)
    words = philox_4x32((blocks & _MASK, _high(blocks), zero, zero), (seed & _MASK, _high(seed)))
    return torch.stack(words, -1).view(-1)[:count].clone()


def num_blocks(num_words: int) -> int:
    """Blocks of the stream that so many words take."""
    return -(-num_words // 4)


def _fake_words(seed: torch.Tensor, offset: torch.Tensor, start: int, count: int) -> torch.Tensor:
    return seed.new_empty((count,), dtype=torch.int64)


PHILOX = own_operator(
    "philox(Tensor seed, Tensor offset, int start, int count) -> Tensor", _words, _fake_words
)
"""`philox(seed, offset, start, count)`: `count` words from block `offset + start` of the stream of `seed`.

Shapes: seed and offset are int64 without dimensions, the words int64 of 32 bits each.
"""


class Stream:
    """The words that one run of a program draws, in order.

    Args:
        state: returns the seed and the offset; called when numbers are drawn.
    """

    def __init__(self, state: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._state = state
        self.blocks = 0  # drawn so far
        self.device = torch.device("cpu")  # where numbers are drawn, and so where seed and offset lie

    def words(self, count: int) -> torch.Tensor:
        """The next `count` words; what is left of a block is not used."""
        start = self.blocks
        self.blocks += num_blocks(count)
        seed, offset = self._state()
        return PHILOX(seed, offset, start, count)

    def long_words(self, size: Sequence[int]) -> torch.Tensor:
        """Integers of 62 bits."""
        words = self.words(2 * math.prod(size)).view(*size, 2)
        upper, lower = words[..., 0] & 0x7FFFFFFF, words[..., 1] & 0x7FFFFFFF
        return torch.bitwise_left_shift(upper, 31) | lower

    def uniform(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Numbers in [0, 1): multiples of 2^-n for the n bits of the dtype's mantissa."""
        bits = MANTISSA[dtype]
        if bits > 32:
            integers = torch.bitwise_right_shift(self.long_words(size), 62 - bits)
        else:
            integers = torch.bitwise_right_shift(self.words(math.prod(size)).view(*size), 32 - bits)
        return integers.to(dtype) * 2.0**-bits

    def normal(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Numbers of the standard normal distribution (Box and Muller)."""
        exact = torch.float64 if dtype is torch.float64 else torch.float32
        radius = (-2 * torch.log1p(-self.uniform(size, exact))).sqrt()
        return (radius * torch.cos(2 * math.pi * self.uniform(size, exact))).to(dtype)


MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of the mantissa, with the leading one."""


_ATEN = torch.ops.aten


def _of_size(draw: Draw) -> Rule:
    """The rule of `rand` or `randn`."""

    def rule(s: Stream, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return draw(s, size, dtype or torch.get_default_dtype())

    return rule


def _like(draw: Draw) -> Rule:
    """The rule of `rand_like` or `randn_like`."""

    def rule(s: Stream, x: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return draw(s, x.size(), dtype or x.dtype)

    return rule


def _uniform(s: Stream, x: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return s.uniform(x.size(), x.dtype) * (high - low) + low


def _normal(s: Stream, x: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return s.normal(x.size(), x.dtype) * std + mean


def _normal_of(s: Stream, mean: Any, std: Any = 1.0) -> torch.Tensor:
    sizes = [value.size() for value in (mean, std) if isinstance(value, torch.Tensor)]
    dtype = mean.dtype if isinstance(mean, torch.Tensor) else std.dtype
    return s.normal(torch.broadcast_shapes(*sizes), dtype) * std + mean


def _normal_sized(
    s: Stream, mean: float, std: float, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    return _of_size(Stream.normal)(s, size, dtype=dtype) * std + mean


def _bernoulli(s: Stream, x: torch.Tensor) -> torch.Tensor:
    return _bernoulli_p(s, x, x)


def _bernoulli_p(s: Stream, x: torch.Tensor, p: Any = 0.5) -> torch.Tensor:
    exact = torch.float64 if isinstance(p, torch.Tensor) and p.dtype is torch.float64 else torch.float32
    return (s.uniform(x.size(), exact) < p).to(x.dtype)


def _dropout(s: Stream, x: torch.Tensor, p: float, train: bool | None = True) -> Any:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = s.uniform(x.size(), torch.float32) >= p
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _randint(s: Stream, *given: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    *bounds, size = given
    return _integers(s, size, bounds, dtype or torch.int64)


def _randint_like(
    s: Stream, x: torch.Tensor, *bounds: int, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    return _integers(s, x.size(), bounds, dtype or x.dtype)


def _integers(s: Stream, size: Sequence[int], bounds: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    low, high = (0, *bounds)[-2:]
    return (s.long_words(size) % (high - low) + low).to(dtype)


def _randperm(s: Stream, n: int, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return s.long_words((n,)).argsort().to(dtype or torch.int64)


def _exponential(s: Stream, x: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
    return -torch.log1p(-s.uniform(x.size(), x.dtype)) / rate


def _multinomial(s: Stream, weights: torch.Tensor, count: int, replacement: bool = False) -> torch.Tensor:
    if replacement:
        sums = weights.cumsum(-1)
        chosen = s.uniform((*weights.size()[:-1], count), weights.dtype) * sums[..., -1:]
        return torch.searchsorted(sums, chosen, right=True).clamp(max=weights.size(-1) - 1)
    # The first of so many exponential clocks to ring is each with its own weight (Efraimidis and Spirakis).
    return (weights / _exponential(s, weights)).topk(count, -1).indices


RULES: Mapping[OpOverload, Rule] = {
    _ATEN.rand.default: _of_size(Stream.uniform),
    _ATEN.rand_like.default: _like(Stream.uniform),
    _ATEN.uniform.default: _uniform,
    _ATEN.randn.default: _of_size(Stream.normal),
    _ATEN.randn_like.default: _like(Stream.normal),
    _ATEN.normal_functional.default: _normal,
    _ATEN.normal.Tensor_float: _normal_of,
    _ATEN.normal.float_Tensor: _normal_of,
    _ATEN.normal.Tensor_Tensor: _normal_of,
    _ATEN.normal.float_float: _normal_sized,
    _ATEN.bernoulli.default: _bernoulli,
    _ATEN.bernoulli.p: _bernoulli_p,
    _ATEN.bernoulli.Tensor: _bernoulli_p,
    _ATEN.native_dropout.default: _dropout,
    _ATEN.randint.default: _randint,
    _ATEN.randint.low: _randint,
    _ATEN.randint_like.default: _randint_like,
    _ATEN.randint_like.low_dtype: _randint_like,
    _ATEN.randperm.default: _randperm,
    _ATEN.exponential.default: _exponential,
    _ATEN.multinomial.default: _multinomial,
}
"""The operators that are functions of a stream."""


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
    return drawn if drawn.stride() == like.stride() else restrided(drawn, like.stride())


def _refusal(what: str) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"{what}, which `functional_rng` asks for",
        where=current_source_line() or None,
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
