"""The min-cut policy: best among all choices on small graphs, and each of its limits."""

import itertools
from collections.abc import Callable, Iterable

import torch
from hypothesis import given
from torch.fx import Node

from aotdist.partition import partition
from aotdist.partition.halves import Halves, find_halves
from aotdist.partition.min_cut import Problem, min_cut_saved
from aotdist.partition.policy import default_saved
from aotdist.partition.recomputable import LONGEST_CHAIN
from aotdist.partition.split import saved_bytes
from aotdist.program import Graph, Split
from tests.partition.joint_graphs import record_joint
from tests.partition.random_joints import Recipe, build_joint, recipes

KIB = 1024


def grad(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def computed(split: Split) -> list[str]:
    return [s.path.removeprefix("%") for s in split.saved if s not in split.saved_primals]


def run_again(split: Split) -> list[Node]:
    forward = {n.name for n in split.forward.gm.graph.nodes}
    return [n for n in split.backward.gm.graph.nodes if n.op == "call_function" and n.name in forward]


def longest_chain(nodes: Iterable[Node]) -> int:
    lengths: dict[Node, int] = {}
    for node in nodes:
        lengths[node] = 1 + max((lengths.get(i, 0) for i in node.all_input_nodes), default=0)
    return max(lengths.values())


def cut(fn: Callable[..., torch.Tensor], *primals: torch.Tensor) -> Split:
    return partition(record_joint(lambda *args: (fn(*args),), primals), "min_cut")


def cheapest_by_trying_all(halves: Halves) -> int:
    """Fewest bytes over every set of values that the backward can start from."""
    problem = Problem.of(halves, default_saved(halves))
    candidates = [n for n in problem.items if problem.may_be_saved(n)]
    sets = itertools.chain.from_iterable(
        itertools.combinations(candidates, size) for size in range(len(candidates) + 1)
    )
    return min(saved_bytes(halves, s) for s in sets if can_start_from(halves, problem, s))


def can_start_from(halves: Halves, problem: Problem, saved: Iterable[Node]) -> bool:
    available = set(saved)
    pending = [n for n in halves.boundary() if n not in available]
    while pending:
        node = pending.pop()
        if node in problem.fixed:
            return False
        pending += [i for i in node.all_input_nodes if i not in available]
    return True


@given(recipe=recipes(most=8))
def test_no_other_choice_saves_fewer_bytes(recipe: Recipe) -> None:
    halves = find_halves(build_joint(recipe))
    assert saved_bytes(halves, min_cut_saved(halves)) == cheapest_by_trying_all(halves)


def test_a_pointwise_chain_is_made_again_from_its_cheapest_link() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = (x @ w).sin().cos().tanh().exp()
        return (wide @ w.t()).sum()

    split = cut(fn, grad(8, 4), grad(4, 64))
    assert computed(split) == ["mm"]
    assert split.saved_bytes == 8 * 64 * 4


def test_low_precision_is_saved_rather_than_its_wide_copy() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = (x @ w).float()
        return (h * h.sin()).sum()

    split = cut(fn, grad(8, 8).detach().bfloat16().requires_grad_(), grad(8, 8).detach().bfloat16())
    assert computed(split) == ["mm"]
    assert split.saved_bytes == 8 * 8 * 2


def test_a_residual_stream_is_saved_although_its_increments_are_smaller() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x + (x.tanh().bfloat16() @ w).float()
        return x.sum()

    split = cut(fn, grad(8, 8), grad(8, 8).detach().bfloat16().requires_grad_())
    assert split.saved_bytes == 3 * 8 * 8 * 4
    assert not any(n.target is torch.ops.aten.add.Tensor for n in run_again(split))


def test_of_about_as_many_bytes_those_are_saved_that_lie_in_memory_anyway() -> None:
    """The logits and a number for each row, rather than what a kernel would write for it."""

    def fn(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = x @ w
        shifted = logits - logits.amax(1, keepdim=True)
        return shifted.gather(1, labels).sum() + shifted.exp().sin().sum()

    split = cut(fn, grad(8, 8), grad(8, 256), torch.zeros(8, 1, dtype=torch.int64))
    assert "mm" in computed(split)
    assert all(slot.path in ("%mm", "%amax") for slot in split.saved if slot not in split.saved_primals)


def test_no_chain_is_longer_than_the_limit() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3 * LONGEST_CHAIN):
            x = x.sin()
        return x.sum()

    split = cut(fn, grad(8))
    assert len(computed(split)) == 2
    assert longest_chain(run_again(split)) == LONGEST_CHAIN


def test_a_copy_of_an_argument_is_not_made_again() -> None:
    split = cut(lambda x, w: (x.clone().sin() * w).sum(), grad(8), grad(8))
    assert computed(split) == ["clone"]


def test_the_source_of_a_write_is_not_made_again() -> None:
    def fn(x: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        updated = buffer.sin()
        return (x * updated.cos()).sum(), updated

    split = partition(record_joint(fn, [grad(8), torch.ones(8)], writes=[1]), "min_cut")
    assert not any(n.target is torch.ops.aten.sin.default for n in run_again(split))


def test_an_output_that_eager_saves_costs_nothing() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ w).exp()
        return y, (y * w).sum()

    split = partition(_joint(fn, grad(8, 8), grad(8, 8)), "min_cut")
    assert computed(split) == ["exp"]
    assert split.saved_bytes == 0


def test_an_output_that_eager_does_not_save_is_left_to_the_caller() -> None:
    split = partition(
        _joint(lambda x, w: (x @ w + 1, (x @ w + 1).cos().sum()), grad(8, 8), grad(8, 8)), "min_cut"
    )
    assert "add" not in computed(split)

    def reads_its_output(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ w).sin()
        return y, (y + 1).cos().sum()

    split = partition(_joint(reads_its_output, grad(8, 8), grad(8, 8)), "min_cut")
    assert computed(split) == ["mm"]  # from which `sin`, the output, and `add` are made again


def test_a_must_save_tag_stops_recomputation() -> None:
    joint = _joint(lambda x, w: (((x @ w).sin().cos()) @ w).sum().unsqueeze(0), grad(8, 8), grad(8, 8))
    free = set(computed(partition(joint, "min_cut")))
    for node in joint.gm.graph.nodes:
        if node.target is torch.ops.aten.cos.default:
            node.meta["policy"] = "must_save"
    assert set(computed(partition(joint, "min_cut"))) - free == {"cos"}


def test_rope_and_gating_save_what_the_library_calls_give() -> None:
    def fn(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return ((torch.nn.functional.silu(h @ gate) * (h @ up)) @ down).sum()

    split = cut(fn, grad(16, 8), grad(8, 32), grad(8, 32), grad(32, 8))
    assert computed(split) == ["rsqrt", "mm", "mm_1"]


def _joint(fn: Callable[..., object], *primals: torch.Tensor) -> Graph:
    def flat(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = fn(*args)
        return out if isinstance(out, tuple) else (out,)  # type: ignore[return-value]

    return record_joint(flat, primals)
