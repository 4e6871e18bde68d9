"""Random programs of views, elementwise operators, reductions and joins are eager's through the emitter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from aotdist.kernels import columns, launching, printing, splitting
from tests.kernels.reference import assert_same

Step = Callable[[list[torch.Tensor]], torch.Tensor]
SIZES = st.lists(st.sampled_from([1, 1, 2, 3, 4, 6, 8]), min_size=1, max_size=4)


@dataclass(frozen=True)
class Program:
    """Applies steps to a growing list of tensors, and returns some of them.

    Args:
        steps: each makes a tensor of those before it; the text says which.
        returned: positions.
    """

    steps: Sequence[tuple[str, Step]]
    returned: Sequence[int]

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        pool = list(given)
        for _, step in self.steps:
            made = step(pool)
            pool.append(made if made.dim() else made.unsqueeze(0))
        return [pool[at % len(pool)] for at in self.returned]

    def __repr__(self) -> str:
        lines = [text for text, _ in self.steps]
        return "; ".join([*lines, f"return {list(self.returned)}"])


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "exp(-|x|)": lambda x: (-x.abs()).exp(),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "x * 2 + 1": lambda x: x * 2 + 1,
    "x > 0 ? x : -1": lambda x: torch.where(x > 0, x, -1.0),
    "clone": torch.clone,
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "zeros": torch.zeros_like,
    "position": lambda x: x + torch.arange(x.shape[-1], dtype=x.dtype, device=x.device),
    "flip": lambda x: x.flip(0),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2)),
}
ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: x.log_softmax(-1),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "RMS norm": lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:]),
    "softmax and its columns": lambda x: _with_columns(x.softmax(-1)),
    "layer norm and its columns": lambda x: _with_columns(torch.nn.functional.layer_norm(x, x.shape[-1:])),
    "rows less their sums, and columns": lambda x: _with_columns(x * 2 - x.sum(-1, keepdim=True)),
}
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first and last swapped": lambda x: x.transpose(0, -1),
    "flat": lambda x: x.reshape(-1),
    "a dimension more": lambda x: x.unsqueeze(1) if x.dim() < 5 else x,
    "without ones": lambda x: x.squeeze(),
    "every other": lambda x: x[..., ::2],
    "but the first": lambda x: x[1:] if x.shape[0] > 1 else x,
    "the last": lambda x: x.select(0, -1) if x.dim() > 1 else x,
    "expanded": lambda x: x.unsqueeze(0).expand(3, *x.shape) if x.dim() < 4 and x.numel() < 400 else x,
    "halves": lambda x: x.reshape(2, -1) if x.numel() % 2 == 0 else x,
    "thirds": lambda x: x.reshape(-1, 3) if x.numel() % 3 == 0 else x,
    "second of a split": lambda x: x.chunk(2, -1)[-1],
}


def _with_columns(x: torch.Tensor) -> torch.Tensor:
    """More than a tensor: the sums of all its rows, to each of them."""
    return x + x.reshape(-1, x.shape[-1]).sum(0)


REDUCTIONS = ("sum", "mean", "amax", "amin", "var")
KINDS = ("unary", "unary", "view", "binary", "binary", "rows", "rows", "reduction", "join", "index")


@st.composite
def step_of(draw: st.DrawFn) -> tuple[str, Step]:
    kind = draw(st.sampled_from(KINDS))
    one, other = draw(st.integers(0, 30)), draw(st.integers(0, 30))
    match kind:
        case "unary" | "view" | "rows":
            table = {"unary": UNARY, "view": VIEWS, "rows": ROWS}[kind]
            name = draw(st.sampled_from(sorted(table)))
            return f"{name} of {one}", lambda pool: table[name](pool[one % len(pool)])
        case "binary":
            name = draw(st.sampled_from(["add", "mul", "sub", "maximum"]))
            return f"{name} of {one} and {other}", lambda pool: _binary(name, *_two(pool, one, other))
        case "reduction":
            name, dim, keep = draw(st.sampled_from(REDUCTIONS)), draw(st.integers(0, 9)), draw(st.booleans())
            text = f"{name} of {one} along {dim}{', which stays' * keep}"
            return text, lambda pool: _reduced(name, pool[one % len(pool)], dim, keep)
        case "join":
            return f"{one} beside {other}", lambda pool: _joined(*_two(pool, one, other))
        case _:
            return f"rows of {one} by {other}", lambda pool: _rows(*_two(pool, one, other))


def _two(pool: list[torch.Tensor], one: int, other: int) -> tuple[torch.Tensor, torch.Tensor]:
    return pool[one % len(pool)], pool[other % len(pool)]


def _binary(name: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    try:
        sizes = torch.broadcast_shapes(one.shape, other.shape)
    except RuntimeError:
        return one * 0.5
    return getattr(torch, name)(one, other) if math.prod(sizes) < 4000 else one * 0.5


def _reduced(name: str, x: torch.Tensor, dim: int, keep: bool) -> torch.Tensor:
    if name == "var" and x.shape[dim % x.dim()] == 1:
        return x * 2
    return getattr(x, name)(dim % x.dim(), keepdim=keep)


def _joined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if one.numel() >= 2000:
        return one + 1
    fits = one.dim() == other.dim() and one.shape[:-1] == other.shape[:-1]
    # PyTorch's fake `cat` takes sizes of 1 for channels that are last, where eager does not.
    return torch.cat((one, other if fits else one * 3), -1).contiguous()


def _rows(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    index = torch.arange(other.shape[0], device=one.device) % one.shape[0]
    return one[index]


@st.composite
def program_of(draw: st.DrawFn) -> Program:
    steps = draw(st.lists(step_of(), min_size=1, max_size=12))
    returned = draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))
    return Program(steps, [*returned, len(steps) + 1])


def tensors(sizes: Sequence[int], dtype: torch.dtype, *, transposed: bool, grad: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    first = torch.randn(*sizes, generator=generator, dtype=torch.float64)
    second = torch.randn(sizes[-1], generator=generator, dtype=torch.float64)
    if transposed:
        first = first.transpose(0, -1)
    return [tensor.to(dtype).requires_grad_(grad) for tensor in (first, second)]


Given: Any = given(program_of(), SIZES, st.booleans(), st.booleans())


@Given
def test_in_double(program: Program, sizes: list[int], transposed: bool, grad: bool) -> None:
    assert_same(program, *tensors(sizes, torch.float64, transposed=transposed, grad=grad))


@pytest.mark.sweep
@Given
def test_in_single(program: Program, sizes: list[int], transposed: bool, grad: bool) -> None:
    given_tensors = tensors(sizes, torch.float32, transposed=transposed, grad=grad)
    assert_same(program, *given_tensors, rtol=1e-3, atol=1e-4)


@Given
@example(Program([("softmax", lambda pool: pool[0].softmax(-1))], [2]), [3, 8], False, False)
def test_in_small_pieces(program: Program, sizes: list[int], transposed: bool, grad: bool) -> None:
    """What large tensors meet: rows in parts, rows that no block holds, sums in two stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "MIN_PARTS", 2)
        patch.setattr(columns, "MAX_PARTS", 4)
        patch.setattr(splitting, "MIN_ELEMENTS", 8)
        patch.setattr(launching, "MAX_PERSISTENT", 4)
        patch.setattr(launching, "MAX_PERSISTENT_COLUMN", 2)
        patch.setattr(launching, "_LOOPED_BLOCK", 4)
        patch.setattr(printing, "SIDE_BY_SIDE", 2)  # exponentials of a thread: no more than a loop's block
        assert_same(program, *tensors(sizes, torch.float64, transposed=transposed, grad=grad))


@pytest.mark.parametrize("size", (2, 3))
def test_what_repeats_is_read_from_its_end(size: int) -> None:
    """Places count down past 0, and wrap: Triton's own remainders have the sign of what they are left of."""
    x = torch.randn(size, dtype=torch.float64, requires_grad=True)
    assert_same(lambda x: torch.cat([x, x]).flip(0) * 2, x)
    assert_same(lambda x: x.repeat(3).flip(0)[1:].view(-1, 1) * 2, x)
    assert_same(lambda x: x.expand(4, size).flip(0, 1).reshape(-1).flip(0).view(size, 4).flip(1) * 2, x)
