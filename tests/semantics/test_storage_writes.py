"""Writes to what a tensor lies in: `resize_`, `set_`, `.data =`, `out=` of another size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import (
    Scene,
    same_as_eager,
    same_as_eager_or_refused,
    skip_unless_eager_runs,
)

pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*(size or (2, 3)), requires_grad=True)


def two(*size: int) -> torch.Tensor:
    return TwoTensor(torch.randn(*(size or (2, 3))), torch.randn(*(size or (2, 3))))


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(2, 3),
    "leaf": leaf,
    "non-leaf": lambda: leaf() * 1.5,
    "view": lambda: torch.randn(4, 3)[1:3],
    "view of a non-leaf": lambda: (leaf(4, 3) * 1.5)[1:3],
    "transposed": lambda: torch.randn(3, 2).t(),
    "two": two,
    "two, non-leaf": lambda: two().requires_grad_() * 1.5,
}


@torch.no_grad()
def quietly(op: Callable[..., Any], *args: Any) -> Any:
    return op(*args)


def assign(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    x.data = source
    return x


def new(x: torch.Tensor, *size: int) -> torch.Tensor:
    """A tensor of the kind of `x`."""
    made = torch.arange(1.0, 1 + torch.Size(size).numel()).view(size)
    return TwoTensor(made, made + 1) if isinstance(x, TwoTensor) else made


ONE: dict[str, Callable[[torch.Tensor], Any]] = {
    "resize_ smaller": lambda x: x.resize_(2) * 2,
    "resize_ to the same": lambda x: x.resize_(2, 3) * 2,
    "resize_ to another shape": lambda x: x.resize_(3, 2) * 2,
    "resize_ to nothing": lambda x: x.resize_(0).sum(),
    "resize_ to nothing and back": lambda x: x.resize_(0).resize_(2, 3).fill_(1) * 2,
    "resize_ larger, filled": lambda x: x.resize_(3, 4).fill_(2) * 2,
    "resize_ larger keeps the beginning": lambda x: (x.resize_(10)[6:].zero_(), x * 2)[1],
    "resize_ larger, then its shape": lambda x: (x.resize_(12).fill_(2), x.resize_(3, 4).t_())[1] * 2,
    "resize_ larger under a view": lambda x: (v := x[1], x.resize_(12), x[6:].zero_(), v * 2, x * 1)[3:],
    "resize_ larger under a written view": lambda x: (
        v := x[1], x.resize_(12), x[6:].zero_(), quietly(v.mul_, 2), x * 1,
    )[4],
    "resize_ larger under a returned view": lambda x: (v := x[1], x.resize_(12), x[6:].zero_(), v, x[:2])[3:],
    "resize_ larger twice under a view": lambda x: (
        v := x[1], x.resize_(8), x[6:].fill_(2), w := x[4:], x.resize_(12), x[8:].zero_(), w.add_(1), v * 2,
    )[7],
    "resize_ larger under what is detached": lambda x: (
        v := x.detach().view(-1), x.resize_(12), x[6:].zero_(), v.add_(1), x * 1,
    )[4],
    "a view resized inside": lambda x: (v := x.detach()[0], v.resize_(5), v.mul_(2), v, x * 1)[3:],
    "a view resized inside, seen by its views": lambda x: (
        v := x.detach()[0], v.resize_(5), v[1:].add_(1), x * 1,
    )[3],
    "resize_as_": lambda x: x.resize_as_(new(x, 4)) * 2,
    "resize_ after a write": lambda x: (x.add_(1), x.resize_(4))[1] * 2,
    "resize_ before a write": lambda x: x.resize_(4).add_(1) * 2,
    "a view, then resize_": lambda x: (x[1], x.resize_(4).add_(1)),
    "resize_, then a view": lambda x: (x.resize_(4)[1:], x),
    "swapdims_": lambda x: x.swapdims_(0, 1) * 2,
    "swapaxes_ and a view before": lambda x: (x[1], x.swapaxes_(0, 1)),
    "set_ to fresh": lambda x: x.set_(new(x, 4)) * 2,
    "set_ to fresh that is returned": lambda x: (y := new(x, 4) * 2, x.set_(y), x.add_(1), y * 3),
    "set_ to a view of fresh": lambda x: x.set_(new(x, 4, 2).t()[1]) * 2,
    "set_ to fresh, written": lambda x: (x.set_(y := new(x, 4)).add_(1), y * 2)[1],
    "set_ after a write": lambda x: x.mul_(2).set_(new(x, 4)) * 2,
    "a view before set_": lambda x: (x[0], x.set_(new(x, 4)))[0],
    "a view of before, written": lambda x: (v := x[0], x.set_(new(x, 4)), v.mul_(2), x + 1)[3],
    "set_ twice": lambda x: (x.set_(new(x, 4)), x.set_(new(x, 2, 2)), x * 2)[2],
    "set_ to nothing": lambda x: x.set_().numel(),
    "set_ to itself": lambda x: x.set_(x) * 2,
    "set_ to a part of itself": lambda x: x.set_(x[1]) * 2,
    "set_ and back": lambda x: (old := x.detach(), x.set_(new(x, 4)), x.set_(old), x * 2)[3],
    "set_ without grad": lambda x: quietly(x.set_, new(x, 2, 3)) * 2,
    "set_ without grad after use": lambda x: (x * x, quietly(x.set_, new(x, 2, 3)))[0],
    "data =": lambda x: assign(x, new(x, 2, 3)) * 2,
    "data = of another size": lambda x: (assign(x, new(x, 4)), 1)[1],
    "data = itself": lambda x: assign(x, x.data) * 2,
    "data = what was made of it": lambda x: assign(x, x * 2) * x,
    "data = what is reshaped then": lambda x: (y := x * 2, assign(x, y), y.detach().t_(), y.t_(), x * 1)[4],
    "data = a view that is reshaped then": lambda x: (
        y := (x * 2)[:], assign(x, y), quietly(y.unsqueeze_, 0), x * 1,
    )[3],
    "data = after use": lambda x: ((x * x).sum(), assign(x, new(x, 2, 3)))[0],
    "data =, then written behind autograd": lambda x: assign(x, new(x, 2, 3)).data.mul_(2).sum(),
    "data = twice": lambda x: (assign(x, new(x, 2, 3)), assign(x, x.data * 2))[1] + 1,
    "an intermediate, resized": lambda x: (x.detach() * 2).resize_(4),
    "an intermediate, larger": lambda x: (x.detach() * 2).resize_(9).fill_(3),
    "an intermediate, larger, its view before": lambda x: (
        y := x.detach() * 2, v := y[1], y.resize_(9), y[6:].zero_(), v.add_(1), v, y,
    )[5:],
    "an intermediate, its view before": lambda x: ((y := x.detach() * 2)[0], y.resize_(4)),
    "an intermediate, set to the input": lambda x: (y := x * 2, quietly(y.set_, x.detach()), x * 3)[::2],
    "an intermediate, data =": lambda x: assign(x * 2, new(x, 2, 3)),
    "an intermediate, data = an input": lambda x: assign(new(x, 2, 3), x.data),
    "its data, resized": lambda x: (x.data.resize_(x.shape[:-1]), x * 2),
    "an intermediate, data =, used": lambda x: assign(x * 2, new(x, 2, 3)) * 3,
    "an intermediate, t_ with a view before": lambda x: ((y := x * 2)[1], y.t_()),
    "an intermediate, detach_ with a view before": lambda x: ((y := x * 2)[1], y.detach_()),
    "an intermediate, detach_ between": lambda x: (y := x * 2, y * 3, y.detach_(), y * 4)[::3],
    "a view, set_": lambda x: (v := x.detach()[0], v.set_(new(x, 4)))[1],
    "detached, set_": lambda x: x.detach().set_(new(x, 4)),
    "detached, resized": lambda x: (x.detach().resize_(2), x * 2),
}  # fmt: skip


REFUSALS = (
    "it grows into memory around it",
    "or was given another storage",
    "follows from a tensor that the program made, and then",
    "meets memory around it that only `as_strided` shows",
    "in another size than its gradient",
    "beside a write that takes part in the backward",
    "and gets a gradient",
)


def compare(build: Callable[[], Scene], *refusals: str, **options: Any) -> None:
    skip_unless_eager_runs(build)
    same_as_eager_or_refused(build, refusals, **options)


@pytest.mark.parametrize("program", ONE)
@pytest.mark.parametrize("make", MAKERS)
def test_of_one_input(make: str, program: str) -> None:
    def build() -> Scene:
        x = MAKERS[make]()
        return Scene(ONE[program], (x,), held={"base": () if x._base is None else x._base})

    compare(build, *REFUSALS)


TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "set_": lambda x, y: (x.set_(y), x * 2)[1],
    "set_, then one written": lambda x, y: (x.set_(y), x.add_(1), y * 2)[2],
    "set_, then the other written": lambda x, y: (x.set_(y), y.mul_(2), x * 2)[2],
    "set_, written through a view": lambda x, y: (x.set_(y), x[0].zero_(), y.sum(), x)[2:],
    "set_ to a view": lambda x, y: (x.set_(y.t()), x * 2)[1],
    "set_ to a row, written": lambda x, y: (x.set_(y[1]), x.add_(1), y * 2)[2],
    "exchanged": lambda x, y: (z := x.detach(), x.set_(y), y.set_(z), x * 2 + y)[3],
    "exchanged, written": lambda x, y: (
        z := x.detach(), x.set_(y), y.set_(z), x.add_(1), y.mul_(2), x * 1,
    )[5],
    "a view of before, of the one": lambda x, y: (v := x[0], x.set_(y), v, x[0])[2:],
    "a view of before, of the other": lambda x, y: (v := y[0], x.set_(y), y.t_(), v, x)[3:],
    "both returned": lambda x, y: (x.set_(y), x, y)[1:],
    "data =": lambda x, y: (assign(x, y), x * 2, y * 3)[1:],
    "data = a part": lambda x, y: (assign(x, y[1]), x * 2)[1],
    "data =, then written": lambda x, y: (assign(x, y), quietly(y.mul_, 2), x * 2)[2],
    "data = for a while": lambda x, y: (
        old := x.data, assign(x, y), z := x * 2, assign(x, old), z, x * 3,
    )[4:],
    "data = for a while, written": lambda x, y: (
        old := x.data, assign(x, y), quietly(x.add_, 1), assign(x, old), quietly(x.mul_, 3), x * y,
    )[5],
    "data = , then seen in another way": lambda x, y: (assign(x, y), x.squeeze_(), x * 2)[2],
    "data = , then seen in another way, written": lambda x, y: (
        assign(x, y),
        x.squeeze_(),
        quietly(x.add_, 1),
        x * 2,
    )[3],
    "data = what is made of both": lambda x, y: (assign(x, x.detach() + y.detach()), x * y)[1],
    "exchanged by data": lambda x, y: (old := x.data, assign(x, y.data), assign(y, old), x * 2, y * 3)[3:],
    "set_, then written with history": lambda x, y: (x.set_(torch.zeros(2, 3)), x.add_(y), x[0], x * 2)[1:],
    "data =, then written with history": lambda x, y: (assign(x, x.data * 2), x.mul_(y), x * y)[1:],
    "resized, then written with history": lambda x, y: (x.resize_(3), x.mul_(y[0]), x * 2)[1:],
    "larger, then written with history": lambda x, y: (x.resize_(9).fill_(1), x.mul_(y[0, 0]), x * 2)[1:],
    "resize_as_": lambda x, y: x.resize_as_(y[0]) * 2,
    "resized, and one written": lambda x, y: (y.mul_(2), x.resize_(2), x * y[0, 0])[2],
}  # fmt: skip

PAIRS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "plain": lambda: (torch.randn(2, 3), torch.randn(2, 3)),
    "plain, transposed": lambda: (torch.randn(2, 3), torch.randn(3, 2).t()),
    "plain, part": lambda: (torch.randn(2, 3), torch.randn(4, 3)[1:3]),
    "part, plain": lambda: (torch.randn(4, 3)[1:3], torch.randn(2, 3)),
    "leaf, plain": lambda: (leaf(), torch.randn(2, 3)),
    "plain, leaf": lambda: (torch.randn(2, 3), leaf()),
    "non-leaf, plain": lambda: (leaf() * 1.5, torch.randn(2, 3)),
    "leaves": lambda: (leaf(), leaf()),
    "two": lambda: (two(), two()),
    "two leaves": lambda: (two().requires_grad_(), two().requires_grad_()),
}


@pytest.mark.parametrize("program", TWO)
@pytest.mark.parametrize("make", PAIRS)
def test_of_two_inputs(make: str, program: str) -> None:
    if "storage" in program and "two" in make:
        pytest.skip("in eager the process dies: the storage of a wrapper has no memory")

    def build() -> Scene:
        x, y = PAIRS[make]()
        return Scene(TWO[program], (x, y))

    compare(build, *REFUSALS)


@pytest.mark.parametrize("make", ["leaf", "non-leaf"])
def test_data_of_a_view_that_is_used(make: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        view = x[0]
        view.data = view.clone()
        return x * view

    same_as_eager(lambda: Scene(program, (MAKERS[make](),)))


def test_data_of_another_dtype_for_what_gets_a_gradient_is_refused() -> None:
    """Autograd would round the gradient to the dtype that the program's node saw."""

    def program(x: torch.Tensor) -> torch.Tensor:
        x.data = x.data.double()
        return x * 2

    x = leaf()
    with pytest.raises(UnsupportedProgram, match="which gets a gradient, is given another dtype"):
        aotdist.compile(program, backend="fx")(x)
    assert x.dtype is torch.float32
    with torch.no_grad():
        assert aotdist.compile(program, backend="fx")(x).dtype is x.dtype is torch.float64


