"""Programs that PyTorch 2.13's own pipeline refuses; here they are eager's.

Each test is named after what goes wrong there. Its program is small, so that it can be tried with
`torch.compile(backend="aot_eager")`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.makers import leaf, non_leaf, plain, two
from tests.semantics.meshes import sharded
from tests.semantics.observation import Scene, assert_both_give_the_same, same_as_eager

WRITTEN_AND_RETURNED: dict[str, Callable[..., Any]] = {
    "sin_": lambda x, w: x.sin_(),
    "sin_, and x": lambda x, w: (x.sin_(), x)[1],
    "multiplied": lambda x, w: x.mul_(w),
    "multiplied, and x": lambda x, w: (x.mul_(w), x)[1],
    "multiplied through a view": lambda x, w: (x[1:].mul_(w[1:]), x * 2)[1],
}


@pytest.mark.parametrize("name", WRITTEN_AND_RETURNED)
@pytest.mark.parametrize("kind", ["plain", "two", "dtensor"])
def test_the_backward_needs_the_value_that_the_write_replaced(mesh: DeviceMesh, kind: str, name: str) -> None:
    makers = {"plain": plain, "two": two, "dtensor": lambda: sharded(mesh, plain())}

    def build() -> Scene:
        x, w = (makers[kind]().requires_grad_() for _ in range(2))
        return Scene(WRITTEN_AND_RETURNED[name], (x * 1.5, w))

    same_as_eager(build)


@pytest.mark.parametrize("kind", ["plain", "two", "dtensor"])
def test_writes_multiplied_by_something_that_requires_grad(mesh: DeviceMesh, kind: str) -> None:
    makers = {"plain": plain, "two": two, "dtensor": lambda: sharded(mesh, plain())}

    def build() -> Scene:
        return Scene(lambda x, w: x.mul_(w), (makers[kind](), makers[kind]().requires_grad_()))

    same_as_eager(build)


@pytest.mark.parametrize("where", ["aliased", "beside"])
@pytest.mark.parametrize("kind", ["two", "dtensor"])
def test_an_aliased_write_with_a_subclass_in_the_program(mesh: DeviceMesh, kind: str, where: str) -> None:
    def build() -> Scene:
        wrapped = two() if kind == "two" else sharded(mesh, plain())
        x = wrapped if where == "aliased" else plain()
        return Scene(lambda a, b, c: (a.add_(1), b * 2, c * 2)[1:], (x, x[1:], wrapped), held={"x": x})

    same_as_eager(build)


@pytest.mark.parametrize("write", ["none", "the source", "the alias"])
@pytest.mark.parametrize("alias", [torch.Tensor.detach, lambda x: x.data], ids=["detach", "data"])
@pytest.mark.parametrize("kind", ["leaf", "non-leaf", "two", "dtensor", "parameter"])
def test_aliases_that_are_not_differentiable(mesh: DeviceMesh, kind: str, alias: Any, write: str) -> None:
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "leaf": leaf,
        "non-leaf": non_leaf,
        "two": lambda: two().requires_grad_(),
        "dtensor": lambda: sharded(mesh, plain()).requires_grad_(),
        "parameter": lambda: nn.Parameter(plain()),
    }

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if write != "none":
                (x if write == "the source" else y).mul_(2)
        return x.sin() + y

    def build() -> Scene:
        x = makers[kind]()
        return Scene(program, (x, alias(x)))

    # What is behind autograd's back is not told to it: the backward of `sin` comes after the write.
    same_as_eager(build)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.float64, torch.complex64])
def test_views_of_another_dtype(dtype: torch.dtype) -> None:
    same_as_eager(lambda: Scene(lambda x: x.view(dtype), (plain(),)))
    same_as_eager(lambda: Scene(lambda x: (x.view(dtype).zero_(), x * 2)[1], (plain(),)))
    same_as_eager(lambda: Scene(lambda x: ((y := x * 2), y.view(dtype)), (plain(),)))
    same_as_eager(lambda: Scene(lambda x: (x.view(dtype)[1:], x.add_(1))[0], (plain(),)))


COMPLEX: dict[str, Callable[..., Any]] = {
    "real": lambda z: torch.view_as_real(z),
    "and back": lambda z: torch.view_as_complex(torch.view_as_real(z)),
    "parts": lambda z: (z.real, z.imag),
    "conjugate": lambda z: z.conj(),
    "conjugate's part": lambda z: z.conj().imag,
    "parts of an intermediate": lambda z: ((y := z * 2).real, y.imag, y),
    "conjugate of an intermediate": lambda z: ((y := z * 2).conj(), y),
    "written": lambda z: (z.real.mul_(2), z * 2)[1],
    "imaginary part written": lambda z: (torch.view_as_real(z)[..., 1].zero_(), z.conj())[1],
    "written through the conjugate": lambda z: (z.conj().mul_(1j), z)[1],
    "an intermediate written": lambda z: ((y := z * 2).imag.zero_(), y)[1],
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_and_real_views(name: str, requires_grad: bool) -> None:
    def build() -> Scene:
        z = torch.randn(3, 4, dtype=torch.complex64, requires_grad=requires_grad)
        return Scene(COMPLEX[name], (z * 1.5,))

    same_as_eager(build, calls=2)


def test_the_real_part_of_a_part_of_a_conjugate_is_written() -> None:
    def program(z: torch.Tensor) -> torch.Tensor:
        part = z[:2]
        part.real.mul_(2)
        return part * z[1:]

    same_as_eager(lambda: Scene(program, (torch.randn(3, 4, dtype=torch.complex64).conj(),)))


def test_a_conjugate_has_no_view_as_real_as_in_eager() -> None:
    with pytest.raises(RuntimeError, match="unresolved conjugated tensors"):
        aotdist.compile(torch.view_as_real, backend="fx")(torch.randn(3, dtype=torch.complex64).conj())


@pytest.mark.parametrize("make", [plain, two, non_leaf], ids=["plain", "two", "non-leaf"])
def test_two_overlapping_views_both_written(make: Any) -> None:
    def build() -> Scene:
        x = make(4, 4)
        return Scene(lambda a, b: (a.add_(1), b.mul_(2), a * 1, b * 1)[2:], (x[:3], x[1:]), held={"x": x})

    same_as_eager(build)


@pytest.mark.parametrize("kind", ["plain", "two", "dtensor"])
def test_a_leaf_buffer_and_views_of_it(mesh: DeviceMesh, kind: str) -> None:
    makers = {"plain": plain, "two": two, "dtensor": lambda: sharded(mesh, plain())}

    def program(buffer: torch.Tensor, row: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            row.add_(1)
            rest.mul_(2)
        return buffer.sum() if kind == "plain" else buffer * 2

    def build() -> Scene:
        buffer = makers[kind]().requires_grad_()
        return Scene(program, (buffer, buffer[0], buffer[1:]))

    same_as_eager(build)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.t_() * 2,
        lambda x: (x.mul_(3), x.transpose_(0, 1), x * 2)[2],
        lambda x: (x.unsqueeze_(0), x[0])[1],
        lambda x: (x.detach_(), None)[1],
    ],
    ids=["t_", "data too", "unsqueeze_", "detach_"],
)
def test_metadata_writes_of_subclasses(program: Any) -> None:
    """DTensor has few of these operators itself; see `test_metadata_writes.py`."""
    same_as_eager(lambda: Scene(program, (two().requires_grad_() * 1.5,)))


class Stash(torch.autograd.Function):
    """Its backward reads and writes what its forward returned."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.stash = x.detach() * 2
        ctx.mark_non_differentiable(ctx.stash)
        return x * 3, ctx.stash

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.stash.mul_(2).add_(grads[0])
        return grads[0] * ctx.stash


