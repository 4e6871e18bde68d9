"""Hooks of leaves: called as in eager where a gradient arrives, and only there; leaves in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import aotdist

Leaves = dict[str, torch.Tensor]
Heard = list[tuple[str, ...]]


class Branches(nn.Module):
    """Two results that share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shared = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.shared(x)
        return self.first(hidden), self.second(hidden)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "layers": (
        lambda: nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8)),
        (torch.ones(2, 4, 8),),
    ),
    "an encoder's layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
        (torch.linspace(0, 1, 80).view(5, 2, 8),),
    ),
    "a recurrent module": (lambda: nn.LSTM(4, 4, 2), (torch.linspace(0, 1, 40).view(5, 2, 4),)),
}


def listening(leaves: Leaves, heard: Heard) -> None:
    """Let every leaf double its gradient, and tell when it comes."""
    for name, tensor in leaves.items():
        tensor.register_hook(lambda grad, name=name: (heard.append(("arrives", name)), grad * 2)[1])
        tensor.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(("is there", name)))


def heard_by(
    make: Callable[[], tuple[Leaves, Any]], use: Callable[[Any, Leaves, Heard], None], *, compiles: bool
) -> tuple[Heard, list[Any]]:
    torch.manual_seed(0)
    leaves, call = make()
    heard: Heard = []
    listening(leaves, heard)
    use(aotdist.compile(call, backend="fx") if compiles else call, leaves, heard)
    return heard, [tensor.grad for tensor in leaves.values()]


def assert_heard_alike(
    make: Callable[[], tuple[Leaves, Any]], use: Callable[[Any, Leaves, Heard], None]
) -> None:
    (theirs, their_grads), (ours, our_grads) = (heard_by(make, use, compiles=k) for k in (False, True))
    assert of_each_leaf(ours) == of_each_leaf(theirs)
    for mine, eager in zip(our_grads, their_grads, strict=True):
        assert (mine is None) == (eager is None)
        if isinstance(eager, TwoTensor):
            mine, eager = mine.a, eager.a
        if eager is not None:
            assert torch.equal(mine, eager) and mine.stride() == eager.stride()
            assert not mine._is_view() and not mine.requires_grad


def of_each_leaf(heard: Heard) -> list[dict[str, list[str]]]:
    """What each leaf's hooks heard in each backward, in order."""
    found: list[dict[str, list[str]]] = [{}]
    for what, *names in heard:
        if names:
            found[-1].setdefault(names[0], []).append(what)
        else:
            found.append({})
    return found


def of_module(build: Callable[[], nn.Module]) -> Callable[[], tuple[Leaves, Any]]:
    def make() -> tuple[Leaves, Any]:
        module = build()
        return dict(module.named_parameters()), module

    return make


@pytest.mark.parametrize("name", MODELS)
def test_of_models(name: str) -> None:
    build, args = MODELS[name]

    def use(call: Any, leaves: Leaves, heard: Heard) -> None:
        result = call(*args)
        (result[0] if isinstance(result, tuple) else result).square().sum().backward()

    assert_heard_alike(of_module(build), use)


def test_of_wrappers() -> None:
    def make() -> tuple[Leaves, Any]:
        leaves = {name: TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_() for name in "abc"}
        return leaves, lambda a, b, c: (a * b).sin() * c + a

    assert_heard_alike(make, lambda call, leaves, heard: call(**leaves).sum().backward())


def test_of_some_results() -> None:
    """Leaves that only another result depends on hear nothing."""

    def use(call: Any, leaves: Leaves, heard: Heard) -> None:
        first, second = call(torch.ones(2, 4))
        first.sum().backward(retain_graph=True)
        heard.append(("then",))
        second.sum().backward()

    assert_heard_alike(of_module(Branches), use)


def test_of_one_leaf() -> None:
    def make() -> tuple[Leaves, Any]:
        return {"x": torch.ones(3, requires_grad=True)}, lambda x, y: (x * 2, y * 3)

    def use(call: Any, leaves: Leaves, heard: Heard) -> None:
        y = torch.ones(3, requires_grad=True)
        call(leaves["x"], y)[1].sum().backward()
        heard.append(("then",))
        call(leaves["x"], y)[0].sum().backward()

    assert_heard_alike(make, use)


