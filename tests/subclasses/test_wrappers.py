"""Any wrapper in, the same wrapper out: what their parts may be, and how they are laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.runtime import derive
from aotdist.subclasses import protocol
from aotdist.subclasses.float8_tensor import E4M3, cast
from aotdist.subclasses.protocol import Plain, Recipe, Wrapper, WrapperRule, register_wrapper_rule
from aotdist.subclasses.sparse24_selection import sparsify
from tests.semantics.makers import two
from tests.semantics.meshes import mesh, sharded
from tests.semantics.observation import (
    Scene,
    assert_both_give_the_same,
    same_as_eager,
    same_as_eager_or_refused,
)

__all__ = ["mesh"]


class Sideways(torch.Tensor):
    """Holds the transpose of what it stands for, a word and a number; strides are others outside."""

    def __new__(cls, inner: torch.Tensor, word: str = "", number: int = 1) -> Sideways:
        size, stride = inner.t().size(), (inner.size(0), 1)
        return torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor, word: str = "", number: int = 1) -> None:
        self.inner, self.word, self.number = inner, word, number

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner", "number"], self.word

    @staticmethod
    def __tensor_unflatten__(inner: Any, word: Any, size: Any, stride: Any) -> Sideways:
        return Sideways(inner["inner"], word, inner["number"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = {t.word: t.number for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Sideways)}
        result = func(
            *pytree.tree_map_only(Sideways, lambda t: t.inner, args),
            **pytree.tree_map_only(Sideways, lambda t: t.inner, kwargs or {}),
        )
        (word, number), *_ = words.items()
        return pytree.tree_map_only(torch.Tensor, lambda t: Sideways(t, word, number), result)


def sideways(rows: int = 3, **constants: Any) -> torch.Tensor:
    return Sideways(torch.randn(4, rows), **constants).requires_grad_()


def test_strides_outside_unlike_those_inside() -> None:
    same_as_eager(lambda: Scene(lambda x: (x * x).sin(), (sideways(word="a"),)), calls=2)


class Asked(TwoTensor):
    """Sizes and strides are what its class answers, which PyTorch keeps among its attributes."""

    @staticmethod
    def __new__(cls: Any, a: torch.Tensor, b: torch.Tensor, *_: Any) -> Any:
        policy: dict[str, Any] = {"dispatch_sizes_strides_policy": "strides"}
        return torch.Tensor._make_wrapper_subclass(cls, a.size(), strides=a.stride(), dtype=a.dtype, **policy)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Asked(inner["a"], inner["b"])


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_class_that_is_asked_for_sizes(dynamic: bool) -> None:
    x = Asked(torch.randn(3, 10), torch.randn(3, 10))
    assert x.size() == (3, 10)

    def program(x: Any) -> Any:
        return x.unflatten(-1, [2, 5]) * x.stride(0)

    compiled = aotdist.compile(program, backend="fx", settings=aotdist.Settings(dynamic=dynamic))
    assert torch.equal(compiled(x).b, program(x).b)


def test_attributes_that_are_no_tensors() -> None:
    compiled = aotdist.compile(lambda x: x * x.number, backend="fx")
    for word, number in (("a", 2), ("a", 3), ("b", 3), ("a", 2)):
        x = sideways(word=word, number=number)
        y = compiled(x)
        assert (y.word, y.number) == (word, number) and torch.equal(y.inner, x.inner * number)
    assert len(compiled.artifacts) == 3


def test_what_is_inside_of_another_wrapper_is_guarded() -> None:
    compiled = aotdist.compile(lambda x: x * 2, backend="fx")
    for word in ("a", "b"):
        y = compiled(TwoTensor(sideways(word=word).detach(), sideways(word=word).detach()))
        assert y.a.word == y.b.word == word
    compiled(TwoTensor(TwoTensor(torch.ones(3, 4), torch.ones(3, 4)), torch.ones(3, 4)))
    assert len(compiled.artifacts) == 3


def test_symbolic_sizes_outside_and_inside() -> None:
    compiled = aotdist.compile(lambda x: x * x.size(0), backend="fx", settings={"dynamic": True})
    for rows in (3, 5, 7):
        x = sideways(rows)
        y = compiled(x)
        assert y.size() == (rows, 4) and torch.equal(y.inner, x.inner * rows)
    assert len(compiled.artifacts) == 1


PARTS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "one tensor twice": lambda t: (TwoTensor(t, t),),
    "the memory of one": lambda t: (TwoTensor(t, t.view(3, 4)),),
    "another argument": lambda t: (TwoTensor(t, torch.randn(3, 4)), t),
    "a part of another argument": lambda t: (TwoTensor(t[:2], torch.randn(2, 4)), t),
    "parts of two": lambda t: (TwoTensor(t, torch.randn(3, 4)), TwoTensor(torch.randn(3, 4), t)),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("written", [None, 0, -1])
def test_parts_that_share_memory(name: str, written: int | None) -> None:
    def program(*tensors: torch.Tensor) -> Any:
        if written is not None:
            tensors[written].add_(1)
        return [tensor * 2 for tensor in tensors]

    same_as_eager(lambda: Scene(program, PARTS[name](torch.randn(3, 4))), calls=2)


def test_wrappers_of_plain_inputs_and_the_reverse() -> None:
    def program(x: torch.Tensor, y: TwoTensor) -> Any:
        return TwoTensor(x * 2, x), y.a * 2, TwoTensor(y, y).sin()

    def build() -> Scene:
        return Scene(program, (torch.randn(3, 4), TwoTensor(torch.randn(3, 4), torch.randn(3, 4))))

    same_as_eager(build, calls=2)


INSIDE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: (x.a, x.mul_(2))[0],
    "its views": lambda x: (x.mul_(2), x.a, x.a.t(), x.a[0], x.b[1:])[1:],
    "before the write": lambda x: (x.a.t(), x.t().mul_(2))[0],
    "inside of a view": lambda x: (x.mul_(2), (v := x.t()).a, v.a[0], v)[1:],
    "behind autograd's back": lambda x: (x.detach().mul_(2), x.a)[1],
    "written itself": lambda x: x.a.mul_(2),
    "written itself, and not returned": lambda x: (x.a.mul_(2), x.b[0].zero_(), x * 2)[2],
}


@pytest.mark.parametrize("make", [two, lambda: two().requires_grad_() * 2], ids=["plain", "with grad"])
@pytest.mark.parametrize("name", INSIDE)
def test_what_lies_inside_of_a_written_wrapper(name: str, make: Callable[[], torch.Tensor]) -> None:
    same_as_eager(lambda: Scene(INSIDE[name], (make(),)), calls=2)


def test_what_lies_inside_is_the_same_object() -> None:
    x = two()
    y, z = aotdist.compile(lambda x: (x.add_(1), x.a, x.a[0])[1:], backend="fx")(x)
    assert y is x.a and z._base is x.a


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("backend", ["fx", "inductor"])
def test_what_lies_inside_with_symbolic_sizes(backend: str, write: bool) -> None:
    compiled = aotdist.compile(
        lambda x: (x.add_(1) if write else x, x.a.view(-1, 1), x.a)[1:],
        backend=backend,
        settings={"dynamic": True},
    )
    for rows in (3, 5):
        x = TwoTensor(torch.randn(rows, 4), torch.randn(rows, 4))
        view, inner = compiled(x)
        assert inner is x.a and view._base is x.a and view.shape == (rows * 4, 1)
    assert len(compiled.artifacts) == 1


AROUND: dict[str, Callable[[Any], Any]] = {
    "where nothing moves": lambda x: x.redistribute(placements=[Shard(0)]),
    "its local part": lambda x: x.to_local(),
    "a view of it": lambda x: x.to_local().t(),
    "a part of it": lambda x: x.redistribute(placements=[Shard(0)]).t(),
    "taken out and put in": lambda x: DTensor.from_local(x.to_local(), x.device_mesh, [Shard(1)]),
    "a local part without history": lambda x: x.detach().to_local()[1:],
}
MADE_AROUND = ("where nothing moves", "a part of it", "taken out and put in")
"""Those that are wrappers around the local part, or views of such."""


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", AROUND)
def test_what_shares_the_local_part_of_a_written_dtensor(
    mesh: DeviceMesh, name: str, first: bool, grad: bool
) -> None:
    def program(x: Any) -> Any:
        if first:
            x.mul_(2)
        shown = AROUND[name](x)
        x.add_(1)
        return shown

    def build() -> Scene:
        x = sharded(mesh, torch.randn(3, 4))
        return Scene(program, (x.requires_grad_() * 1.5 if grad else x,))

    refused = ["lies in the memory of `args[0]`"] if name in MADE_AROUND else []
    same_as_eager_or_refused(build, refused, calls=2)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.a[1:].t_(),
        lambda x: x.t().a.add_(1),
        lambda x: x.data.a.add_(1),
        lambda x: (x[0].b.unsqueeze_(0), x.add_(1)),
    ],
)
def test_writes_of_what_is_inside_are_counted_there(program: Callable[[Any], Any]) -> None:
    """Those of sizes, and those of what is inside of views, are no writes of the wrapper."""

    def scene(make: Callable[[], torch.Tensor]) -> Scene:
        return Scene(lambda x: (program(x), None)[1], (make(),))

    for make in (two, lambda: two().requires_grad_() * 2, lambda: TwoTensor(two(), two())):
        same_as_eager(lambda make=make: scene(make), calls=2)


@pytest.mark.parametrize("view", [lambda x: x.data, lambda x: x.detach(), lambda x: x.t()])
def test_writes_of_what_is_inside_of_a_dtensor_are_counted_there(
    mesh: DeviceMesh, view: Callable[[Any], Any]
) -> None:
    def program(x: Any) -> None:
        view(x).to_local().mul_(2)

    same_as_eager(lambda: Scene(program, (sharded(mesh, torch.randn(3, 4)),)), calls=2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.view(-1)])
def test_a_written_wrapper_made_around_what_another_has_is_not_returned(
    mesh: DeviceMesh, view: Callable[[Any], Any], grad: bool
) -> None:
    """A mesh of one rank: what is whole lies in the memory of what is sharded."""

    def program(x: Any, returned: bool) -> Any:
        whole = x.redistribute(placements=[Replicate()])
        whole.add_(1)
        return (view(whole), x) if returned else (whole * 2, x)

    def build(returned: bool) -> Scene:
        x = sharded(mesh, torch.randn(3, 4))
        return Scene(program, (x.requires_grad_() * 1.5 if grad else x, returned))

    same_as_eager(lambda: build(False))
    with pytest.raises(UnsupportedProgram, match=r"lies in the memory of `args\[0\]`, which is written"):
        same_as_eager(lambda: build(True))


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[:2], lambda t: t.t_()[1:], lambda t: t.t()])
def test_a_wrapper_made_around_what_is_written_is_refused_and_so_are_views_of_it(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        made = TwoTensor(x.detach(), x.detach())
        x.mul_(2)
        return view(made)

    with pytest.raises(UnsupportedProgram, match=r"`out\[0\]` lies in the memory of `args\[0\]`"):
        aotdist.compile(program, backend="fx")(torch.randn(3, 4))


def test_what_has_no_backward_in_eager_is_named(mesh: DeviceMesh) -> None:
    x = sharded(mesh, torch.randn(4, 6)).requires_grad_()
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        x.split(2)[0].sum().backward()
    with pytest.raises(UnsupportedProgram, match="gives several DTensors.*mixed"):
        aotdist.compile(lambda x: x.split(2)[0] * 2, backend="fx")(x)


@pytest.mark.parametrize(
    "split",
    [lambda y: y.chunk(2), lambda y: y.unbind(1), lambda y: y.split(3), lambda y: (*y.chunk(2), y)],
    ids=["chunk", "unbind", "split", "beside the whole"],
)
def test_all_parts_of_a_wrapper_are_returned(mesh: DeviceMesh, split: Callable[..., Any]) -> None:
    grads: list[torch.Tensor] = []
    for call in (fn := lambda x: split(x * 2), aotdist.compile(fn, backend="fx")):
        x = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [Replicate()]).requires_grad_()
        sum(part.sin().sum() for part in call(x)).backward()  # type: ignore[attr-defined]
        grads.append(x.grad.to_local())
    assert torch.equal(*grads)


def test_a_part_that_is_returned_beside_one_that_is_used_is_refused(mesh: DeviceMesh) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (x * 2).chunk(2)
        return first, second.sin()

    x = distribute_tensor(torch.randn(4, 6), mesh, [Replicate()]).requires_grad_()
    with pytest.raises(UnsupportedProgram, match="the program returns one and computes with another"):
        aotdist.compile(program, backend="fx")(x)


def test_8_bits_in_a_dtensor(mesh: DeviceMesh) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        return cast(x, torch.tensor(0.5), E4M3) @ w.t(), w.t()

    def build() -> Scene:
        x, w = (sharded(mesh, torch.randn(16, 16)) for _ in range(2))
        return Scene(program, (x, cast(w.redistribute(placements=x.placements), torch.tensor(0.25), E4M3)))

    same_as_eager(build, calls=2)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="eager merges no dimensions of which one is sharded")
@pytest.mark.parametrize("make", [two, lambda: torch.randn(3, 4)], ids=["two", "plain"])
def test_strided_shards_that_views_make(mesh: DeviceMesh, make: Callable[[], torch.Tensor]) -> None:
    """Of these DTensor cannot put together what it has taken apart (torch 2.13)."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            flat = x.t().reshape(-1)
        return flat, x.t().reshape(-1) * 2

    same_as_eager(lambda: Scene(program, (sharded(mesh, make()).requires_grad_(),)))


