"""Symbolic sizes: one pair of graphs for all sizes, cut by our partitions and by PyTorch's."""

from collections.abc import Callable, Sequence
from typing import Any

import functorch.compile as theirs
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

from aotdist import functorch as ours

PARTITIONS = {
    "default": ours.default_partition,
    "min_cut": ours.min_cut_rematerialization_partition,
    "PyTorch's default": theirs.default_partition,
    "PyTorch's min_cut": theirs.min_cut_rematerialization_partition,
}


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x @ w).sin() * x.shape[0], x.t()[1:], (x * 2).reshape(-1)


def gradients(fn: Callable[..., Any], rows: int, ends: slice) -> Sequence[torch.Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(rows, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    found = torch.autograd.grad([out.sum() for out in fn(x, w)[ends]], (x, w), allow_unused=True)
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_one_pair_of_graphs_serves_all_sizes(partition: str) -> None:
    compiled: list[str] = []

    def compiler(kind: str) -> Callable[..., Any]:
        def compile_graph(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            assert any(isinstance(example, torch.SymInt) for example in examples)
            compiled.append(kind)
            return gm.forward

        return compile_graph

    fn = ours.aot_function(
        program, compiler("forward"), compiler("backward"), PARTITIONS[partition], dynamic=True
    )
    for rows in (5, 7, 3):
        for ends in (slice(None), slice(1), slice(2, 3)):
            for found, expected in zip(
                gradients(fn, rows, ends), gradients(program, rows, ends), strict=True
            ):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert compiled == ["forward", "backward"]


class AsTuple(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.inner(x),)


def test_sizes_of_fakes_are_taken_for_symbolic() -> None:
    """A Dynamo backend's arguments hold no data; their sizes say what is wanted."""
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(5, 4))
    linear = torch.nn.Linear(4, 2)
    sizes: list[int] = []

    def compile_graph(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        sizes.append(len(examples))
        return gm.forward

    compiled = ours.aot_module_simplified(AsTuple(linear), (fake,), compile_graph)
    for rows in (5, 3):
        torch.testing.assert_close(compiled(torch.ones(rows, 4))[0], linear(torch.ones(rows, 4)))
    assert len(sizes) == 1


def test_gradients_are_missing_where_every_symbol_turned_out_to_be_a_number() -> None:
    """The graphs take no sizes then; what is expected of gradients still says symbols."""

    def reshapes(x: torch.Tensor) -> torch.Tensor:
        x.transpose_(1, 0)
        return x.mul(2).transpose(1, 0)

    gradients: list[torch.Tensor] = []
    for call in (reshapes, ours.aot_function(reshapes, ours.nop, dynamic=True)):
        x = TwoTensor(torch.ones(1, 2, 4), torch.ones(1, 2, 4)).requires_grad_()
        out = call(x * 1.5)
        tangent = torch.arange(8.0).view(1, 2, 4)
        out.backward(TwoTensor(tangent, tangent * 3))
        gradients.append(x.grad)
    assert torch.equal(gradients[0].a, gradients[1].a) and torch.equal(gradients[0].b, gradients[1].b)