def test_where_the_gradient_comes_from_elsewhere() -> None:
    """What the program brings none of may get one all the same, before or after."""

    def use(call: Any, leaves: Leaves, heard: Heard) -> None:
        for _ in range(2):
            first, _ = call(torch.ones(2, 4))
            (first.sum() + leaves["second.weight"].sum()).backward()
            heard.append(("then",))

    assert_heard_alike(of_module(Branches), use)


def test_hooks_stay_what_they_were() -> None:
    module = Branches()
    leaves, heard = dict(module.named_parameters()), list[tuple[str, ...]]()
    listening(leaves, heard)
    before = {name: dict(leaf._backward_hooks or {}) for name, leaf in leaves.items()}
    aotdist.compile(module, backend="fx")
    sum(module(torch.ones(2, 4))[0].sum() for _ in range(2)).backward()
    assert {name: dict(leaf._backward_hooks or {}) for name, leaf in leaves.items()} == before


def test_beside_inputs_with_a_history() -> None:
    def make() -> tuple[Leaves, Any]:
        leaves = {name: torch.arange(1.0, 4.0, requires_grad=True) for name in "ab"}
        return leaves, lambda y, b: (y * b).exp() * b

    def use(call: Any, leaves: Leaves, heard: Heard) -> None:
        y = leaves["a"] / 4
        y.register_hook(lambda _: heard.append(("arrives", "y")))
        call(y, leaves["b"]).sum().backward()

    assert_heard_alike(make, use)


def test_twice_and_differentiably() -> None:
    def use(call: Any, leaves: Leaves, heard: Heard) -> None:
        first, second = call(torch.ones(2, 4))
        (first.sum() + second.sum()).backward(retain_graph=True)
        heard.append(("then",))
        grads = torch.autograd.grad((first * second).sum(), list(leaves.values()), create_graph=True)
        heard.append(("then",))
        grads[0].square().sum().backward()

    assert_heard_alike(of_module(Branches), use)


def some_of_three(
    heard: list[Any], register: Callable[..., None], *, compiles: bool, of_results: bool
) -> None:
    """Backwards that reach some of three leaves, or begin at some of three results; hooks of two each."""
    leaves = [torch.ones(2, requires_grad=True) for _ in range(3)]

    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a * 2, b * 3, c * 4

    if not of_results:
        register(leaves)
    outs = aotdist.compile(fn, backend="fx")(*leaves) if compiles else fn(*leaves)
    if of_results:
        register(outs)
    for some in ([0], [1], [2], [0, 1], [1, 2], [0, 1, 2]):
        sum(outs[k].sum() for k in some).backward(retain_graph=True)
        heard.append(some)
    (outs[0].sum() + leaves[1].sum() * 5).backward()


@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("of_results", [False, True])
def test_hooks_of_several_gradients(of_results: bool, mode: Any) -> None:
    """They are called if any of their gradients comes; at the end, if not all do."""
    heard: list[list[Any]] = [[], []]
    for compiles, told in enumerate(heard):

        def register(tensors: Any, told: list[Any] = told) -> None:
            for pair in ((0, 1), (1, 0), (1, 2)):

                def hook(grads: Any, pair: tuple[int, int] = pair) -> None:
                    each = [grads] if mode == "any" else grads
                    told.append((pair, [None if grad is None else grad.tolist() for grad in each]))

                torch.autograd.graph.register_multi_grad_hook([tensors[k] for k in pair], hook, mode=mode)

        some_of_three(told, register, compiles=bool(compiles), of_results=of_results)
    assert in_each(heard[0]) == in_each(heard[1])


def in_each(heard: list[Any]) -> list[list[str]]:
    """What was heard in each backward, in any order."""
    found: list[list[str]] = [[]]
    for each in heard:
        if isinstance(each, list):
            found.append([])
        else:
            found[-1] = sorted([*found[-1], repr(each)])
    return found