def stashed_by_a_hook(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 3
    alias = y.detach()
    y.register_hook(lambda grad: (alias[1:].add_(1), grad)[1])
    return y * 2, alias.t()


@pytest.mark.parametrize("program", [Stash.apply, stashed_by_a_hook], ids=["a function", "a hook"])
def test_a_returned_tensor_that_is_written_in_backward_is_refused(program: Any) -> None:
    with pytest.raises(UnsupportedProgram, match=r"the backward .* writes `out\[1\].*`, which the program"):
        aotdist.compile(program, backend="fx")(plain().requires_grad_())


def test_double_backward() -> None:
    def use(call: Any) -> list[Any]:
        x = leaf()
        (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        grad.sum().backward()
        return [grad, x.grad]

    assert_both_give_the_same(lambda x: x.exp(), use)


def test_as_strided_outputs_of_dtensors(mesh: DeviceMesh) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, DTensor)
        return x.as_strided((3, 4), (4, 1))

    same_as_eager(lambda: Scene(program, (sharded(mesh, plain()),)), backward=False)


def test_is_grads_batched() -> None:
    def use(call: Any) -> list[Any]:
        x = leaf(3)
        return list(torch.autograd.grad(call(x), x, torch.eye(3), is_grads_batched=True))

    assert_both_give_the_same(lambda x: x.exp() * x, use)


def test_torch_func_over_a_compiled_function() -> None:
    assert_both_give_the_same(
        lambda x: x.sin().sum(), lambda call: [torch.func.grad(call)(plain()), torch.func.vmap(call)(plain())]
    )
