"""The default policy, one rule at a time."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from aotdist.errors import InternalError
from aotdist.partition import partition
from aotdist.program import Graph, Split
from tests.partition.joint_graphs import record_joint
from tests.partition.running import assert_same_bits, run_joint, run_split

ATEN = torch.ops.aten


def grad(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def joint_of(fn: Callable[..., torch.Tensor], *primals: torch.Tensor) -> Graph:
    return record_joint(lambda *args: (fn(*args),), primals)


def saved(split: Split) -> list[str]:
    return [slot.path for slot in split.saved]


def calls(graph: Graph, target: object) -> list[Node]:
    return [n for n in graph.gm.graph.nodes if n.target is target]


def tag(joint: Graph, target: object, policy: str) -> None:
    for node in calls(joint, target):
        node.meta["policy"] = policy


def test_values_that_the_backward_reads_are_saved_and_others_are_not() -> None:
    split = partition(joint_of(lambda x: (x.sin() * x.exp() + 1).sum(), grad(4)), "default")
    assert saved(split) == ["p0", "%sin", "%exp"]
    assert split.saved_bytes == 2 * 4 * 4


def test_a_view_is_made_again_from_its_base() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh().view(2, 8).t().contiguous().matmul(w.view(-1)[:2]).sum()

    split = partition(joint_of(fn, grad(4, 4), grad(4, 4)), "default")
    kept = [n for n in split.backward.placeholders() if n.name in {s.removeprefix("%") for s in saved(split)}]
    assert not any(n.target in (ATEN.view.default, ATEN.t.default) for n in kept)
    assert "p1" in saved(split)


def test_items_of_a_view_with_several_results_are_made_again() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = (x * 2).split(2)
        return (a * b * y).sum()

    split = partition(joint_of(fn, grad(4), grad(2)), "default")
    assert saved(split) == ["p1", "%mul", "%mul_1"]
    assert len(calls(split.backward, operator.getitem)) == 2


def test_results_of_one_operator_are_saved_each_by_itself() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.native_dropout(x, 0.5, True)[0].sin().sum()

    split = partition(joint_of(fn, grad(4)), "default")
    assert saved(split) == ["%getitem", "%getitem_1"]
    assert split.saved_bytes == 4 * 4 + 4


def test_must_recompute_is_made_again_with_all_its_views() -> None:
    joint = joint_of(lambda x, w: (x @ w.cos().view(4, 4)).sum(), grad(4, 4), grad(16))
    tag(joint, ATEN.cos.default, "must_recompute")
    split = partition(joint, "default")
    assert saved(split) == ["p0", "p1"]
    assert split.saved_bytes == 0
    assert len(calls(split.backward, ATEN.cos.default)) == 1


def test_must_save_on_a_view_saves_its_base() -> None:
    joint = joint_of(lambda x, w: (x @ w.cos().view(4, 4)).sum(), grad(4, 4), grad(16))
    tag(joint, ATEN.cos.default, "must_recompute")
    tag(joint, ATEN.view.default, "must_save")
    assert saved(partition(joint, "default")) == ["p0", "p1", "%cos"]


def test_a_random_draw_is_saved_though_tagged() -> None:
    joint = joint_of(lambda x: (x * torch.rand_like(x)).sum(), grad(4))
    tag(joint, ATEN.rand_like.default, "must_recompute")
    assert saved(partition(joint, "default")) == ["%rand_like"]


def test_a_collective_is_gathered_again_together_with_its_wait() -> None:
    c10d = torch.ops._c10d_functional

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "g"))

        @staticmethod
        def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:
            return c10d.wait_tensor(c10d.reduce_scatter_tensor(g, "sum", 2, "g"))

    joint = joint_of(lambda x, w: (x @ Gather.apply(w)).sum(), grad(4, 4), grad(2, 4))
    tag(joint, c10d.wait_tensor.default, "must_recompute")
    split = partition(joint, "default")
    assert saved(split) == ["p0", "p1"]
    assert len(calls(split.backward, c10d.all_gather_into_tensor.default)) == 1
    tag(joint, c10d.wait_tensor.default, "must_save")
    assert saved(partition(joint, "default")) == ["p0", "%wait_tensor"]


def test_a_primal_that_is_written_is_copied_before() -> None:
    def fn(x: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * buffer.view(2, 2)).sum(), buffer + 1

    joint = record_joint(fn, [grad(2, 2), torch.ones(4)], writes=[1])
    split = partition(joint, "default")
    assert split.saved_primals == {}
    assert split.saved_bytes == 16
    args = [torch.randn(2, 2), torch.randn(4), torch.ones(())]
    assert_same_bits(run_split(split, joint, [a.clone() for a in args]), run_joint(joint, args))


def test_storage_that_two_saved_values_share_counts_once() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ w
        return (torch.ops.aten._unsafe_view(h, [16]).sin().sum() + h.cos().sum()).sum()

    split = partition(joint_of(fn, grad(4, 4), grad(4, 4)), "default")
    assert split.saved_bytes == 16 * 4


def test_what_an_output_keeps_alive_is_not_counted() -> None:
    split = partition(joint_of(lambda x: x.exp().view(2, 2), grad(4)), "default")
    assert saved(split) == ["%exp"]
    assert split.saved_bytes == 0


def test_dead_nodes_go_but_draws_stay() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.cos()
        torch.rand_like(x)
        return x.sin().sum()

    split = partition(joint_of(fn, grad(4)), "default")
    assert len(calls(split.forward, ATEN.rand_like.default)) == 1
    assert len(calls(split.forward, ATEN.cos.default)) == 0


def test_unused_collectives_go_together_with_their_wait() -> None:
    c10d = torch.ops._c10d_functional

    def fn(x: torch.Tensor) -> torch.Tensor:
        c10d.wait_tensor(c10d.all_reduce(x.detach(), "sum", "g"))
        return x.sin().sum()

    split = partition(joint_of(fn, grad(4)), "default")
    assert not any("c10d" in str(n.target) for n in split.forward.gm.graph.nodes)


def test_a_gradient_may_be_a_forward_value_a_primal_a_tangent_or_nothing() -> None:
    joint = joint_of(lambda x, w: x + w.detach() * 1, grad(), torch.ones(()))
    tangent = joint.placeholders()[-1]
    output = joint.gm.graph.output_node()
    out, _, _ = joint.results()
    output.args = ((out, tangent, joint.placeholders()[0]),)
    joint.gm.recompile()
    split = partition(joint, "default")
    assert saved(split) == ["p0"]
    args = [torch.tensor(1.5), torch.tensor(2.5), torch.tensor(3.5)]
    assert_same_bits(run_split(split, joint, args), run_joint(joint, args))


def test_a_forward_result_that_needs_a_tangent_is_an_internal_error() -> None:
    joint = joint_of(lambda x: x.sin().sum(), grad(4))
    output = joint.gm.graph.output_node()
    last = joint.results()[-1]
    assert last is not None
    last.meta["source"] = "model.py:8   x.sin()"
    output.args = ((last, last),)
    with pytest.raises(InternalError, match=r"depends on a tangent(.|\n)*model.py:8"):
        partition(joint, "default")
