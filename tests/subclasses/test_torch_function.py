"""Tensor classes with a `__torch_function__` and nothing else: eager and compiled cannot be told apart."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.functions import Detached
from tests.semantics.observation import Scene, assert_both_give_the_same, same_as_eager
from tests.subclasses.function_classes import (
    Greedy,
    Logging,
    Methods,
    Shy,
    Silent,
    Traveller,
    Unit,
    Weight,
    WithScale,
)


def of(cls: type[torch.Tensor], *size: int, grad: bool = True, **attributes: Any) -> torch.Tensor:
    tensor = torch.Tensor._make_subclass(cls, torch.randn(*size or (3, 4)), grad)
    vars(tensor).update(attributes)
    return tensor


CLASSES = (Methods, Silent, Logging, Traveller, Shy, Greedy)

PROGRAMS: dict[str, Callable[..., Any]] = {
    "a result": lambda x, y: (x * y).sin(),
    "the input": lambda x, y: (x, x.sum()),
    "a view": lambda x, y: x.t(),
    "views of views": lambda x, y: (x.t()[1:], x.view(-1)),
    "a view of a result": lambda x, y: (x * 2).t(),
    "a result and its view": lambda x, y: ((z := x * 2), z[0]),
    "several results": lambda x, y: x.split(2, 1),
    "of the second argument": lambda x, y: (y * x, y + 1),
    "detached": lambda x, y: (x.detach(), (x * 2).detach()),
    "its data": lambda x, y: (x.data, (x * 2).data),
    "as plain": lambda x, y: (x.as_subclass(torch.Tensor), (x * 2).as_subclass(torch.Tensor) * y),
    "of another class": lambda x, y: y.as_subclass(Greedy) * 2,
    "plain made its own": lambda x, y: (y * 2).as_subclass(type(x)),
    "the class itself": lambda x, y: type(x)(y * 2),
    "without history": lambda x, y: torch.Tensor._make_subclass(type(x), y * 2),
    "its class": lambda x, y: (x * 2) if type(x) is type(x.as_subclass(type(x))) else x,
    "no grad": lambda x, y: no_grad(lambda: (x * 2, x.t())),
    "functions": lambda x, y: nn.functional.layer_norm(x, (4,)) + torch.cat([x, y]).mean(),
    "the other way round": lambda x, y: y.matmul(x.t()),
    "metadata": lambda x, y: x * x.shape[0] if x.is_floating_point() else x,
    "a class assigned": lambda x, y: assigned(y * 2, type(x)),
    "views of a function's detached": lambda x, y: ((d := Detached.apply(x)).t(), d.t(), d[0]),
}


def no_grad(fn: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return fn()


def assigned(tensor: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
    tensor.__class__ = cls
    return tensor


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, cls: type[torch.Tensor]) -> None:
    same_as_eager(lambda: Scene(PROGRAMS[name], (of(cls), torch.randn(3, 4))), calls=2)


WRITES: dict[str, Callable[..., Any]] = {
    "data": lambda x, y: x.detach().mul_(2),
    "a result": lambda x, y: (x * 2).add_(y),
    "in place": lambda x, y: no_grad(lambda: x.add_(y)),
    "a part": lambda x, y: (no_grad(lambda: x[0].mul_(3)), x + 1)[1],
    "by out=": lambda x, y: no_grad(lambda: torch.sin(y, out=x)),
    "into a plain one": lambda x, y: y.copy_(x),
    "metadata": lambda x, y: no_grad(lambda: x.t_()),
    "a result's metadata": lambda x, y: (x * 2).t_(),
}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str, cls: type[torch.Tensor]) -> None:
    same_as_eager(lambda: Scene(WRITES[name], (of(cls), torch.randn(3, 4))), compilations=None)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_writes_with_history(cls: type[torch.Tensor]) -> None:
    def build() -> Scene:
        leaf = torch.randn(3, 4, requires_grad=True)
        x = (leaf * 2).as_subclass(cls)
        return Scene(lambda x, y: x.mul_(y) if True else x, (x, torch.randn(3, 4)), held={"leaf": leaf})

    same_as_eager(build)


def test_units() -> None:
    def area(a: Unit, b: Unit) -> Unit:
        return (a + a) * b

    found = same_as_eager(lambda: Scene(area, (of(Unit, unit="m"), of(Unit, unit="s"))))
    a, b = of(Unit, unit="m"), of(Unit, unit="m")
    assert found(a, b).unit == "m*m", "other units, another artifact"
    assert len(found.artifacts) == 2
    assert found(b, of(Unit, unit="s")).unit == "m*s"
    assert len(found.artifacts) == 2


def test_what_the_class_raises_is_raised() -> None:
    compiled = aotdist.compile(lambda a, b: a + b, backend="fx")
    with pytest.raises(ValueError, match="cannot be added"):
        compiled(of(Unit, unit="m"), of(Unit, unit="s"))


def test_the_class_selects_the_artifact() -> None:
    compiled = aotdist.compile(lambda x: x * 2, backend="fx")
    for x in (of(Methods), of(Logging), torch.randn(3, 4), of(Methods)):
        assert type(compiled(x)) is type(x)
    assert len(compiled.artifacts) == 3


def test_attributes_that_are_not_read_are_no_guards() -> None:
    compiled = aotdist.compile(lambda x: x * 2, backend="fx")
    for position in range(3):
        compiled(of(Methods, position=position))
    assert len(compiled.artifacts) == 1


def test_a_tensor_held_by_an_argument_is_an_input() -> None:
    def build() -> list[Scene]:
        def fn(x: WithScale, y: torch.Tensor) -> Any:
            return x * y, y.matmul(x.t())

        def scene(scale: torch.Tensor) -> Scene:
            return Scene(fn, (WithScale(torch.randn(3, 4, requires_grad=True), scale), torch.randn(3, 4)))

        return [scene(torch.tensor(k, requires_grad=True)) for k in (2.0, 3.0)]

    same_as_eager(build, calls=2)


def test_a_tensor_that_an_argument_holds_is_written() -> None:
    def fn(x: Methods) -> torch.Tensor:
        x.count.add_(1)  # type: ignore[attr-defined]
        x.last = x * 2  # type: ignore[attr-defined]
        x.label = "seen"  # type: ignore[attr-defined]
        return x.last.sum()  # type: ignore[attr-defined]

    def build() -> Scene:
        return Scene(fn, (of(Methods, grad=False, count=torch.zeros(())),))

    same_as_eager(build, calls=3, compilations=None)


@pytest.mark.parametrize("value", ["x", [1]], ids=str)
def test_what_is_assigned_to_a_tensor_that_an_argument_holds(value: Any) -> None:
    """It hangs on that of every call."""

    def program(x: Any) -> torch.Tensor:
        x.note.label = value
        return x * x.note

    def scene() -> Scene:
        return Scene(program, (of(Traveller, note=torch.ones(3, 4)),))

    same_as_eager(lambda: [scene(), scene()])


def test_attributes_of_results() -> None:
    def fn(x: Traveller, y: torch.Tensor) -> Any:
        z = x * 2
        z.parent, z.many, z.words = x, [y * 2, {"y": y}], ("a", 1)  # type: ignore[attr-defined]
        w = z + 1
        return z, w, w.many  # type: ignore[attr-defined]

    def build() -> Scene:
        return Scene(fn, (of(Traveller, tag="left"), torch.randn(3, 4, requires_grad=True)))

    same_as_eager(build, calls=2)


def test_an_attribute_of_a_result_that_hides_tensors_is_refused() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.parts = SimpleNamespace(parts=[SimpleNamespace(value=x + 1)])  # type: ignore[attr-defined]
        return y

    with pytest.raises(UnsupportedProgram, match="attribute `parts` of a Tensor is a SimpleNamespace that"):
        aotdist.compile(fn, backend="fx")(torch.randn(3))


def test_an_object_that_an_argument_holds_is_the_results_too() -> None:
    compiled = aotdist.compile(lambda x: x * 2, backend="fx")
    for _ in range(2):
        x = of(Traveller, grad=False, labels={"a": 1}, more=[1, 2])
        y = compiled(x)
        assert y.labels is x.labels and y.more is x.more
    assert len(compiled.artifacts) == 1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Weight(torch.randn(4, 4))
        self.unit = nn.Parameter(of(Unit, 4, grad=False, unit="kg"))
        self.register_buffer("shift", of(Methods, 4, grad=False))

    def forward(self, x: torch.Tensor) -> Any:
        out = nn.functional.linear(x, self.weight) + self.shift.doubled()
        return out, self.unit * 2, isinstance(self.weight, nn.Parameter), isinstance(self.unit, nn.Parameter)


def test_parameters_and_buffers() -> None:
    same_as_eager(lambda: Scene(Layer(), (torch.randn(2, 4, requires_grad=True),)), calls=2)


def test_closed_over() -> None:
    def build() -> Scene:
        w = of(Unit, unit="m")
        return Scene(lambda x: (x * w, w.t()), (torch.randn(3, 4),), held={"w": w})

    same_as_eager(build, calls=2)


def test_classes_that_leave_it_to_the_other() -> None:
    same_as_eager(lambda: Scene(lambda a, b: a * b, (of(Shy), of(Greedy))))
    same_as_eager(lambda: Scene(lambda a, b: a * b, (of(Greedy), of(Shy))))


def test_none_has_an_answer() -> None:
    class Other(Shy):
        pass

    compiled = aotdist.compile(lambda a, b: a * b, backend="fx")
    with pytest.raises(TypeError):
        compiled(of(Shy), of(Other))


def test_a_class_is_asked_as_often_as_in_eager() -> None:
    """While capturing only; what it counts then is counted at every call."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.softmax(x.view(-1) * x.shape[0], 0)

    x = of(Logging, grad=False)
    Logging.heard = {}
    fn(x)
    eager, Logging.heard = Logging.heard, {}
    compiled = aotdist.compile(fn, backend="fx")
    for calls in (1, 2, 3):
        compiled(x)
        assert Logging.heard == {name: calls * count for name, count in eager.items()}


