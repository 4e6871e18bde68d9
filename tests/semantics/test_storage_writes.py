"""Writes to what a tensor lies in: `.data =`, `out=` of another size; `resize_` and `set_` are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.functions import Transposed
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
    "swapdims_": lambda x: x.swapdims_(0, 1) * 2,
    "swapaxes_ and a view before": lambda x: (x[1], x.swapaxes_(0, 1)),
    "data =": lambda x: assign(x, new(x, 2, 3)) * 2,
    "data = of another size": lambda x: (assign(x, new(x, 4)), 1)[1],
    "data = itself": lambda x: assign(x, x.data) * 2,
    "data = what was made of it": lambda x: assign(x, x * 2) * x,
    "data = after use": lambda x: ((x * x).sum(), assign(x, new(x, 2, 3)))[0],
    "data =, then written behind autograd": lambda x: assign(x, new(x, 2, 3)).data.mul_(2).sum(),
    "data = twice": lambda x: (assign(x, new(x, 2, 3)), assign(x, x.data * 2))[1] + 1,
    "an intermediate, data =": lambda x: assign(x * 2, new(x, 2, 3)),
    "an intermediate, data = an input": lambda x: assign(new(x, 2, 3), x.data),
    "an intermediate, data =, used": lambda x: assign(x * 2, new(x, 2, 3)) * 3,
    "an intermediate, t_ with a view before": lambda x: ((y := x * 2)[1], y.t_()),
    "an intermediate, detach_ with a view before": lambda x: ((y := x * 2)[1], y.detach_()),
    "an intermediate, detach_ between": lambda x: (y := x * 2, y * 3, y.detach_(), y * 4)[::3],
}  # fmt: skip


REFUSALS = (
    "in another size than its gradient",
    "before a write that takes part in the backward",
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
    "data =, then written with history": lambda x, y: (assign(x, x.data * 2), x.mul_(y), x * y)[1:],
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
    def build() -> Scene:
        x, y = PAIRS[make]()
        return Scene(TWO[program], (x, y))

    compare(build, *REFUSALS)


@pytest.mark.parametrize("make", ["leaf", "non-leaf"])
def test_data_of_a_view_that_is_used(make: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        view = x[0]
        view.data = view.clone()
        return view, x * view

    same_as_eager(lambda: Scene(program, (MAKERS[make](),)))


def test_data_of_another_size_for_a_view_that_a_function_made() -> None:
    """Gradients are summed up to the size that the function's result had, as autograd has noted it."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        view = Transposed.apply(x)
        view.data = y
        return view

    same_as_eager(lambda: Scene(program, (torch.randn((), requires_grad=True), torch.randn(3, 4))))


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


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "smaller": lambda x: x.resize_(2),
    "larger": lambda x: x.resize_(3, 4).fill_(2),
    "like another": lambda x: x.resize_as_(new(x, 4)),
    "an intermediate": lambda x: (x.detach() * 2).resize_(4),
    "set_": lambda x: x.set_(new(x, 4)),
    "set_ to nothing": lambda x: x.detach().set_(),
}


@pytest.mark.parametrize("program", REFUSED)
@pytest.mark.parametrize("make", ["plain", "view", "two"])
def test_another_size_or_memory_is_refused_by_name(make: str, program: str) -> None:
    x = MAKERS[make]()
    with pytest.raises(UnsupportedProgram, match="another size, or other memory, in place"):
        aotdist.compile(REFUSED[program], backend="fx")(x)
    assert x.size() == (2, 3)


@pytest.mark.parametrize("make", ["plain", "leaf", "non-leaf", "two"])
def test_the_size_that_it_has(make: str) -> None:
    """Observers of quantisation ask for it at each call."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.detach().resize_(2, 3).resize_as_(x) * x

    same_as_eager(lambda: Scene(program, (MAKERS[make](),)))