def test_what_is_missing_is_named() -> None:
    class Half(TwoTensor):
        pass

    class Nothing(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Flattens(Nothing):
        def __tensor_flatten__(self) -> Any:
            return [], None

    for cls, missing in (
        (Nothing, "no `__tensor_flatten__` and no `__tensor_unflatten__`"),
        (Flattens, "no `__tensor_unflatten__`"),
    ):
        with pytest.raises(UnsupportedProgram, match=f"`args.0.` is a {cls.__name__}, which has {missing}"):
            aotdist.compile(torch.sin, backend="fx")(torch.randn(3).as_subclass(cls))


@contextmanager
def kinds_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The backwards that are compiled for gradients of kinds which were not assumed."""
    made: list[Any] = []
    kinds = derive._of_kinds
    with monkeypatch.context() as patch:
        patch.setattr(derive, "_of_kinds", lambda *args: made.append(args) or kinds(*args))
        yield made


def test_plain_gradients_of_wrappers_may_be_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(call: Any) -> list[torch.Tensor | None]:
        x = torch.randn(16, 16, requires_grad=True)
        call(x).backward(torch.randn(16, 16))
        return [x.grad]

    with kinds_compiled(monkeypatch) as made:
        assert_both_give_the_same(lambda x: sparsify(x * 2), use)
    assert not made


def test_a_rule_that_assumes_plain_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adds(TwoTensor):
        """A gradient of it is plain, or of its class."""

        @staticmethod
        def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Adds:
            return Adds(inner["a"], inner["b"])

    class Rule(WrapperRule):
        def owns(self, cls: type[torch.Tensor]) -> bool:
            return cls is Adds

        def tangent_recipe(self, recipe: Wrapper) -> Recipe:
            return Plain(recipe.size, recipe.stride, torch.float32)

    monkeypatch.setattr(protocol, "_registered", [])
    register_wrapper_rule(Rule())
    compiled = aotdist.compile(lambda x: x * 2, backend="fx")
    with kinds_compiled(monkeypatch) as made:
        for kind in (torch.ones(3), Adds(torch.ones(3), torch.ones(3)), torch.ones(3)):
            x = Adds(torch.randn(3), torch.randn(3)).requires_grad_()
            (grad,) = torch.autograd.grad(compiled(x), x, kind)
            assert type(grad) is type(kind)
    assert len(made) == 1, "for the wrapper, once"
    protocol.wrapper_rule.cache_clear()
