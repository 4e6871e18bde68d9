"""Cleanup: what goes, what must stay, and that no bit of any result changes."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from torch.fx import Node

from aotdist.partition.traits import storage_root
from aotdist.passes.cleanup import cleanup
from aotdist.passes.verify import verify
from aotdist.program import Graph
from aotdist.settings import Settings
from tests.partition.joint_graphs import record_joint
from tests.partition.random_joints import Recipe, build_joint, random_arguments, recipes
from tests.partition.running import assert_same_bits, run_joint

ATEN = torch.ops.aten

DETACHES = (ATEN.detach.default, ATEN.alias.default)
"""What a trace has for `detach`: from torch 2.14 on `alias`."""


def clean(graph: Graph) -> Graph:
    return cleanup(graph, Settings())


def joint_of(fn: Callable[..., object], *primals: torch.Tensor) -> Graph:
    def flat(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = fn(*args)
        return out if isinstance(out, tuple) else (out,)  # type: ignore[return-value]

    return record_joint(flat, primals)


def count(graph: Graph, target: object) -> int:
    return sum(n.target is target for n in graph.gm.graph.nodes)


def grad(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


@given(recipe=recipes(most=20))
def test_results_are_the_same_bit_by_bit(recipe: Recipe) -> None:
    joint = build_joint(recipe)
    cleaned = clean(joint)
    verify(cleaned, after="cleanup")
    args = random_arguments(joint)
    torch.manual_seed(3)
    expected = run_joint(joint, args)
    torch.manual_seed(3)
    assert_same_bits(run_joint(cleaned, args), expected)


@given(recipe=recipes(most=20))
def test_no_result_comes_to_share_memory(recipe: Recipe) -> None:
    joint = build_joint(recipe)
    assert sharing(clean(joint)) == sharing(joint)


def sharing(graph: Graph) -> list[tuple[int, str]]:
    """For each result, the first result in the same memory, and the argument that it lives in, if any."""
    roots = [None if n is None else storage_root(n) for n in graph.results()]
    return [(roots.index(root), _argument(root)) for root in roots]


def _argument(root: Node | None) -> str:
    return root.name if root is not None and root.op in ("placeholder", "get_attr") else ""


def test_detaches_go() -> None:
    joint = joint_of(lambda x: x.tanh().sum(), grad(4))
    assert sum(count(joint, op) for op in DETACHES) > 1
    assert sum(count(clean(joint), op) for op in DETACHES) == 0


def test_what_is_transposed_twice_goes() -> None:
    joint = joint_of(lambda x, w: (x @ w.t()).relu() @ w, grad(4, 3), grad(5, 3))
    assert count(clean(joint), ATEN.t.default) < count(joint, ATEN.t.default)
    undone = joint_of(lambda x: x.sin().t().t(), grad(2, 3))
    assert count(clean(undone), ATEN.t.default) == 0
    assert_same_bits(run_joint(clean(undone), args := random_arguments(undone)), run_joint(undone, args))


def test_an_argument_that_is_transposed_twice_stays_a_value_of_its_own() -> None:
    joint = joint_of(lambda x: (x.t().t(), x * 2), grad(2, 3))
    cleaned = clean(joint)
    assert not any(node is not None and node.op == "placeholder" for node in cleaned.results()[:1])


def test_a_detached_argument_that_is_returned_stays_a_value_of_its_own() -> None:
    cleaned = clean(joint_of(lambda x: (x.detach(), x.sin().sum()), grad(4)))
    result = cleaned.results()[0]
    assert result is not None and result.target in DETACHES


def test_two_results_never_become_one() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        return y.detach(), y.detach()

    first, second = clean(joint_of(fn, torch.ones(4))).results()[:2]
    assert first is not second


def test_a_copy_between_operators_goes() -> None:
    assert count(clean(joint_of(lambda x: x.sin().clone().cos().sum(), grad(4))), ATEN.clone.default) == 0


def test_a_copy_that_changes_the_layout_stays() -> None:
    joint = joint_of(
        lambda x: x.sin().t().clone(memory_format=torch.contiguous_format).cos().sum(), grad(4, 2)
    )
    assert count(clean(joint), ATEN.clone.default) == 1


def test_a_copy_that_is_written_over_stays_where_it_lies_otherwise() -> None:
    """What `copy` makes lies where its first argument does in its storage."""
    whole = joint_of(lambda x: ATEN.copy(x.sin().clone(), x.cos()), torch.ones(4))
    part = joint_of(lambda x: ATEN.copy(x.sin()[1:].clone(), x[1:].cos()), torch.ones(4))
    assert count(clean(whole), ATEN.clone.default) == 0
    assert count(clean(part), ATEN.clone.default) == 1


def test_a_copy_that_the_caller_receives_stays_even_under_a_view() -> None:
    joint = joint_of(lambda x: x.sin().clone().view(2, 2), torch.ones(4))
    assert count(clean(joint), ATEN.clone.default) == 1


def test_a_copy_that_protects_from_the_caller_stays() -> None:
    joint = joint_of(
        lambda x, y: ((x.clone() * y).sum(), (s := y.sin()), (s.clone() * y).sum()), grad(4), grad(4)
    )
    assert count(clean(joint), ATEN.clone.default) == 2


def test_equal_calls_become_one_but_draws_do_not() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        views = x.view(2, 2) @ x.view(2, 2)
        draws = torch.rand_like(x) + torch.rand_like(x)
        same = x.view(2, 2) @ x.view(2, 2)
        return views.sum() + same.cos().sum() + draws.sum() + x.sin().sum() + x.sin().sum() * 0.0

    cleaned = clean(joint_of(fn, torch.ones(4)))
    assert count(cleaned, ATEN.view.default) == 1
    assert count(cleaned, ATEN.mm.default) == 1
    assert count(cleaned, ATEN.rand_like.default) == 2
    assert count(cleaned, ATEN.sin.default) == 1


def test_numbers_of_either_sign_of_zero_are_not_equal() -> None:
    cleaned = clean(joint_of(lambda x: (x * 0.0).sum() + (x * -0.0).sum(), torch.ones(4)))
    assert count(cleaned, ATEN.mul.Tensor) == 2


def test_what_is_returned_stands_for_nothing_else() -> None:
    """The caller may write it before the backward."""
    cleaned = clean(joint_of(lambda x: (x.sin(), (x.sin() * x).sum()), grad(4)))
    assert count(cleaned, ATEN.sin.default) == 2


class Scaled(torch.autograd.Function):
    """Divides by the largest magnitude, in the backward as well, and there by its square besides."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x / x.abs().max()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        flat = x.t().reshape(-1)
        return g / flat.abs().max() + x.abs()


