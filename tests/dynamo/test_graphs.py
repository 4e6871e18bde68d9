"""What Dynamo's graphs may hold: each program as in eager, and as many regions as Dynamo cuts it into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import trace_rules
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from aotdist import compiled as calls
from aotdist.aliasing import overwrite
from aotdist.runtime import backward
from aotdist.torch_seam import dynamo as seam
from aotdist.trace import trace
from tests.dynamo.comparison import compiled, same_as_eager


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*size, requires_grad=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * grad * x.cos()


class Sine(torch.autograd.Function):
    """With its context apart, as `torch.func` wants it."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class Halved(Sine):
    """Its backward is not its forward's derivative."""

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def broken(x):
    y = x.sin()
    y.add_(1)
    torch._dynamo.graph_break()
    y.mul_(2)
    return y, y.t()


def under_no_grad(x):
    with torch.no_grad():
        y = x * 2
        torch._dynamo.graph_break()
        y += 1
    return y + x


def with_autocast(x):
    with torch.autocast("cpu"):
        y = x @ x.t()
    return y.float() * 2


def checkpointed(x):
    return checkpoint(lambda y: F.dropout((y @ y).relu(), 0.5), x.sin(), use_reentrant=False)


@torch.compiler.nested_compile_region
def nested(x):
    return x.sin() * 2


def hooked(x):
    y = x * 2
    y.register_hook(lambda grad: grad * 3)
    return y.sum()


PROGRAMS: dict[str, tuple[Callable[..., Any], int]] = {
    "one graph": (lambda x: F.gelu(x) * x, 1),
    "a break in the middle of writes": (broken, 2),
    "a break under no_grad": (under_no_grad, 2),
    "an autograd.Function": (lambda x: Doubled.apply(x * 2) * x, 1),
    "a checkpoint": (checkpointed, 1),
    "autocast": (with_autocast, 1),
    "random numbers": (lambda x: F.dropout(x, 0.3) + torch.rand_like(x), 1),
    "cond": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), 1),
    "func.grad": (lambda x: torch.func.grad(lambda y: y.sin().sum())(x), 1),
    "func.grad of an autograd.Function": (lambda x: torch.func.grad(lambda y: Sine.apply(y).sum())(x), 1),
    "vmap": (lambda x: torch.vmap(lambda row: row.sin() * row.sum())(x), 1),
    "a nested region": (lambda x: nested(nested(x)), 1),
    "a hook": (hooked, 1),
    "data in a shape": (lambda x: x[x > 0] * 2, 2),
    "a leaf made inside": (lambda x: x.detach().requires_grad_() * 2, 2),
    "complex numbers": (lambda x: (x * 1j).conj().real, 1),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str):
    program, num_regions = PROGRAMS[name]
    made = same_as_eager(program, lambda: (leaf(4, 4),))
    assert len(made) <= num_regions


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aotdist"])
def test_dynamo_drops_backwards_under_transforms(backend: str) -> None:
    """A row of docs/torch_compile.md: Dynamo's graph holds the forward alone, whoever compiles it."""
    torch._dynamo.reset()
    fn = torch.compile(lambda x: torch.func.grad(lambda y: Halved.apply(y).sum())(x), backend=backend)
    assert fn(torch.zeros(3)).tolist() == [1.0] * 3  # eager and `aotdist.compile`: 0.5


def test_modules(made):
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

    models = make(), make()
    calls = models[0], compiled(models[1])
    for step in range(3):
        losses = []
        for model, call in zip(models, calls, strict=True):
            torch.manual_seed(step)
            losses.append(call(torch.randn(5, 3)).square().sum())
            losses[-1].backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        assert torch.equal(*losses)
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    (region,) = made()
    assert len(region.artifacts) == 1


def test_one_region_serves_modules_of_one_class(made):
    """Parameters are inputs: what Dynamo compiled for one layer, the next one runs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(3))

        def forward(self, x):
            return x * self.scale

    first, second = Block(), Block()
    x = torch.randn(2, 3)
    for block in (first, second):
        assert torch.equal(compiled(block)(x), x * block.scale)
    (region,) = made()
    assert len(region.artifacts) == 1


def overlapping() -> tuple[torch.Tensor, ...]:
    base = torch.randn(3, 4)
    return base[:2], base[1:]


def test_inputs_that_share_memory():
    """Dynamo's graph is the same for both calls; what is compiled for it is not."""
    apart = lambda: (torch.randn(2, 4), torch.randn(2, 4))  # noqa: E731
    (region,) = same_as_eager(lambda x, y: (x.add_(1), y * 2), overlapping, apart)
    assert len(region.artifacts) == 2


def test_wrappers():
    def make() -> tuple[torch.Tensor, ...]:
        return TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_(), torch.randn(3, 4)

    same_as_eager(lambda x, y: (x * y + 1).sum(0), make)


