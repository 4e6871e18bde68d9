"""Every kind of output, which the user then writes: what autograd says and does is eager's."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import aotdist
from tests.semantics.functions import Alias, Detached, Identity, Several, Transposed, WithConstant
from tests.semantics.makers import leaf, non_leaf, plain, two, two_non_leaf
from tests.semantics.meshes import sharded
from tests.semantics.observation import (
    Around,
    Scene,
    Sight,
    assert_same,
    gradients,
    observe,
    play,
    same_as_eager,
    tangent_for,
    tensors_in,
    versions,
)

Program = Callable[[torch.Tensor], Any]


def without_grad(program: Program, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return program(x)


OUTPUTS: dict[str, Program] = {
    "an input": lambda x: x,
    "views of an input": lambda x: (x.t(), x[1:], x),
    "split": lambda x: x.split(1),
    "some of split": lambda x: x.split(1)[::2],
    "split by sizes": lambda x: x.split([1, 3], 1),
    "some of unbind": lambda x: x.unbind(1)[1:3],
    "chunk": lambda x: x.chunk(2, 1),
    "chunk and its base": lambda x: (x.chunk(2, 1), x),
    "split of an intermediate": lambda x: (x * 2).split(2, 1),
    "split of an intermediate, and that": lambda x: ((y := x * 2).split(2, 1), y),
    "unbind of a view": lambda x: x.t().unbind(0),
    "a view of one of unbind": lambda x: x.unbind(0)[1][1:],
    "views of an intermediate": lambda x: ((y := x * 2).t(), y[0]),
    "a view of another output": lambda x: ((v := (x * 2).t())[0], v),
    "views made under no_grad": lambda x: (without_grad(lambda x: x.t(), x), x * 2),
    "split under no_grad": lambda x: (*without_grad(lambda x: x.split(1), x), x * 2),
    "a view made under no_grad, of a view": lambda x: (without_grad(lambda v: v[0], v := x.t()), v),
    "a function's view": lambda x: Transposed.apply(x),
    "a function's view of an intermediate": lambda x: Transposed.apply(x * 2),
    "a function's view, and what it shows": lambda x: ((y := x * 2), Transposed.apply(y)),
    "a view of a function's view": lambda x: Alias.apply(x)[0],
    "what a function was given": lambda x: Identity.apply(x * 2),
    "what a function was given, a view of an input": lambda x: Identity.apply(x[0]),
    "what a function was given, a part": lambda x: Identity.apply(x.tensor_split(2)[1]),
    "a function's detached": lambda x: Detached.apply(x),
    "several of one function": lambda x: Several.apply(x)[::2],
    "a function's constant": lambda x: WithConstant.apply(x)[0],
    "views of a function's detached": lambda x: (
        Transposed.apply(y := Detached.apply(x)),
        y.t(),
        Alias.apply(y),
    ),
    "a view of a function's view, and its use": lambda x: ((y := Transposed.apply(x)[:, None]), y * 2),
    "a function's view of a function's view": lambda x: (Transposed.apply(y := Identity.apply(x)), y),
    "a view under no_grad of a function's view": lambda x: without_grad(lambda v: v[0], Alias.apply(x)),
    "a view under no_grad of a function's view of an intermediate": lambda x: without_grad(
        lambda v: v[0], Alias.apply(x * 2)
    ),
    "a view under no_grad of a function's view that is returned": lambda x: (
        (y := Transposed.apply(x * 2)),
        without_grad(lambda v: v.t(), y),
    ),
    "detach beside its source": lambda x: ((y := x * 2), y.detach()),
    "detach of an input": lambda x: (x.detach(), x),
    "views of a detached tensor": lambda x: ((d := x.detach()), d[0], d.t()),
    "data": lambda x: (x.data, x * 2),
    "a view of data": lambda x: (x.data.t(), x),
    "the same tensor twice": lambda x: [x * 2] * 2,
    "_unsafe_view": lambda x: torch.ops.aten._unsafe_view(x * 2, [12]),
    "a batched product": lambda x: torch.nn.functional.linear(x[None], x),
    "conj": lambda x: torch.complex(x, x).conj(),
    "neg": lambda x: torch.complex(x, x).conj().imag,
    "a neg view": lambda x: torch._neg_view(x),
    "real": lambda x: torch.complex(x, x).real,
    "as real": lambda x: torch.view_as_real(torch.complex(x, x)),
    "as complex": lambda x: torch.view_as_complex(x.view(3, 2, 2)),
    "as complex, and back": lambda x: torch.view_as_complex(x.view(3, 2, 2)).real,
    "another dtype": lambda x: x.view(torch.int32),
    "another dtype and back": lambda x: x.view(torch.int32).view(torch.float32),
    "another dtype of an intermediate": lambda x: (x * 2).view(torch.bfloat16),
    "expand": lambda x: x[0].expand(5, 4),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 4), 1),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "composites": lambda x: (x.movedim(0, 1), x.flatten(), x.view_as(x), x.to(torch.float32), x.mT),
    "dropout in evaluation": lambda x: torch.nn.functional.dropout(x, 0.5, False),
}

MODES: tuple[Around, ...] = (nullcontext, torch.no_grad, torch.inference_mode)
MAKERS = {"plain": plain, "leaf": leaf, "non-leaf": non_leaf, "two": two, "two, non-leaf": two_non_leaf}


def runs(build: Callable[[], Scene], around: Around) -> bool:
    try:
        scene = build()
        play(scene, scene.fn, around=around)
    except Exception:  # wrappers refuse in many words
        return False
    return True


def compare(name: str, make: Callable[[], torch.Tensor]) -> None:
    def build() -> Scene:
        return Scene(OUTPUTS[name], (make(),))

    modes = [around for around in MODES if runs(build, around)]
    for around in modes:
        same_as_eager(build, calls=2, around=around)
    if not modes:
        pytest.skip("eager refuses it")


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("make", MAKERS)
def test_as_in_eager(make: str, name: str) -> None:
    compare(name, MAKERS[make])


def test_functions_views_that_inductor_drops() -> None:
    x = leaf()
    for program in (
        lambda x: (Alias.apply(x * 2),),
        lambda x: ((y := x * 2), Alias.apply(y)),
        lambda x: (Alias.apply(y := x * 2), y.detach()),
    ):
        eager, ours = program(x), aotdist.compile(program, backend="inductor")(x)
        for theirs, mine in zip(eager, ours, strict=True):
            assert (mine.requires_grad, mine._is_view()) == (theirs.requires_grad, theirs._is_view())
            if theirs.requires_grad:
                found, expected = (
                    torch.autograd.grad(one.sum(), x, retain_graph=True)[0] for one in (mine, theirs)
                )
                assert torch.equal(found, expected)


@pytest.mark.parametrize("name", OUTPUTS)
def test_of_dtensors(mesh: DeviceMesh, name: str) -> None:
    compare(name, lambda: sharded(mesh, plain()).requires_grad_() * 1.5)


def write(x: torch.Tensor) -> None:
    x.mul_(2)


def write_without_grad(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.mul_(2)


def write_behind_autograds_back(x: torch.Tensor) -> None:
    x.data.mul_(2)


WRITES = (write, write_without_grad, write_behind_autograds_back)


def seen_after(
    call: Program, x: torch.Tensor, position: int, change: Callable[[torch.Tensor], None]
) -> list[Sight]:
    """What the user sees who writes one of the results, and then differentiates each."""
    outputs = tensors_in("out", call(x))
    named = {"x": x} | dict(outputs)
    sights: list[Sight] = [_attempt(lambda: change(outputs[position % len(outputs)][1]))]
    sights += [observe(named), versions({"x": x})]
    for seed, tensor in enumerate(named.values()):
        if tensor.requires_grad and not tensor.is_leaf:
            tangent = tangent_for(tensor, seed)
            sights.append(_attempt(lambda t=tensor, g=tangent: t.backward(g, retain_graph=True)))
            sights.append(gradients(named))
    return sights


def _attempt(action: Callable[[], Any]) -> Sight:
    try:
        action()
    except RuntimeError as error:
        return {"error": _unnamed(error)}
    return {}


def _unnamed(error: RuntimeError) -> str:
    """What autograd says, but for the name of the function, and which of its results it was."""
    return re.sub(r"Output \d+ of \S+", "Output", str(error))[:150]


def sights_of(call: Program, make: str, position: int, change: Callable[[torch.Tensor], None]) -> list[Sight]:
    torch.manual_seed(0)
    try:
        return seen_after(call, MAKERS[make](), position, change)
    except RuntimeError as error:  # autograd refuses to say what became of a view
        return [{"raises": _unnamed(error)}]


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("make", ["leaf", "non-leaf", "two, non-leaf"])
def test_what_came_back_is_written(make: str, name: str) -> None:
    if make.startswith("two") and name in ("conj", "neg"):
        pytest.skip("TwoTensor hides from PyTorch that what is inside is conjugated")
    if not runs(lambda: Scene(OUTPUTS[name], (MAKERS[make](),)), nullcontext):
        pytest.skip("eager refuses it")
    compiled = aotdist.compile(OUTPUTS[name], backend="fx")
    for change in WRITES:
        for position in range(2):
            eager, ours = (sights_of(call, make, position, change) for call in (OUTPUTS[name], compiled))
            assert_same(eager, ours)