def test_a_number_of_the_forward_is_not_computed_again_in_the_backward() -> None:
    """In whatever order its elements are read; but what is as large as its source is made again."""
    joint = joint_of(lambda x: Scaled.apply(x).sum(), torch.randn(4, 8, requires_grad=True))
    cleaned = clean(joint)
    assert count(joint, ATEN.max.default) == 2
    assert count(cleaned, ATEN.max.default) == 1
    assert count(cleaned, ATEN.abs.default) == 2
    assert_same_bits(run_joint(cleaned, args := random_arguments(joint)), run_joint(joint, args))


def test_a_constant_of_the_forward_is_not_shared_with_the_backward() -> None:
    class Constants(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * torch.full([4], 2.0) + torch.full([4], 2.0)

        @staticmethod
        def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:
            return g * torch.full([4], 2.0)

    assert count(clean(joint_of(lambda x: Constants.apply(x).sum(), grad(4))), ATEN.full.default) == 2


def test_dead_nodes_go_but_draws_stay() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.cos()
        torch.rand_like(x)
        return x.sin().sum()

    cleaned = clean(joint_of(fn, torch.ones(4)))
    assert count(cleaned, ATEN.cos.default) == 0
    assert count(cleaned, ATEN.rand_like.default) == 1


def test_a_clean_graph_is_returned_as_it_is() -> None:
    cleaned = clean(joint_of(lambda x: x.tanh().sum(), grad(4)))
    assert clean(cleaned) is cleaned


def test_zeros_of_either_sign_stay_apart() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x / torch.full((3,), 0.0), x / torch.full((3,), -0.0)

    cleaned = clean(joint_of(fn, torch.ones(3)))
    assert count(cleaned, ATEN.full.default) == 2