def test_gradients_stay_switched_off(made):
    """Dynamo leaves it to the graph."""

    def program(x):
        y = x * x
        torch.set_grad_enabled(False)
        return y, y.clone(), y

    for call in (program, compiled(program)):
        y, copied, again = call(leaf(3))
        found = torch.is_grad_enabled(), y.requires_grad, copied.requires_grad, again is y
        torch.set_grad_enabled(True)
        assert found == (False, True, False, True)
    (region,) = made()
    assert len(region.artifacts) == 1


def test_a_checkpoint_may_write_what_it_closes_over():
    """Dynamo passes that to the checkpoint like any other argument."""

    def program(x, counter):
        def counted(y):
            counter.add_(1)
            return y.sin() * 2

        return checkpoint(counted, x, use_reentrant=False)

    (region,) = same_as_eager(program, lambda: (leaf(3), torch.zeros(())))
    assert len(region.artifacts) == 1


@pytest.mark.parametrize("times", [0, 2])
def test_version_counters_are_read_and_put_back(times: int):
    def program(x):
        y = x + 2
        before = y._version
        y[1] = 2
        with torch.autograd._unsafe_preserve_version_counter(x):
            x.add_(1)
        return y, y._version - before

    def make() -> tuple[torch.Tensor, ...]:
        x = torch.randn(3)
        for _ in range(times):
            x.add_(1)
        return (x,)

    same_as_eager(program, make, make)


@pytest.mark.parametrize("kind", ["plain", "leaf", "TwoTensor"])
def test_data_is_assigned(kind: str):
    """Of a tensor that nobody has written: its version counter stays 0, as in eager."""

    def program(x, y):
        x.data = y
        return x * 2

    def make() -> tuple[torch.Tensor, ...]:
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        if kind == "TwoTensor":
            return TwoTensor(x, x.clone()), TwoTensor(y, y.clone())
        return x.requires_grad_(kind == "leaf"), y

    (region,) = same_as_eager(program, make, make)
    assert len(region.artifacts) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("breaks", [False, True], ids=["gradients outside", "gradients inside"])
@pytest.mark.parametrize("program", [lambda x: x.sin().exp(), F.silu, F.softplus])
def test_gradients_of_gradients(program, breaks: bool):
    """Inside, Dynamo breaks the graph and goes on where the backward is called: not with our own frames."""

    def penalty(x, call):
        (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        return grad.square().sum()

    def both(x):
        return penalty(x, program)

    seen = []
    for call in (lambda fn: fn, compiled):
        x = torch.linspace(-1, 2, 4).requires_grad_()
        torch._dynamo.reset()
        loss = call(both)(x) if breaks else penalty(x, call(program))
        loss.backward()
        seen.append((loss.detach(), x.grad))
    for expected, found in zip(*seen, strict=True):
        assert torch.equal(found, expected)


def test_frames_of_our_own_are_left_alone():
    def step(x):
        x.sin().sum().backward()
        return x * 2

    made = same_as_eager(step, lambda: (leaf(3),))
    assert [region.name.split()[0].split("_at_")[0] for region in made] == [
        "step",
        "torch_dynamo_resume_in_step",
    ]


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_gradients_through_what_dynamo_went_through_are_refused():
    """Its backward has no `no_grad` any more: nobody knows what has a history. Once, it is differentiated."""
    x, call = leaf(3), compiled(lambda x: Doubled.apply(x) * 1)
    (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    assert torch.equal(grad.detach(), 2 * x.detach().cos())
    with pytest.raises(RuntimeError, match="autograd.Function` that Dynamo went through"):
        grad.sum().backward()


def test_inference():
    (region,) = same_as_eager(lambda x: x.sin() * 2, lambda: (leaf(3),), around=torch.no_grad)
    assert region.explain().artifacts[0].kind == "inference"


def test_names_and_lines(made):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3)])

        def forward(self, x):
            return self.blocks[0](x).relu()

    compiled(Net())(torch.randn(2, 3))
    (region,) = made()
    assert region.name.startswith("forward [0/0")
    graph = region.artifacts[0].compilation.graphs()["forward"]
    assert [str(slot) for slot in graph.ins] == ["blocks.0.weight", "blocks.0.bias", "x"]
    relu = next(node for node in graph.gm.graph.nodes if "relu" in node.name)
    assert "test_graphs.py" in relu.meta["source"] and ".relu()" in relu.meta["source"]
    assert any(node.meta.get("module") == "blocks.0" for node in graph.gm.graph.nodes)


def test_reset_lets_go(made):
    compiled(lambda x: x.sin() * 2)(leaf(3)).sum().backward()
    assert len(made()) == 1
    torch._dynamo.reset()
    assert not made()


def test_dynamo_leaves_the_frames_of_calls_alone() -> None:
    """A backward that is asked for where Dynamo has broken a graph runs them under Dynamo."""
    seam.skip_our_frames()
    skipped = [Path(name) for name in trace_rules.SKIP_DIRS if str(Path(seam.__file__).parents[1]) in name]
    assert skipped and all(path.exists() for path in skipped)
    for module in (calls, backward, overwrite, trace):
        assert trace_rules.check_file(module.__file__).skipped
