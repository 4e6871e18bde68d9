"""Gradients of gradients. Equal to rounding: eager adds up in the middle what here comes from two nodes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import plain_tensors
from aotdist.trace.later_backwards import LaterBackwards
from tests.semantics.makers import leaf, two
from tests.semantics.meshes import sharded

PROGRAMS: dict[str, Callable[..., torch.Tensor]] = {
    "pointwise": lambda x, w: (x.sin() * w).exp(),
    "matmul": lambda x, w: (x @ w.t()).tanh(),
    "softmax": lambda x, w: (x @ w.t()).softmax(-1),
    "results that are saved": lambda x, w: x.relu().sigmoid() * w.exp(),
    "a detached part": lambda x, w: x * x.detach() * w,
    "under no_grad": lambda x, w: x * _squared(x) * w,
    "linear": lambda x, w: x @ w.t(),
    "a write of its own": lambda x, w: (x * 2).mul_(w).sin_(),
    "views": lambda x, w: torch.cat([x[1:] * w[:-1], x[:1]]).t().reshape(3, 4) ** 3,
    "norm": lambda x, w: F.layer_norm(x, (4,), w[0]) * x,
}


def _squared(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * x


def derivatives(fn: Callable[..., torch.Tensor], order: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, w = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found: list[torch.Tensor] = []
    y = fn(x, w)
    for _ in range(order):
        grads = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        found += grads
        y = sum(grad.sin() for grad in grads)
    y.sum().backward()
    return [*found, x.grad, w.grad]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name: str, order: int) -> None:
    compiled = aotdist.compile(PROGRAMS[name], backend="fx")
    assert_close(derivatives(compiled, order), derivatives(PROGRAMS[name], order))
    assert len(compiled.artifacts) == 1


def test_a_gradient_penalty_trains() -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 1)).double()
    models = (critic, aotdist.compile(copy.deepcopy(critic), backend="fx"))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for _ in range(4):
        batch, losses = torch.randn(6, 3, dtype=torch.float64), []
        for model, optimizer in zip(models, optimizers, strict=True):
            x = batch.clone().requires_grad_()
            y = model(x).sum()
            (grad,) = torch.autograd.grad(y, x, create_graph=True)
            losses.append((grad.norm(dim=1) - 1).square().mean() + y)
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert_close(*losses)
    assert_close(*(list(model.parameters()) for model in models))


def test_gradgradcheck() -> None:
    compiled = aotdist.compile(lambda x, w: (x.sin() @ w).tanh(), backend="fx")
    x, w = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradgradcheck(compiled, (x, w))


def test_one_output_of_several() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.exp()

    second = []
    for fn in (program, aotdist.compile(program, backend="fx")):
        x = torch.ones(3, requires_grad=True)
        (grad,) = torch.autograd.grad(fn(x)[1].sum(), x, create_graph=True)
        second += torch.autograd.grad(grad.sum(), x)
    assert torch.equal(*second)


def _grad_inside(x: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(x.view(2, 2).abs().sum(), x, create_graph=True)
    return grad * x


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.view(2, 2).abs(),
        lambda x: (x * -2).abs(),
        lambda x: F.linear(x, torch.ones(1, 4), torch.ones(1)).abs(),
        _grad_inside,
    ],
)
def test_zeros_without_memory(program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As autograd makes them for the gradient of `sgn`; their views are PyTorch's own affair."""
    second = []
    for fn in (program, aotdist.compile(program, backend="fx")):
        x = torch.tensor([1.0, -2.0, 0.0, float("inf")], requires_grad=True)
        (grad,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        second += torch.autograd.grad((grad * grad + grad * x).sum(), x)
    assert torch.equal(*(grad.view(torch.int32) for grad in second))


def test_symbolic_sizes_that_the_program_settles() -> None:
    second = []
    settings = aotdist.Settings(dynamic=True)
    for fn in (_settled, aotdist.compile(_settled, backend="fx", settings=settings)):
        x = torch.linspace(-2, 2, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        second += torch.autograd.grad(grad.sum(), x)
    assert torch.equal(*second)


def _settled(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x.view(2, 2))


class OfInput(torch.autograd.Function):
    """Saves its input; the history of what it saved goes on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x


class OfResult(torch.autograd.Function):
    """Saves its result, whose gradient is its own backward again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return grad * y * 1.5


class OfNeither(torch.autograd.Function):
    """Saves what nobody can differentiate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


class OfTwo(torch.autograd.Function):
    """Takes and returns two tensors, and is a function of its gradients that is not linear."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return first.sin() * w + second, first * x * second.cos()


def hooked(*, at_end: bool) -> Callable[..., torch.Tensor]:
    """Hooks that change gradients, and hear of those of gradients."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * w).sin()
        y.register_hook(lambda grad: grad * 3)
        z = y.exp() * x
        if at_end:
            z.register_hook(lambda grad: grad.sin())
        return z

    return program


# What is computed again beneath an operator of the graph is not told apart from what the user differentiates:
# these are differentiated as autograd itself does, by the graph that the trace left.
BY_AUTOGRAD: dict[str, Callable[..., torch.Tensor]] = {
    "a function of its input": lambda x, w: OfInput.apply(x) * w,
    "a function of its result": lambda x, w: OfResult.apply(x * w),
    "a function of neither": lambda x, w: OfNeither.apply(x) * w.sin(),
    "functions of functions": lambda x, w: OfResult.apply(OfInput.apply(x @ w.t()) * 0.1),
    "a function of two": lambda x, w: sum(OfTwo.apply(x.sin(), w)),
    "hooks": hooked(at_end=False),
    "hooks of results": hooked(at_end=True),
    "random numbers": lambda x, w: torch.bernoulli(x.sigmoid()) * x.sin() * w,
    "an input that is written": lambda x, w: ((y := x * 1.0).mul_(w), OfResult.apply(y))[1],
    "a view by a function": lambda x, w: OfInput.apply(x)[1:] * w[1:],
}


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", BY_AUTOGRAD)
def test_by_way_of_autograd_itself(name: str, order: int, partition: str) -> None:
    settings = aotdist.Settings(partition=partition)
    compiled = aotdist.compile(BY_AUTOGRAD[name], backend="fx", settings=settings)
    for _ in range(2):
        assert_close(derivatives(compiled, order), derivatives(BY_AUTOGRAD[name], order))
    assert len(compiled.artifacts) == 1


def test_by_way_of_autograd_and_a_compiler_that_fuses() -> None:
    program = BY_AUTOGRAD["a function of its result"]
    compiled = aotdist.compile(program, backend="inductor")
    assert_close(derivatives(compiled, 1), derivatives(program, 1))


def penalised(call: Callable[..., Any], model: nn.Module) -> list[torch.Tensor]:
    """The gradients of a penalty on gradients."""
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6).requires_grad_()
    grads = torch.autograd.grad(call(x).square().sum(), (x, *model.parameters()), create_graph=True)
    sum((grad * grad).sum() for grad in grads).backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def test_a_checkpoint_that_computes_a_function_again() -> None:
    """It meets the module's parameters when the gradients are traced, long after the module was."""
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 6).double()

        def program(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return checkpoint(lambda x: OfResult.apply(model(x)).sin(), x, use_reentrant=False)

        found.append(penalised(aotdist.compile(program, backend="fx") if compiles else program, model))
    assert_close(*found)


def test_a_module_with_buffers_that_are_written() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(OfInput.apply(self.norm(x)))

    model = Model().double()
    copied = copy.deepcopy(model)
    assert_close(penalised(aotdist.compile(model, backend="fx"), model), penalised(copied, copied))
    assert_close(dict(model.named_buffers()), dict(copied.named_buffers()))


def test_collectives(mesh: DeviceMesh) -> None:
    def second(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        w = sharded(mesh, torch.randn(6, 6, dtype=torch.float64)).requires_grad_()
        grads = torch.autograd.grad(call(x, w).square().sum(), (x, w), create_graph=True)
        (grads[0].square().sum() + grads[1].full_tensor().square().sum()).backward()
        return [x.grad, w.grad.full_tensor()]

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.sin().full_tensor()

    assert_close(second(aotdist.compile(program, backend="fx")), second(program))


def test_each_derivative_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    trace = LaterBackwards.differentiable
    monkeypatch.setattr(
        LaterBackwards, "differentiable", lambda *args, **kw: (traced.append(args), trace(*args, **kw))[1]
    )
    compiled = aotdist.compile(OfResult.apply, backend="fx")
    for _ in range(3):
        x = torch.ones(3, requires_grad=True)
        (grad,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        grad.sum().backward()
    assert len(traced) == 1


def test_a_function_whose_input_is_written_after_the_forward() -> None:
    """Nothing needs its old value: eager saved the result."""
    second = []
    for fn in (OfResult.apply, aotdist.compile(OfResult.apply, backend="fx")):
        x = torch.ones(3, requires_grad=True)
        y = fn(x)
        with torch.no_grad():
            x.mul_(2)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        second.append(torch.autograd.grad(grad.sum(), x))
    assert_close(*second)


def test_a_gradient_without_history() -> None:
    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(grad)

    for fn in (Constant.apply, aotdist.compile(Constant.apply, backend="fx")):
        x = torch.ones(3, requires_grad=True)
        (grad,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        assert not grad.requires_grad
        assert torch.equal(grad, torch.ones(3))


@pytest.mark.parametrize("compiles", [False, True])
def test_a_backward_without_a_gradient_fails_when_it_is_asked_for_one(compiles: bool) -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2 * ctx.saved_tensors[0]

    x = torch.ones(3, requires_grad=True)
    y = aotdist.compile(Once.apply, backend="fx")(x) if compiles else Once.apply(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert grad.requires_grad
    assert torch.equal(grad, torch.full((3,), 4.0))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_wrappers_that_meet_plain_tensors() -> None:
    def second(fn: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, w = two(3).requires_grad_(), leaf(3)
        grads = torch.autograd.grad(fn(x, w).sum(), (x, w), create_graph=True)
        again = torch.autograd.grad(sum((grad * grad).sum() for grad in grads), (x, w))
        return [part for grad in (*grads, *again) for part in (grad.a, grad.b)]

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.sin() * w

    assert_close(second(aotdist.compile(program, backend="fx")), second(program))


AT_A_RESULT: dict[str, Callable[..., Any]] = {
    "another function": lambda x: ((y := OfResult.apply(x)), y * x)[1:] + (y,),
    "a write": lambda x: ((h := x * 1).mul_(2), (y := h.cos()), y * x)[2:] + (y,),
}


@pytest.mark.parametrize("name", AT_A_RESULT)
def test_gradients_at_a_result_that_others_pass(name: str) -> None:
    fn, found = AT_A_RESULT[name], []
    for call in (fn, aotdist.compile(lambda x: fn(x), backend="fx")):
        leaf = torch.linspace(-1, 1, 3, requires_grad=True)
        x = leaf * 1.0
        first, second = call(x)
        grads = torch.autograd.grad(first.sin().sum(), (second, leaf), create_graph=True)
        found.append((*grads, *torch.autograd.grad(sum((grad * grad).sum() for grad in grads), leaf)))
    assert_close(*found)


def test_an_input_whose_history_is_another_by_then() -> None:
    compiled = aotdist.compile(lambda x: (x.mul_(2), x.cos())[1], backend="fx")
    leaf = torch.ones(3, requires_grad=True)
    y = compiled(leaf * 1.0).sum()
    assert torch.equal(*torch.autograd.grad(y, leaf, retain_graph=True), -2 * (2 * torch.ones(3)).sin())
    with pytest.raises(UnsupportedProgram, match="old history is needed"):
        torch.autograd.grad(y, leaf, create_graph=True)


RANDOM: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x, w: F.dropout(x.sin() * w, 0.5) ** 2,
    "two dropouts": lambda x, w: F.dropout(F.dropout(x * w, 0.3).exp(), 0.5) * x,
    "rand_like": lambda x, w: (x * torch.rand_like(x) * w).sin(),
    "dropout in a checkpoint": lambda x, w: checkpoint(
        lambda x: F.dropout(x.sin(), 0.5) * w * x, x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_drawn_once(name: str, order: int) -> None:
    compiled = aotdist.compile(RANDOM[name], backend="fx")
    assert_close(derivatives(compiled, order), derivatives(RANDOM[name], order))
    expected = torch.get_rng_state()
    derivatives(RANDOM[name], order)
    assert torch.equal(torch.get_rng_state(), expected)


def of_wrappers(fn: Callable[..., torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    torch.manual_seed(0)
    x, w = (make(torch.randn(3, 4, dtype=torch.float64)).requires_grad_() for _ in range(2))
    y = fn(x, w)
    grads = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
    again = torch.autograd.grad(grads[0].sin().sum() + grads[1].exp().sum(), (x, w))
    return [plain for grad in (*grads, *again) for plain in plain_tensors(grad)]


OF_WRAPPERS = ("pointwise", "results that are saved", "a detached part", "a write of its own")


@pytest.mark.parametrize("name", OF_WRAPPERS)
def test_wrappers(name: str) -> None:
    def two(plain: torch.Tensor) -> torch.Tensor:
        return TwoTensor(plain, plain.cos())

    compiled = aotdist.compile(PROGRAMS[name], backend="fx")
    assert_close(of_wrappers(compiled, two), of_wrappers(PROGRAMS[name], two))


@pytest.mark.parametrize("name", OF_WRAPPERS)
def test_dtensors(name: str, mesh: DeviceMesh) -> None:
    compiled = aotdist.compile(PROGRAMS[name], backend="fx")
    eager = of_wrappers(PROGRAMS[name], lambda plain: sharded(mesh, plain))
    assert_close(of_wrappers(compiled, lambda plain: sharded(mesh, plain)), eager)


class LastOf(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][:, -1]


def _image(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.Flatten(), nn.LazyLinear(1))


def _vector(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 1))


CRITICS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{
        layer.__name__: (lambda layer=layer: _vector(layer()), (4, 8))
        for layer in (nn.SiLU, nn.Mish, nn.GELU, nn.Softplus, nn.ELU, nn.Tanh, nn.Dropout)
    },
    "LayerNorm": (lambda: _vector(nn.LayerNorm(16)), (4, 8)),
    "RMSNorm": (lambda: _vector(nn.RMSNorm(16)), (4, 8)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 1)), (4, 8)),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 1)), (4, 8)),
    "GroupNorm": (lambda: _image(nn.GroupNorm(2, 8), nn.ReLU()), (4, 3, 6, 6)),
    "InstanceNorm2d": (lambda: _image(nn.InstanceNorm2d(8, affine=True)), (4, 3, 6, 6)),
    "BatchNorm2d": (lambda: _image(nn.BatchNorm2d(8), nn.LeakyReLU()), (4, 3, 6, 6)),
    "pooling": (lambda: _image(nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")), (4, 3, 6, 6)),
    "LSTM": (lambda: nn.Sequential(LastOf(nn.LSTM(8, 16, batch_first=True)), nn.Linear(16, 1)), (4, 5, 8)),
    "GRU": (lambda: nn.Sequential(LastOf(nn.GRU(8, 16, batch_first=True)), nn.Linear(16, 1)), (4, 5, 8)),
}


@pytest.mark.parametrize("name", CRITICS)
def test_gradient_penalties_are_eagers_bits(name: str) -> None:
    make, size = CRITICS[name]
    found: list[list[torch.Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(1)
        x, critic = torch.randn(size, requires_grad=True), make()
        critic(x.detach())  # lazy layers, running statistics
        if compiled:
            aotdist.compile(critic, backend="fx")
        torch.manual_seed(2)
        (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        (grad.flatten(1).norm(dim=1) - 1).square().mean().backward()
        got = [grad, x.grad, *(param.grad for param in critic.parameters())]
        found.append([torch.zeros(()) if one is None else one.detach() for one in got])
    assert all(map(torch.equal, *found))


class WithFeatures(nn.Module):
    """A critic that returns what its last layer is given, too."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        *layers, self.last = critic.children()
        self.body = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(x)
        return features, self.last(features)


@pytest.mark.parametrize("name", ["SiLU", "GELU", "LayerNorm", "InstanceNorm2d", "pooling", "LSTM"])
def test_penalties_of_one_of_two_results_are_eagers_bits(name: str) -> None:
    """The other passes its gradient, and nobody looks: chosen are an input that is a leaf, and parameters."""
    make, size = CRITICS[name]
    found: list[list[torch.Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(1)
        x, critic = torch.randn(size, requires_grad=True), WithFeatures(make())
        critic(x.detach())  # lazy layers, running statistics
        if compiled:
            aotdist.compile(critic, backend="fx")
        first = next(critic.parameters())
        grads = torch.autograd.grad(critic(x)[1].sum(), (x, first), create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()  # type: ignore[union-attr]
        got = [*grads, x.grad, *(param.grad for param in critic.parameters())]
        found.append([torch.zeros(()) if one is None else one.detach() for one in got])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_gradient_that_depends_on_nothing_may_arrive_or_not(all_of_them: bool) -> None:
    """That of the last layer's bias: the sum of gradients that are constant."""
    found: list[list[torch.Tensor | None]] = []
    for compiled in (False, True):
        torch.manual_seed(1)
        x, norm = torch.randn(4, 8, requires_grad=True), nn.LayerNorm(8)
        out = (aotdist.compile(norm, backend="fx") if compiled else norm)(x)
        inputs = (x, *norm.parameters()) if all_of_them else (x,)
        grads = torch.autograd.grad(out, inputs, torch.ones(4, 8), create_graph=True)
        assert all(grad.requires_grad for grad in grads)
        (out.sin().sum() + sum(grad.sin().sum() for grad in grads)).backward()
        found.append([*map(torch.Tensor.detach, grads), x.grad, *(param.grad for param in norm.parameters())])
    for expected, got in zip(*found, strict=True):
        assert expected is not None and got is not None and torch.equal(got, expected)


def _normed(x: torch.Tensor) -> torch.Tensor:
    norm = x.norm().clone()
    with torch.no_grad():
        norm.clamp_min_(1e-8)
    return x / norm


def _assigned(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4, 3, dtype=x.dtype)
    y[1:] = x
    return y.sin()


OTHERWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "det": torch.linalg.det,
    "logdet": torch.logdet,
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "solve": lambda x: torch.linalg.solve(x, torch.ones(3, dtype=x.dtype)),
    "rfft": lambda x: torch.fft.rfft(x).abs(),
    "a write under no_grad": _normed,
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.roll(1, 0)),
    "an assigned slice": _assigned,
    "fill_diagonal_": lambda x: (x * 2).fill_diagonal_(1).sin(),
    "circular padding": lambda x: F.pad(x[None], (1, 1), mode="circular").sin(),
}
"""Where autograd computes other gradients under `create_graph=True`, or what was recorded has none."""


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_has_another_backward_under_create_graph(name: str) -> None:
    fn = OTHERWISE[name]
    found = []
    for call in (fn, aotdist.compile(lambda x: fn(x), backend="fx")):
        torch.manual_seed(0)
        x = (torch.randn(3, 3, dtype=torch.float64) + 4 * torch.eye(3)).requires_grad_()
        (grad,) = torch.autograd.grad(call(x).sin().sum(), x, create_graph=True)
        found.append((grad.detach(), *torch.autograd.grad(grad.square().sum(), x)))
    assert_close(*found)


def _written_without_history(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with torch.no_grad():
        y[0].mul_(w[0])
    return y * y * w


def _written_as_data(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.data[1:].mul_(3)
    return y * y * w


def _given_other_data(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.data = w.detach().sin()
    return y * y * w


def _detached_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * 2).detach_() * x * w


def _reshaped_without_history(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with torch.no_grad():
        y.unsqueeze_(0)
    return (y * y)[0] * w


def _hooked_node(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: tuple(grad.detach() * y for grad in grads))
    return y * y * w


def _in_checkpoint(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, w: checkpoint(fn, x, w, use_reentrant=False)


BEHIND_AUTOGRAD: dict[str, Callable[..., torch.Tensor]] = {
    "a write under no_grad": _written_without_history,
    "a write of data": _written_as_data,
    "other data": _given_other_data,
    "detached in place": _detached_in_place,
    "reshaped under no_grad": _reshaped_without_history,
    "a function of PyTorch that writes": lambda x, w: F.cosine_similarity(x, w)[:, None] * x,
    "a hook of a node": _hooked_node,
    "a write in a checkpoint": _in_checkpoint(_written_without_history),
    "no_grad in a checkpoint": _in_checkpoint(lambda x, w: x * _squared(x) * w),
}
"""What the recorded graph does not show, and autograd's own does."""


def _assigned_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[1:] = x[1:] * w[1:]
    return y.sin() * x


def _written_through_strides(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x * x).t()
    y.as_strided((3,), (2,), 1).mul_(w[0, :3])
    return (y * y).t() * x


def _looked_at(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * x
    row = y[0]
    y.mul_(w)
    with torch.no_grad():
        row.sum()  # the first to read it since
    return row * row * x


def _averaged(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    mean = torch.zeros(4, dtype=x.dtype)
    with torch.no_grad():
        mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return (x - mean) ** 2 * w


def _of_a_leaf_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    inner = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad((inner**3 * w).sum(), inner, create_graph=True)
    return grad * x * w


WITHIN_AUTOGRAD: dict[str, Callable[..., torch.Tensor]] = {
    "a value under no_grad": PROGRAMS["under no_grad"],
    "a view under no_grad": lambda x, w: (torch.no_grad()(torch.t)(x) ** 2).sum() * x * w,
    "detached": PROGRAMS["a detached part"],
    "detached in a checkpoint": _in_checkpoint(lambda x, w: (x * 2).detach() * x * w + x.detach().exp() * w),
    "a checkpoint": _in_checkpoint(lambda x, w: F.gelu(x * w) * x),
    "a write": PROGRAMS["a write of its own"],
    "assigned rows": _assigned_rows,
    "a diagonal": lambda x, w: (x @ w.t()).fill_diagonal_(1).sin() @ x,
    "a write through strides": _written_through_strides,
    "a written view that no_grad reads": _looked_at,
    "an average under no_grad": _averaged,
    "a leaf inside": _of_a_leaf_inside,
    "an update of data": lambda x, w: (x * 2 - (x * w).detach()) ** 2 * w,
}
DYNAMIC = aotdist.Settings(dynamic=True)


def _second(call: Callable[..., Any], *, watched: bool) -> list[torch.Tensor]:
    """Gradients and their gradients; if `watched`, of a program whose first result the others pass."""
    torch.manual_seed(0)
    x, w = leaves = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    result = call(x * 1, w * 1)
    if watched:
        result[0].retain_grad()
    loss = (result[1] if watched else result).sin().sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    again = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)
    return [grad.detach() for grad in (*grads, *again)]


def _after_a_result(fn: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return lambda x, w: (first := x.sin(), fn(first + x, w))


def _in_both_ways(fn: Callable[..., torch.Tensor]) -> list[tuple[Callable[..., Any], aotdist.Settings, bool]]:
    return [(_after_a_result(fn), aotdist.Settings(), True), (lambda x, w: fn(x, w), DYNAMIC, False)]


@pytest.mark.parametrize("name", BEHIND_AUTOGRAD | WITHIN_AUTOGRAD)
def test_past_a_result_that_is_watched_and_of_any_sizes(name: str) -> None:
    fn = (BEHIND_AUTOGRAD | WITHIN_AUTOGRAD)[name]
    compiled = aotdist.compile(lambda x, w: fn(x, w), backend="fx")
    assert_close(_second(compiled, watched=False), _second(fn, watched=False))
    for program, settings, watched in _in_both_ways(fn):
        if name == "other data" and not watched:
            continue  # the program settles its sizes
        compiled = aotdist.compile(program, backend="fx", settings=settings)
        assert_close(_second(compiled, watched=watched), _second(program, watched=watched))