@pytest.mark.parametrize("make", ["plain", "view", "two"])
@pytest.mark.parametrize("size", [(0,), (2, 3, 4)])
def test_results_of_another_size_than_out_are_refused(make: str, size: tuple[int, ...]) -> None:
    x = MAKERS[make]()
    with pytest.raises(UnsupportedProgram, match="and its result has another"):
        aotdist.compile(lambda x: torch.add(new(x, *size), 1, out=x), backend="fx")(x)
    assert x.size() == MAKERS[make]().size()


def test_of_what_a_wrapper_computes() -> None:
    def build() -> Scene:
        return Scene(lambda x, y: (torch.sin(x, out=y), y)[1], (two(), torch.randn(2, 3)))

    same_as_eager(build)


@pytest.mark.parametrize("size", [(3,), (5,), (2, 4), (14,), (16,), (30,)])
@pytest.mark.parametrize("place", [slice(0, 4), slice(2, 6), slice(1, 9, 2)])
def test_growth_into_memory_around_an_input(place: slice, size: tuple[int, ...]) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        view = x[1:]
        x.resize_(size).mul_(2)
        return x + 1, view * y.sum()

    def build() -> Scene:
        memory = torch.randn(16)
        return Scene(program, (memory[place], memory.detach()[3:5]), held={"memory": memory})

    compare(build, "it grows into memory around it", "it has gaps")


def test_growth_out_of_memory_that_inputs_share_is_refused() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.resize_(20).fill_(2)
        return y * 1

    memory = torch.randn(16)
    with pytest.raises(UnsupportedProgram, match="it grows into memory around it"):
        aotdist.compile(program, backend="fx")(memory, memory.detach()[3:6])
    assert memory.size() == (16,)
