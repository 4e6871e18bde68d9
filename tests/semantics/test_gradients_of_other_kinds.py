"""Gradients that are other kinds of tensors than the results: plain ones for wrappers, and the reverse."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import plain_tensors
from aotdist.trace.later_backwards import LaterBackwards
from tests.semantics.makers import leaf, non_leaf, plain, two
from tests.semantics.meshes import sharded
from tests.semantics.observation import Scene, same_as_eager, tangent_of_other_kind

PROGRAMS: dict[str, Callable[..., Any]] = {
    "a gradient that is passed on": lambda x, w: x + w,
    "scaled": lambda x, w: x * 2 - w,
    "multiplied": lambda x, w: x * w,
    "matrices": lambda x, w: (x @ w.t()).relu() + 1,
    "functions": lambda x, w: x.sin().exp() * torch.tanh(w),
    "a reduction": lambda x, w: (x * w).sum(0),
    "a view": lambda x, w: (x * w).t(),
    "softmax": lambda x, w: (x * w).softmax(-1),
    "dropout": lambda x, w: F.dropout(x * w) * w,
    "two results": lambda x, w: (x * w, w.sin()),
    "a write": lambda x, w: (x * 2).mul_(w),
    "an unused input": lambda x, w: x * x,
}

KINDS = {
    "wrappers": (two, two),
    "a wrapper and a plain tensor": (two, plain),
    "plain tensors": (plain, plain),
}


def scene(name: str, kind: str, other_kinds: frozenset[int]) -> Callable[[], Scene]:
    def build() -> Scene:
        x, w = (make().requires_grad_() for make in KINDS[kind])
        return Scene(PROGRAMS[name], (x, w), other_kinds=other_kinds)

    return build


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name: str, kind: str, partition: str) -> None:
    same_as_eager(scene(name, kind, frozenset({0, 1})), calls=2, partition=partition)


@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_one_of_two_gradients_is_of_another_kind(kind: str, other: int) -> None:
    same_as_eager(scene("two results", kind, frozenset({other})))


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_and_the_other_is_missing(kind: str, missing: int) -> None:
    def build() -> Scene:
        x, w = (make().requires_grad_() for make in KINDS[kind])
        kinds = frozenset({1 - missing})
        return Scene(PROGRAMS["two results"], (x, w), left_out=frozenset({missing}), other_kinds=kinds)

    same_as_eager(build)


@pytest.mark.parametrize("kind", KINDS)
def test_symbolic_sizes(kind: str) -> None:
    def build() -> list[Scene]:
        sizes = [(3, 4), (5, 2)]
        pairs = [[make(*size).requires_grad_() for make in KINDS[kind]] for size in sizes]
        return [Scene(PROGRAMS["functions"], tuple(pair), other_kinds=frozenset({0})) for pair in pairs]

    same_as_eager(build, dynamic=True)


def test_wrappers_in_wrappers() -> None:
    def build() -> Scene:
        x = TwoTensor(two(), plain()).requires_grad_()
        return Scene(lambda x: x.sin() * x, (x,), other_kinds=frozenset({0}))

    same_as_eager(build)


def test_a_view_written_with_another_kind() -> None:
    """What it is a view of gets a gradient of its own kind: of two in one, what eager copies last."""

    def build() -> Scene:
        x, w = two(4, 4).requires_grad_(), TwoTensor(two(4, 4), plain(4, 4)).requires_grad_()
        return Scene(lambda x, w: (x.mul_(w), None)[1], ((x * 1.5).t(), w), held={"x": x})

    same_as_eager(build)


def test_a_function_of_the_user() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad * x.cos()

    same_as_eager(lambda: Scene(Scaled.apply, (two().requires_grad_(),), other_kinds=frozenset({0})))


def tried(fn: Callable[..., Any], gradient: Sequence[int] = (3, 4)) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = leaf()
    fn(x).backward(two(*gradient))
    return x.grad.a, x.grad.b


def test_a_compiler_that_fuses() -> None:
    """Its kernels take no wrappers: operators run instead."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).exp()

    compiled = aotdist.compile(program, backend="inductor")
    assert_close(tried(compiled), tried(program))
    assert_close(tried(compiled), tried(program))


def test_each_kind_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    trace = LaterBackwards.of_kinds
    monkeypatch.setattr(LaterBackwards, "of_kinds", lambda *args: (traced.append(args), trace(*args))[1])
    compiled = aotdist.compile(lambda x: x * x, backend="fx")
    x = two().requires_grad_()
    for gradient in (plain(), two(), plain(), TwoTensor(two(), plain()), plain(4, 3).t(), two()):
        compiled(x).backward(gradient)
        x.grad = None
    assert len(traced) == 2