class Cubed(torch.autograd.Function):
    """What it hears of inside shows in the numbers: `Weight` and `WithScale` would be multiplied."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * x * 3


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_autograd_functions(cls: type[torch.Tensor]) -> None:
    same_as_eager(lambda: Scene(lambda x: Cubed.apply(x), (of(cls),)))
    same_as_eager(lambda: Scene(lambda x: Cubed.apply(x) * 2, (of(cls),)))


def test_autograd_functions_with_attributes() -> None:
    def build() -> Scene:
        return Scene(
            lambda x: Cubed.apply(x), (WithScale(torch.randn(3, requires_grad=True), torch.tensor(2.0)),)
        )

    same_as_eager(build)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_double_backward(cls: type[torch.Tensor]) -> None:
    def use(call: Any) -> list[torch.Tensor | None]:
        x = of(cls)
        with torch._C.DisableTorchFunctionSubclass():
            (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
            return [first, *torch.autograd.grad(first.square().sum(), x)]

    assert_both_give_the_same(lambda x: x.sin() * x, use)
    assert_both_give_the_same(lambda x: Cubed.apply(x), use)


def test_hooks() -> None:
    def use(call: Any) -> list[torch.Tensor | None]:
        x, seen = of(Logging), []
        y, z = call(x)
        x.register_hook(lambda grad: seen.append(grad * 2))
        y.register_hook(lambda grad: seen.append(grad * 3))
        (y.sum() + z.sum()).backward()
        assert type(x.grad) is torch.Tensor
        return [x.grad, *seen]

    assert_both_give_the_same(lambda x: ((y := x * 2), y * y), use)


def test_hooks_inside() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad * 3)
        return y * y

    same_as_eager(lambda: Scene(fn, (of(Logging),)))


def test_gradients_of_the_class() -> None:
    def use(call: Any) -> list[torch.Tensor | None]:
        x = of(Logging)
        y = call(x, torch.ones(3, 4))
        y.backward(of(Logging, grad=False))
        return [x.grad]

    assert_both_give_the_same(lambda x, y: x * y, use)
    assert_both_give_the_same(lambda x, y: (x * y).as_subclass(torch.Tensor), use)


def test_plain_results_get_gradients_of_the_class() -> None:
    def use(call: Any) -> list[torch.Tensor | None]:
        x = torch.randn(3, 4, requires_grad=True)
        y = call(x)
        y.backward(WithScale(torch.randn(3, 4), torch.tensor(5.0)))
        return [x.grad]

    assert_both_give_the_same(lambda x: x.sin(), use)


def test_checkpoints() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: (x * 2).sin(), x, use_reentrant=False)

    same_as_eager(lambda: Scene(fn, (of(Traveller, tag="a"),)))


def test_checkpoints_beside_the_argument() -> None:
    """The backward begins at the plain result: what is computed again hears of the class."""

    def fn(x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(lambda x: x.sin() * x, x, use_reentrant=False), x

    def build() -> Scene:
        return Scene(fn, (WithScale(torch.randn(3, 4, requires_grad=True), torch.tensor(2.0)),))

    same_as_eager(build)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_result_that_lies_transposed_is_written(cls: type[torch.Tensor]) -> None:
    same_as_eager(lambda: Scene(lambda x: (x.t() * 2).zero_(), (of(cls),)))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("make", [torch.empty_like, torch.zeros_like, lambda x: x.new_zeros(3, 4)])
def test_what_is_made_to_be_filled_is_written(cls: type[torch.Tensor], make: Callable[[Any], Any]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        made = make(x)
        return made.copy_(x.detach()).mul_(2)

    same_as_eager(lambda: Scene(fn, (of(cls),)))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_leaves_that_the_program_makes(cls: type[torch.Tensor]) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        own, of_result = WithScale(x, y.sum()), WithScale(Cubed.apply(x), y.sum())
        return no_grad(lambda: own.tensor_split(2)), of_result

    same_as_eager(lambda: Scene(fn, (of(cls), torch.randn(3, 4, requires_grad=True))))


def test_inside_of_a_transform() -> None:
    same_as_eager(lambda: Scene(lambda x: torch.func.vmap(torch.sin)(x), (of(Methods),)))


def test_inputs_that_share_memory() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y + 1

    def build() -> Scene:
        x = of(Methods, grad=False)
        return Scene(fn, (x, x.t()))

    same_as_eager(build)


def test_inputs_that_share_memory_with_history() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y * y

    def build() -> Scene:
        leaf = torch.randn(3, 4, requires_grad=True)
        base = (leaf * 1).as_subclass(Methods)
        return Scene(fn, (base, base[0]), held={"leaf": leaf})

    same_as_eager(build)


def test_inference_mode() -> None:
    same_as_eager(
        lambda: Scene(lambda x: (x * 2, x.t()), (of(Methods),)), around=torch.inference_mode, backward=False
    )


def test_symbolic_sizes() -> None:
    compiled = aotdist.compile(lambda x: x * x.shape[0], backend="fx", settings={"dynamic": True})
    for rows in (2, 3, 5):
        x = of(Traveller, rows, 4, tag="t")
        y = compiled(x)
        assert torch.equal(y, x * rows) and type(y) is Traveller and y.tag == "t"
    assert len(compiled.artifacts) == 1


def test_inductor() -> None:
    def build() -> Scene:
        return Scene(lambda x: x * 2 + 1, (of(Traveller, grad=False, tag="a"),))

    same_as_eager(build, backend="inductor")


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


def test_slots_are_refused() -> None:
    class Slotted(torch.Tensor):
        __slots__ = ("unit",)

    with pytest.raises(UnsupportedProgram, match="class Slotted, which no other tensor can be given"):
        aotdist.compile(torch.sin, backend="fx")(torch.randn(3).as_subclass(Slotted))


def test_branches_that_take_them_are_refused() -> None:
    def fn(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return torch.cond(p, lambda x: x * 2, lambda x: x.sin(), (x,))

    with pytest.raises(UnsupportedProgram, match="a Methods is handed to an operator that takes functions"):
        aotdist.compile(fn, backend="fx")(of(Methods, grad=False), torch.tensor(True))


def test_branches_beside_them() -> None:
    def fn(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        y = torch.cond(p, lambda x: x * 2, lambda x: x.sin(), (x.as_subclass(torch.Tensor),))
        return x * y if type(y) is torch.Tensor else x

    for p in (True, False):
        same_as_eager(lambda p=p: Scene(fn, (of(Methods, grad=False), torch.tensor(p))))
