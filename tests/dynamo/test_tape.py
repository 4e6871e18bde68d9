"""`compile_backward`: gradients as eager has them, whatever the tape goes through; one compilation a tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import aotdist
from tests.dynamo.comparison import compiled

FX = {"backend": "fx"}

pytestmark = pytest.mark.filterwarnings("ignore")


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * 2


class Net(nn.Module):
    def __init__(self, inside: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.inside = inside

    def forward(self, x):
        x = F.dropout(F.gelu(self.norm(self.up(x))), 0.2)
        return self.down(self.inside(x)).square().mean()


def clamped(x):
    y = x * 1
    y.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return y


def halved(param: torch.Tensor) -> None:
    param.grad.mul_(0.5)


def hooked() -> Net:
    net = Net(lambda x: clamped(Squared.apply(x)))
    net.up.weight.register_hook(lambda grad: grad * 3)
    net.down.weight.register_post_accumulate_grad_hook(halved)
    return net


def checkpointed() -> Net:
    return Net(lambda x: checkpoint(torch.sin, x, use_reentrant=False))


FORWARDS: dict[str, Callable[[Net], Any]] = {
    "eager": lambda net: net,
    "aotdist.compile": lambda net: aotdist.compile(net, **FX),
    "torch.compile": compiled,
}


def same_gradients(make: Callable[[], Net], wrap: Callable[[Net], Any], *, around_forward: bool) -> None:
    """Three backwards that add up, then one from the beginning."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(make())
    eager, ours = nets
    call = wrap(ours)
    for step in range(4):
        if step == 3:
            eager.zero_grad()
            ours.zero_grad()
        torch.manual_seed(step)
        eager(torch.randn(6, 4)).backward()
        torch.manual_seed(step)
        x = torch.randn(6, 4)
        if around_forward:
            with aotdist.compile_backward(**FX):
                call(x).backward()
        else:
            loss = call(x)
            with aotdist.compile_backward(**FX):
                loss.backward()
        for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), (step, name)


@pytest.mark.parametrize(
    ("make", "num_regions"),
    [(Net, 1), (hooked, 1), pytest.param(checkpointed, 2, marks=pytest.mark.sweep)],
    ids=["operators", "hooks and an autograd.Function", "a checkpoint"],
)
def test_gradients(make: Callable[[], Net], num_regions: int, made):
    same_gradients(make, FORWARDS["eager"], around_forward=False)
    # One tape where there are no gradients yet, another where there are; a checkpoint breaks each in two.
    assert [len(region.artifacts) for region in made()] == [1] * (2 * num_regions)
    assert made()[0].name.startswith("backward [!0")


@pytest.mark.parametrize(
    ("name", "around_forward"),
    [("aotdist.compile", False), ("torch.compile", True)],
    ids=lambda value: str(value),
)
def test_backwards_of_compiled_programs(name: str, around_forward: bool):
    """They are called where they stand on the tape."""
    same_gradients(Net, FORWARDS[name], around_forward=around_forward)


def test_sizes_of_the_tape():
    """A tape of other sizes is the same tape."""
    weight = torch.randn(3, requires_grad=True)
    for rows in (4, 5, 6, 7):
        x = torch.randn(rows, 3)
        weight.grad = None
        with aotdist.compile_backward(**FX):
            (x * weight).sin().sum().backward()
        assert torch.equal(weight.grad, torch.autograd.grad((x * weight).sin().sum(), weight)[0])


def test_twice():
    loss = Net()(torch.randn(6, 4))
    inputs = [node.variable for node in leaves_of(loss)]
    with aotdist.compile_backward(**FX):
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        second = torch.autograd.grad(loss, inputs)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(loss, inputs)


def leaves_of(tensor: torch.Tensor) -> list[Any]:
    found, behind = {}, [tensor.grad_fn]
    while behind:
        node = behind.pop()
        found |= {node: None} if hasattr(node, "variable") else {}
        behind += [following for following, _ in node.next_functions if following is not None]
    return list(found)


def test_what_a_compiled_program_saved_is_freed():
    loss = aotdist.compile(Net(), **FX)(torch.randn(6, 4))
    with aotdist.compile_backward(**FX):
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()


def test_another_compiler_does_not_get_the_tapes_of_the_last(made):
    def backend(gm, inputs):
        return gm.forward

    for how in (FX, {"backend": backend}, FX):
        x = torch.randn(3, requires_grad=True)
        with aotdist.compile_backward(**how):
            x.sin().sum().backward()
        assert torch.equal(x.grad, x.detach().cos())
    backends = [region.artifacts[0].compilation.backend for region in made()]
    assert backends == ["fx", f"{__name__}.backend", "fx"]


def test_eager_compiles_nothing(made):
    x = torch.randn(3, requires_grad=True)
    with aotdist.compile_backward(backend="eager"):
        x.sin().sum().backward()
    assert torch.equal(x.grad, x.detach().cos()) and made() == []


def test_outside_nothing_is_compiled(made):
    with aotdist.compile_backward(**FX):
        pass
    Net()(torch.randn(6, 4)).backward()
    assert not made()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"backend": "fy"}, "there is no backend 'fy'"),
        ({"settings": {"dynamc": True}}, "did you mean `dynamic`"),
    ],
    ids=["backend", "setting"],
)
def test_refused(how: dict[str, Any], says: str):
    with pytest.raises(aotdist.BadSettings, match=says), aotdist.compile_backward(**how):
        pass


def test_a_hook_that_dynamo_compiles_is_refused():
    def program(x, scale):
        y = x.sin()
        y.register_hook(lambda grad: grad * scale)
        return y.exp().sum()

    with pytest.raises(Exception, match=r"hook together .*\n.*\n.* before `compile_backward\(\)`") as raised:
        with aotdist.compile_backward(**FX):
            compiled(program)(torch.randn(3, requires_grad=True), 2)
    assert isinstance(raised.value.inner_exception, aotdist.UnsupportedProgram)
    grads = []
    for call in (program, compiled(program)):
        x = torch.linspace(0, 1, 3, requires_grad=True)
        loss = call(x, 2)
        with aotdist.compile_backward(**FX):
            loss.backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