def test_what_was_saved_is_freed_or_kept_as_asked() -> None:
    x = two().requires_grad_()
    y = aotdist.compile(lambda x: x * x, backend="fx")(x)
    y.backward(torch.ones(3, 4), retain_graph=True)
    y.backward(torch.ones(3, 4))
    assert_close(x.grad.a, x.detach().a * 4)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(torch.ones(3, 4))


def test_on_another_thread() -> None:
    x = two().requires_grad_()
    y = aotdist.compile(lambda x: x * x, backend="fx")(x)
    thread = threading.Thread(target=y.backward, args=(torch.ones(3, 4),))
    thread.start()
    thread.join()
    assert_close(x.grad.a, x.detach().a * 2)


def test_in_autocast() -> None:
    def build() -> Scene:
        x, w = two().requires_grad_(), two().requires_grad_()
        return Scene(PROGRAMS["matrices"], (x, w), other_kinds=frozenset({0}))

    same_as_eager(build, around=lambda: torch.autocast("cpu", torch.bfloat16))


@pytest.mark.parametrize("program", [lambda x: x * 2, lambda x: x.t(), lambda x: x + x])
def test_a_plain_gradient_of_a_dtensor(mesh: DeviceMesh, program: Callable[..., Any]) -> None:
    grads = []
    for fn in (program, aotdist.compile(program, backend="fx")):
        x = sharded(mesh, torch.ones(4, 4)).requires_grad_()
        fn(x).backward(torch.arange(16.0).reshape(4, 4))
        grads.append(x.grad)
    assert type(grads[1]) is type(grads[0]) is torch.Tensor
    assert torch.equal(*grads)


def test_dtensors_meet_no_plain_tensors_as_in_eager(mesh: DeviceMesh) -> None:
    x = sharded(mesh, torch.ones(4, 4)).requires_grad_()
    y = aotdist.compile(lambda x: x * x, backend="fx")(x)
    with pytest.raises(UnsupportedProgram, match=r"`out\[0\]` is a Tensor.*mixed torch.Tensor and DTensor"):
        y.backward(torch.ones(4, 4))
    y.backward(sharded(mesh, torch.ones(4, 4)))
    assert x.grad is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_differentiated_in_turn(name: str, kind: str) -> None:
    """Equal to rounding, as second derivatives are."""

    def second(fn: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, w = (make().requires_grad_() for make in KINDS[kind])
        results = fn(x, w)
        results = results if isinstance(results, tuple) else (results,)
        tangents = [tangent_of_other_kind(one, 1).requires_grad_() for one in results]
        grads = torch.autograd.grad(results, (x, w), tangents, create_graph=True, allow_unused=True)
        ends = [grad * grad for grad in grads if grad is not None and grad.requires_grad]
        again = torch.autograd.grad(
            ends, (x, w, *tangents), list(map(torch.ones_like, ends)), allow_unused=True
        )
        found = [grad for grad in (*grads, *again) if grad is not None]
        return [plain for grad in found for plain in plain_tensors(grad)]

    assert_close(second(aotdist.compile(PROGRAMS[name], backend="fx")), second(PROGRAMS[name]))


def test_differentiated_in_turn_with_symbolic_sizes() -> None:
    program, found = (lambda x: x * x), []
    compiled = aotdist.compile(program, backend="fx", settings=aotdist.Settings(dynamic=True))
    for call in (program, compiled):
        torch.manual_seed(0)
        x = two().requires_grad_()
        (grad,) = torch.autograd.grad(call(x), x, torch.full((3, 4), 2.0), create_graph=True)
        found.append((*plain_tensors(grad), *plain_tensors(torch.autograd.grad((grad * grad).sum(), x)[0])))
    assert_close(*found)


def test_not_looked_at_between_results() -> None:
    y, z = aotdist.compile(lambda x: ((y := x * x), y * x), backend="fx")(two().requires_grad_())
    y.retain_grad()
    with pytest.raises(UnsupportedProgram, match="look at what passes between them"):
        z.backward(torch.ones(3, 4))


def test_watched_results_of_plain_tensors() -> None:
    def build() -> Scene:
        return Scene(lambda x: ((y := x.sin()), y * y), (non_leaf(),), other_kinds=frozenset({0, 1}))

    same_as_eager(build)


def test_an_input_written_after_the_forward_whose_old_value_is_not_needed() -> None:
    """`x + 1` is saved, in eager and here."""
    found = []
    for call in (_shifted_sine, aotdist.compile(_shifted_sine, backend="fx")):
        torch.manual_seed(0)
        x = leaf()
        y = call(x)
        with torch.no_grad():
            x.mul_(2)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append((grad.detach(), *torch.autograd.grad(grad.sum(), x)))
    assert all(map(torch.equal, *found))


def _shifted_sine(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).sin()
