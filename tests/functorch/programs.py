"""Programs that both libraries compile, and what a run of one shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from aotdist.functorch import make_boxed_func
from aotdist.torch_seam.trees import pytree

Compile = Callable[..., Callable[..., Any]]
"""What makes a compiled callable of a program's function, given compilers by keyword."""


@dataclass
class Compilers:
    """Compilers that change nothing, and remember what they were given."""

    graphs: dict[str, list[GraphModule]] = field(default_factory=dict)
    examples: dict[str, list[Sequence[Any]]] = field(default_factory=dict)

    def named(self, kind: str, *, boxed: bool = True) -> Callable[..., Any]:
        def compiler(gm: GraphModule, examples: Sequence[Any]) -> Any:
            self.graphs.setdefault(kind, []).append(gm)
            self.examples.setdefault(kind, []).append(examples)
            return make_boxed_func(gm) if boxed else gm

        return compiler

    def all(self) -> dict[str, Any]:
        return {
            "fw_compiler": self.named("forward"),
            "bw_compiler": self.named("backward"),
            "inference_compiler": self.named("inference"),
        }

    def counts(self) -> Counter[str]:
        return Counter({kind: len(graphs) for kind, graphs in self.graphs.items()})


@dataclass(frozen=True)
class Program:
    """A function and how to make its arguments; `loss` picks what is differentiated of the flat results."""

    fn: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    loss: Callable[[list[Any]], Any] = lambda outs: sum(
        out.sin().sum() for out in outs if isinstance(out, torch.Tensor) and out.requires_grad
    )


def leaf(*size: int, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(*size, requires_grad=requires_grad)


def data(*size: int) -> torch.Tensor:
    return torch.randn(*size)


def _writes(x, counter):
    counter.add_(1)
    return x * counter


def _writes_and_saves(x, weights):
    y = x * weights.clone()
    weights.mul_(2)
    return y


def _writes_a_non_leaf(root, x):
    x.mul_(3)
    return x.sin()


class AddsUpGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.total = total
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.total.add_(grads[0])
        return grads[0] * ctx.total, None


def _root_and_non_leaf():
    root = leaf(3)
    return root, root * 1


def _views(x):
    y = x.cos()
    return y, y.view(-1), y.t()


def _nested(inputs, *, scale):
    return {"sum": inputs["a"] + inputs["b"][0] * scale, "constants": (3, None, "word")}


PROGRAMS = {
    "one result": Program(lambda x: x.sin().cos(), lambda: (leaf(3),)),
    "two inputs": Program(lambda x, w: (x @ w).relu(), lambda: (data(4, 3), leaf(3, 2))),
    "two results": Program(lambda x, y: (x * y, x + y), lambda: (leaf(3), leaf(3))),
    "one result is not used": Program(
        lambda x, y: (x * 2, y * 3), lambda: (leaf(3), leaf(3)), lambda outs: outs[0].sum()
    ),
    "an input is not used": Program(lambda x, y: x.exp(), lambda: (leaf(3), leaf(3))),
    "a result without history": Program(lambda x: (x.sin(), x.detach().cos()), lambda: (leaf(3),)),
    "a view of an input": Program(lambda x: (x.t(), x.sin()), lambda: (leaf(2, 3),)),
    "an input": Program(lambda x, y: (y, x * y), lambda: (leaf(3), data(3))),
    "views of an intermediate": Program(_views, lambda: (leaf(2, 3),)),
    "a repeated result": Program(lambda x: [x.sin()] * 2, lambda: (leaf(3),)),
    "a repeated argument": Program(lambda x, y: x * y, lambda: (leaf(3),) * 2),
    "a write": Program(_writes, lambda: (leaf(3), data(3))),
    "a write to what is saved": Program(_writes_and_saves, lambda: (leaf(3), data(3))),
    "a write in the backward": Program(AddsUpGradients.apply, lambda: (leaf(3), data(3))),
    "a write to a non-leaf": Program(_writes_a_non_leaf, _root_and_non_leaf),
    "no gradient at all": Program(lambda x: (x.sin(), x + 1), lambda: (data(3),), lambda outs: None),
    "nested, with constants": Program(
        lambda *args: _nested(args[0], scale=args[1]), lambda: ({"a": leaf(3), "b": [data(3)]}, 2.0)
    ),
    "under no_grad": Program(torch.no_grad()(lambda x: x * 2), lambda: (leaf(3),), lambda outs: None),
    "a constant tensor": Program(lambda x: (x * torch.tensor([1.0, 2.0, 3.0])).exp(), lambda: (leaf(3),)),
    "several matmuls": Program(
        lambda x, a, b: (torch.tanh(x @ a) @ b).softmax(-1), lambda: (data(5, 3), leaf(3, 4), leaf(4, 2))
    ),
}


@dataclass(frozen=True)
class Shown:
    """What a run shows: flat results, arguments afterwards, gradients of leaves among these."""

    results: list[Any]
    arguments: list[Any]
    grads: list[torch.Tensor | None]


def run(program: Program, call: Callable[..., Any], *, backward: bool = True) -> Shown:
    """Run with arguments that are the same at every call."""
    torch.manual_seed(0)
    arguments = program.arguments()
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    results = pytree.tree_leaves(call(*arguments))
    loss = program.loss(results)
    if backward and isinstance(loss, torch.Tensor):
        loss.backward()
    return Shown(
        [result.detach() if isinstance(result, torch.Tensor) else result for result in results],
        [tensor.detach() for tensor in tensors],
        [tensor.grad if tensor.is_leaf else None for tensor in tensors],
    )


def assert_same(found: Shown, expected: Shown, *, none_may_be_zero: bool = False) -> None:
    """Equal bit for bit; PyTorch's compiled programs have zeros where eager's have no gradient."""
    assert len(found.results) == len(expected.results)
    for a, b in zip(
        [*found.results, *found.arguments], [*expected.results, *expected.arguments], strict=True
    ):
        if isinstance(b, torch.Tensor):
            assert torch.equal(a, b)
        else:
            assert a == b
    for a, b in zip(found.grads, expected.grads, strict=True):
        if none_may_be_zero and (a is None or b is None):
            assert all(grad is None or not grad.any() for grad in (a, b))
        else:
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


class Normed(nn.Module):
    """With buffers that are written."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return (self.norm(self.linear(x)).relu(),)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return (self.second(self.first(x).tanh()),)


class WithUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return (x * self.used + self.frozen,)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "plain": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2), _Tuple()),
        lambda: data(4, 3),
    ),
    "buffers are written": (Normed, lambda: data(4, 3)),
    "in evaluation": (lambda: Normed().eval(), lambda: data(4, 3)),
    "tied": (Tied, lambda: data(4, 3)),
    "parameters without gradient": (WithUnused, lambda: data(4, 3)),
    "an input that requires grad": (Normed, lambda: leaf(4, 3)),
}


class _Tuple(nn.Module):
    def forward(self, x):
        return (x,)
