"""Inputs that a backward writes, when only some of the results take part in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import plain_tensors
from tests.semantics.meshes import sharded

Results = tuple[torch.Tensor, ...]


class Counts(torch.autograd.Function):
    """Its backward counts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        ctx.count = count
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.count.add_(1)
        return grads[0], None


class Averages(torch.autograd.Function):
    """Its backward keeps a running mean of gradients, and uses it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.mean = mean
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.mean.mul_(0.5).add_(grads[0].abs().mean())
        return grads[0] * 2 * x * ctx.mean, None


class State(nn.Module):
    """What backwards write: two tensors that programs are given, and what they find."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.x = nn.Parameter(make(torch.tensor([1.0, -2.0, 3.0])))
        self.register_buffer("first", make(torch.zeros(3)))
        self.register_buffer("second", make(torch.zeros(3)))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, program: Callable[..., Results]) -> Results:
        return program(self, self.x, self.first, self.second)


def each_its_own(_: State, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    return Counts.apply(x, a) * 2, Counts.apply(x, b) * 3


def both_the_same(_: State, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    return Counts.apply(x, a) * 2, Counts.apply(x, a).sin()


def one_behind_both(_: State, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    hidden = Averages.apply(x, a)
    return hidden.sin(), Averages.apply(hidden, b)


def in_forward_too(_: State, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    hidden = Averages.apply(x, a)
    b.add_(hidden.detach())
    return Averages.apply(x, b), hidden.cos()


def hooks(_: State, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    left, right = x * 2, x * 3
    left.register_hook(lambda grad: [a.add_(grad), None][1])
    right.register_hook(lambda grad: [b.add_(grad), None][1])
    return left.sin(), right.cos()


class CountsWhatItFinds(torch.autograd.Function):
    """Its backward counts in a buffer of a module that the forward does not look at."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: State) -> torch.Tensor:
        ctx.state = state
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.state.first.add_(1)
        return grads[0] * 2, None


def found_by_the_backward(state: State, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    return CountsWhatItFinds.apply(x, state), x * 2


def recomputed_statistics(state: State, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    def block(x: torch.Tensor) -> torch.Tensor:
        return state.norm(torch.stack([x, x * 2, x.sin()])).sin()

    return checkpoint(block, x, use_reentrant=False), x.cos()  # type: ignore[return-value]


PROGRAMS = [
    each_its_own,
    both_the_same,
    one_behind_both,
    in_forward_too,
    hooks,
    found_by_the_backward,
]
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda tensor: tensor,
    "two": lambda tensor: TwoTensor(tensor.clone(), tensor * 2),
}


def told(program: Callable[..., Results], together: Sequence[int], state: State, times: int = 1) -> list[Any]:
    """What is written after each backward, how often, and the gradients."""
    written = [state.first, state.second, state.norm.running_mean, state.norm.num_batches_tracked]
    plains = [plain for tensor in written for plain in plain_tensors(tensor)]
    with torch.no_grad():
        for plain in plains:
            plain.zero_()
    state.x.grad, before = None, [plain._version for plain in plains]
    results, seen = state(program), list[Any]()
    for _ in range(times):
        starts = [torch.ones_like(results[k]) for k in together]
        torch.autograd.backward([results[k] for k in together], starts, retain_graph=True)
        seen.append([(p.tolist(), p._version - since) for p, since in zip(plains, before, strict=True)])
        seen.append([plain.tolist() for plain in plain_tensors(state.x.grad)])
    return seen


REFUSED: dict[Callable[..., Results], tuple[int, ...]] = {
    each_its_own: (0, 1),
    both_the_same: (0, 1),
    one_behind_both: (0,),
    in_forward_too: (0, 1),
    hooks: (0, 1),
    found_by_the_backward: (1,),
    recomputed_statistics: (1,),
}
"""Results whose backward alone does not write all that the backward of both writes."""


def check(
    program: Callable[..., Results],
    make: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    backend: str = "fx",
    *,
    refuses_all: bool = False,
) -> None:
    eager, compiled = State(make), aotdist.compile(State(make), backend=backend)
    assert told(program, (0, 1), compiled, 2) == told(program, (0, 1), eager, 2)
    for k in (0, 1):
        if refuses_all or k in REFUSED[program]:
            with pytest.raises(UnsupportedProgram, match="and others where only 1 of the 2 results"):
                told(program, (k,), compiled)
        else:
            assert told(program, (k,), compiled, 2) == told(program, (k,), eager, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_in_eager(program: Callable[..., Results], kind: str) -> None:
    """With wrappers that mix with plain tensors, the backward of some results is not a part of the whole."""
    check(program, KINDS[kind], refuses_all=kind == "two")


def test_recomputed_statistics() -> None:
    check(recomputed_statistics)


@pytest.mark.parametrize("program", [each_its_own, one_behind_both, hooks])
def test_dtensors(program: Callable[..., Results], mesh: DeviceMesh) -> None:
    check(program, lambda tensor: sharded(mesh, tensor.clone()))


def test_inductor() -> None:
    check(each_its_own, backend="inductor")


def test_one_trace_where_all_results_write_the_same() -> None:
    def program(x: torch.Tensor, count: torch.Tensor) -> Results:
        hidden = Counts.apply(x, count).sin()
        return hidden, hidden * 2, hidden * 3

    compiled = aotdist.compile(program, backend="fx")
    x, count = torch.ones(3, requires_grad=True), torch.zeros(())
    compiled(x, count)[1].sum().backward()
    assert count == 1
    graph = compiled.graphs[0]["joint"].graph
    counted = [node for node in graph.nodes if node.target == torch.ops.aten.add.Tensor and node.args[1] == 1]
    assert len(counted) == 1


def test_what_was_recorded_is_a_program() -> None:
    """Its arguments have names of their own, also those for what an input holds when the backward runs."""

    def program(x: torch.Tensor, w: torch.Tensor, count: torch.Tensor) -> Results:
        y = Counts.apply(x * w, count)
        return y, y * x

    compiled = aotdist.compile(program, backend="fx")
    leaf = torch.ones(2, 2, requires_grad=True)
    compiled(leaf * 1, leaf, torch.zeros(()))
    graphs = compiled.graphs[0].values()
    assert any("buffer" in graph.code for graph in graphs)
    for graph in graphs:
        compile(graph.code, "<graph>", "exec")


def unread_count(x: torch.Tensor) -> torch.Tensor:
    count, y = torch.zeros(()), x * 2
    y.register_hook(lambda grad: [count.add_(1), None][1])
    return y * 3


def sum_of_gradients(x: torch.Tensor) -> torch.Tensor:
    total, y = x.detach() * 0, x * 2
    y.register_hook(lambda grad: total.add_(grad) * 1)
    return y * 3


@pytest.mark.parametrize("program", [unread_count, sum_of_gradients])
def test_what_the_forward_makes_and_nobody_holds(program: Callable[..., torch.Tensor]) -> None:
    """A second backward would have to find what the first wrote: it is refused."""
    grads: list[list[float]] = []
    for call in (program, aotdist.compile(program, backend="fx")):
        x = torch.ones(3, requires_grad=True)
        loss = call(x).sum()
        loss.backward(retain_graph=True)
        if call is not program:
            with pytest.raises(UnsupportedProgram, match="a tensor that the forward made and did not return"):
                loss.backward()
        grads.append(x.grad.tolist())
    assert grads[0] == grads[1]
