"""Laws of both policies on random joint graphs."""

import pytest
import torch
from hypothesis import given
from torch.fx import Node

from aotdist.partition import partition
from aotdist.partition.policy import Policy
from aotdist.partition.traits import is_getitem, is_random, is_view, view_base
from aotdist.passes.verify import verify, verify_split
from aotdist.program import Graph, Split
from tests.partition.random_joints import Recipe, build_joint, random_arguments, recipes
from tests.partition.running import assert_same_bits, run_joint, run_split

POLICIES: list[Policy] = ["default", "min_cut"]


def computed(split: Split) -> set[str]:
    return {slot.path.removeprefix("%") for slot in split.saved if slot not in split.saved_primals}


def run_twice(split: Split) -> set[str]:
    """Names of the operators that are in both halves."""
    return _called(split.forward) & _called(split.backward)


def _called(graph: Graph) -> set[str]:
    return {n.name for n in graph.gm.graph.nodes if n.op == "call_function"}


def by_name(joint: Graph) -> dict[str, Node]:
    return {n.name: n for n in joint.gm.graph.nodes}


@pytest.mark.parametrize("policy", POLICIES)
@given(recipe=recipes())
def test_the_halves_compute_what_the_joint_graph_computes(policy: Policy, recipe: Recipe) -> None:
    joint = build_joint(recipe)
    split = partition(joint, policy)
    verify(split.forward, after="partition")
    verify(split.backward, after="partition")
    verify_split(split)
    args = random_arguments(joint)
    torch.manual_seed(7)
    expected = run_joint(joint, args)
    torch.manual_seed(7)
    assert_same_bits(run_split(split, joint, [a.clone() for a in args]), expected)


@given(recipe=recipes(most=20))
def test_min_cut_never_saves_more_than_default(recipe: Recipe) -> None:
    joint = build_joint(recipe)
    assert partition(joint, "min_cut").saved_bytes <= partition(joint, "default").saved_bytes


@pytest.mark.parametrize("policy", POLICIES)
@given(recipe=recipes(most=20))
def test_tags_and_random_draws_are_honoured(policy: Policy, recipe: Recipe) -> None:
    joint = build_joint(recipe)
    split = partition(joint, policy)
    nodes = by_name(joint)
    pinned = {view_base(n) for n in nodes.values() if n.meta.get("policy") == "must_save"}
    assert not any(is_random(nodes[name]) for name in run_twice(split))
    assert not any(nodes[name] in pinned for name in run_twice(split))
    for name in computed(split):
        node = nodes[name]
        tagged = node.meta.get("policy") == "must_recompute"
        drawn = is_getitem(node) and is_random(node.all_input_nodes[0])
        assert not tagged or node in pinned or drawn
        assert not is_view(node)
        assert isinstance(node.meta["val"], torch.Tensor)


@given(recipe=recipes(most=20))
def test_default_runs_nothing_twice_but_views_and_tagged_values(recipe: Recipe) -> None:
    joint = build_joint(recipe)
    nodes = by_name(joint)
    for name in run_twice(partition(joint, "default")):
        node = nodes[name]
        source = node.all_input_nodes[0] if is_getitem(node) else node
        assert is_view(node) or source.meta.get("policy") == "must_recompute" or "policy" in node.meta


@pytest.mark.parametrize("policy", POLICIES)
@given(recipe=recipes())
def test_the_joint_graph_is_left_as_it_was(policy: Policy, recipe: Recipe) -> None:
    joint = build_joint(recipe)
    before = (joint.gm.code, [dict(n.meta) for n in joint.gm.graph.nodes])
    partition(joint, policy)
    assert before == (joint.gm.code, [dict(n.meta) for n in joint.gm.graph.nodes])
