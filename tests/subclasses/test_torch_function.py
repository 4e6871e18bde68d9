"""Tensor classes without `__tensor_flatten__`: those that change no torch function work; others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.functions import Detached
from tests.semantics.observation import Scene, assert_both_give_the_same, same_as_eager
from tests.subclasses.function_classes import HandsOn, Image, Loaded, Methods, Silent, Weight


def of(cls: type[torch.Tensor], *size: int, grad: bool = True, **attributes: Any) -> torch.Tensor:
    tensor = torch.Tensor._make_subclass(cls, torch.randn(*size or (3, 4)), grad)
    vars(tensor).update(attributes)
    return tensor


def no_grad(fn: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return fn()


PROGRAMS: dict[str, Callable[..., Any]] = {
    "a result": lambda x, y: (x * y).sin(),
    "the input": lambda x, y: (x, x.sum()),
    "views": lambda x, y: (x.t(), x.t()[1:], (x * 2).t()),
    "several results": lambda x, y: x.split(2, 1),
    "detached": lambda x, y: (x.detach(), x.data, (x * 2).detach()),
    "as plain": lambda x, y: (x.as_subclass(torch.Tensor), (x * 2).as_subclass(torch.Tensor) * y),
    "as another": lambda x, y: (x * 2).as_subclass(type(y)) + torch.Tensor(y),
    "a parameter": lambda x, y: nn.Parameter(y * 2, requires_grad=False) + 1,
    "no grad": lambda x, y: no_grad(lambda: (x * 2, x.t())),
    "functions": lambda x, y: nn.functional.layer_norm(x, (4,)) + torch.cat([x, y]).mean(),
    "the other way round": lambda x, y: y.matmul(x.t()),
    "what it is": lambda x, y: x * 2 if isinstance(x, Silent | Loaded) and x.shape[0] == 3 else y,
    "a transform": lambda x, y: torch.func.vmap(torch.sin)(x),
    "a checkpoint": lambda x, y: checkpoint(lambda x: (x * 2).sin(), x, use_reentrant=False),
    "a function": lambda x, y: (Detached.apply(x).t(), x * 2),
    "a write": lambda x, y: (no_grad(lambda: x[0].mul_(3)), x + 1)[1],
    "by out=": lambda x, y: no_grad(lambda: torch.sin(y, out=x)),
    "into a plain one": lambda x, y: y.copy_(x),
    "filled": lambda x, y: torch.empty_like(x).copy_(x.detach()).mul_(2),
}
QUIET = (Silent, Loaded, HandsOn)


@pytest.mark.parametrize("cls", QUIET, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_classes_that_change_no_function_pass_through(name: str, cls: type[torch.Tensor]) -> None:
    def build() -> Scene:
        return Scene(PROGRAMS[name], (of(cls, _loader=None, _input_dim=1), torch.randn(3, 4)))

    same_as_eager(build, calls=2, compilations=None)


class Layer(nn.Module):
    def __init__(self, cls: type[nn.Parameter]) -> None:
        super().__init__()
        self.weight: Any = cls(torch.randn(4, 4), loader=print, input_dim=3)  # type: ignore[call-arg]
        self.weight.num_uses = 0
        self.register_buffer("shift", of(Silent, 4, grad=False))

    def forward(self, x: torch.Tensor) -> Any:
        out = nn.functional.linear(x, self.weight) * self.weight.input_dim + self.shift.doubled()
        self.weight.num_uses += 1
        return (
            out,
            self.weight.rows(2),
            isinstance(self.weight, nn.Parameter),
            isinstance(self.weight, Loaded),
        )


@pytest.mark.parametrize("cls", [Loaded, HandsOn])
def test_parameters_and_buffers(cls: type[nn.Parameter]) -> None:
    same_as_eager(lambda: Scene(Layer(cls), (torch.randn(2, 4, requires_grad=True),)), calls=2)


def test_a_layer_that_was_lazy() -> None:
    def build() -> Scene:
        layer = nn.LazyLinear(3)
        layer(x := torch.randn(2, 4))
        return Scene(layer, (x,))

    same_as_eager(build, calls=2)


def test_symbolic_sizes() -> None:
    compiled = aotdist.compile(lambda x: x.doubled() * x.shape[0], backend="fx", settings={"dynamic": True})
    for rows in (2, 3, 5):
        x = of(Silent, rows, 4)
        assert torch.equal(compiled(x), x * 2 * rows)
    assert len(compiled.artifacts) == 1


def test_double_backward() -> None:
    def use(call: Any) -> list[torch.Tensor | None]:
        x = of(Loaded)
        (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), x)]

    assert_both_give_the_same(lambda x: x.sin() * x, use)


def test_inputs_that_share_memory() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y + 1

    def build() -> Scene:
        x = of(Silent, grad=False)
        return Scene(fn, (x, x.t()))

    same_as_eager(build)


def test_branches_take_them() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cond(y.sum() > 0, lambda x: x * 2, lambda x: x.sin(), (x,))

    same_as_eager(lambda: Scene(fn, (of(Silent), torch.randn(3, 4))))


def test_the_class_selects_the_artifact() -> None:
    compiled = aotdist.compile(lambda x: x.doubled() if isinstance(x, Silent) else x * 3, backend="fx")
    for x, factor in ((of(Silent), 2), (torch.ones(3, 4), 3), (of(Silent), 2)):
        assert torch.equal(compiled(x), x.as_subclass(torch.Tensor) * factor)
    assert len(compiled.artifacts) == 2


def test_attributes_that_are_not_read_are_no_guards() -> None:
    compiled = aotdist.compile(lambda x: x * 2, backend="fx")
    for position in range(3):
        compiled(of(Silent, position=position))
    assert len(compiled.artifacts) == 1


def test_tensors_that_an_argument_holds_are_inputs() -> None:
    def fn(x: Any) -> torch.Tensor:
        x.count.add_(1)
        x.note.label = "x"
        x.last = x * x.note
        return x.last.sum()

    def scene(cls: type[torch.Tensor]) -> Scene:
        return Scene(fn, (of(cls, grad=False, count=torch.zeros(()), note=torch.randn(3, 4)),))

    for cls in (torch.Tensor, Silent):
        same_as_eager(lambda cls=cls: [scene(cls), scene(cls)], calls=2, compilations=None)


def tagged(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.words = ("a", 1)  # type: ignore[attr-defined]
    return y


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (tagged, "computes and returns has the attribute `words`, which calls would not repeat"),
        (lambda x: nn.Parameter(x * 2, requires_grad=False), "computes and returns is a Parameter"),
    ],
)
def test_attributes_of_results_are_refused(fn: Callable[..., Any], match: str) -> None:
    with pytest.raises(UnsupportedProgram, match=match):
        aotdist.compile(fn, backend="fx")(torch.randn(3))
    assert torch.equal(
        aotdist.compile(lambda x: tagged(x) + 1, backend="fx")(torch.ones(3)), torch.full((3,), 3.0)
    )


class Holder(nn.Module):
    def __init__(self, **held: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in held.items():
            setattr(self, name, tensor)

    def forward(self, x: torch.Tensor) -> Any:
        return [x + getattr(self, name) for name in ("weight", "shift") if hasattr(self, name)]


REFUSED: dict[str, tuple[Callable[..., Any], torch.Tensor, str]] = {
    "an argument": (
        lambda x: x * 2,
        of(Methods),
        r"`args\[0\]` is a Methods, and what its `__torch_function__`",
    ),
    "one with its own": (lambda x: x * 2, of(Image), r"`args\[0\]` is a Image, and what"),
    "a parameter": (Holder(weight=Weight(torch.ones(4))), torch.ones(4), "`weight` is a Weight, and what"),
    "a buffer": (Holder(shift=of(Image, 4, grad=False)), torch.ones(4), "`shift` is a Image, and what"),
    "a mask": (Holder(shift=causal_lower_right(4, 4)), torch.ones(4), "`shift` is a CausalBias, and what"),
    "a result": (lambda x: (x * 2).as_subclass(Image), torch.ones(4), "makes a tensor of the class Image"),
    "the class called": (lambda x: Methods(x), torch.ones(4), "makes a tensor of the class Methods"),
    "of sizes": (lambda x: causal_lower_right(4, 4), torch.ones(4), "makes a tensor of the class CausalBias"),
    "a parameter made": (lambda x: Loaded(x * 2), torch.ones(4), "makes a tensor of the class Loaded"),
    "without history": (lambda x: x._make_subclass(Image, x), torch.ones(4), "tensor of the class Image"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_classes_that_change_functions_are_refused_by_name(name: str) -> None:
    fn, x, match = REFUSED[name]
    with pytest.raises(UnsupportedProgram, match=match) as raised:
        aotdist.compile(fn, backend="fx")(x)
    assert all(way in str(raised.value) for way in ("`x.as_subclass(torch.Tensor)`", 'unsupported="eager"'))


def test_they_run_eagerly_where_that_is_asked_for() -> None:
    fn = aotdist.compile(lambda x: x.clone(), backend="fx", settings={"unsupported": "eager"})
    x = of(Image)
    with pytest.warns(UserWarning, match="is a Image, and what its `__torch_function__`"):
        assert type(fn(x)) is Image and torch.equal(fn(x), x)


def test_slots_are_refused() -> None:
    class Slotted(Silent):
        __slots__ = ("unit",)

    with pytest.raises(UnsupportedProgram, match=r"`args\[0\]` is a Slotted, a class that no other tensor"):
        aotdist.compile(torch.sin, backend="fx")(torch.randn(3).as_subclass(Slotted))


def test_a_wrapper_with_a_function_of_its_own() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    class Doubling(TwoTensor):
        @staticmethod
        def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
            return Doubling(inner["a"], inner["b"])

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
                return result * 2 if func is torch.Tensor.sin else result

    def build() -> Scene:
        x = Doubling(torch.randn(3, 4), torch.randn(3, 4))
        with torch._C.DisableTorchFunctionSubclass():
            return Scene(lambda x: (x.sin(), x.t()), (x.requires_grad_(),))

    same_as_eager(build, calls=2)
