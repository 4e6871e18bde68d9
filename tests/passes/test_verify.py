"""Each invariant notices its own fault, and the error shows where."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from aotdist.errors import InternalError
from aotdist.partition import partition
from aotdist.passes.verify import INVARIANTS, verify, verify_split
from aotdist.program import Graph, Slot
from tests.partition.joint_graphs import record_joint
from tests.passes.fsdp_graphs import Layout, record_mlp

ATEN = torch.ops.aten


def graph() -> Graph:
    joint = record_joint(lambda x: (x.sin().cos().tanh().sum(),), [torch.ones(4, requires_grad=True)])
    for node in joint.gm.graph.nodes:
        node.meta["source"] = "model.py:3   x.sin().cos()"
    return joint


def first(g: Graph, target: object) -> torch.fx.Node:
    return g.gm.graph.find_nodes(op="call_function", target=target)[0]


def unflatten(g: Graph) -> None:
    output = g.gm.graph.output_node()
    output.args = (g.results()[0],)


def return_a_number(g: Graph) -> None:
    g.gm.graph.output_node().args = ((3, *g.results()[1:]),)


def return_less(g: Graph) -> None:
    g.gm.graph.output_node().args = (tuple(g.results()[1:]),)


def argument_too_many(g: Graph) -> None:
    with g.gm.graph.inserting_before(first(g, ATEN.sin.default)):
        g.gm.graph.placeholder("extra").meta["val"] = None


def argument_behind(g: Graph) -> None:
    first(g, ATEN.tanh.default).append(g.placeholders()[-1])


def mutate(g: Graph) -> None:
    node = first(g, ATEN.cos.default)
    node.target = ATEN.cos_.default


def copy_early(g: Graph) -> None:
    node = first(g, ATEN.sin.default)
    with g.gm.graph.inserting_after(node):
        copy = g.gm.graph.call_function(ATEN.copy_.default, (g.placeholders()[0], node))
    copy.meta["val"] = node.meta["val"]


def forget_value(g: Graph) -> None:
    del first(g, ATEN.cos.default).meta["val"]


def use_too_early(g: Graph) -> None:
    first(g, ATEN.cos.default).append(first(g, ATEN.sin.default))


def wait_twice(g: Graph) -> None:
    _collective(g, waits=2)


def wait_never(g: Graph) -> None:
    _collective(g, waits=0)


def _collective(g: Graph, waits: int) -> None:
    c10d = torch.ops._c10d_functional
    node = first(g, ATEN.sin.default)
    with g.gm.graph.inserting_before(node.next):
        start = g.gm.graph.call_function(c10d.all_reduce.default, (node, "sum", "g"))
        start.meta = dict(node.meta)
        for _ in range(waits):
            g.gm.graph.call_function(c10d.wait_tensor.default, (start,)).meta = dict(node.meta)


FAULTS: dict[Callable[[Graph], None], str] = {
    unflatten: "not a flat tuple",
    return_a_number: "returns int for output `out",
    return_less: "returns 1 values for 2 slots",
    argument_too_many: "takes 3 arguments for 2 slots",
    argument_behind: "is an argument behind an operation",
    mutate: "`cos` writes to its argument",
    copy_early: "copies into an argument before the end",
    forget_value: "`cos` has no `val`",
    use_too_early: "`cos` uses `sin` before it is computed",
    wait_twice: "is waited for 2 times",
    wait_never: "is waited for 0 times",
}


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_named(spoil: Callable[[Graph], None]) -> None:
    broken = graph()
    verify(broken, after="recording")
    spoil(broken)
    with pytest.raises(InternalError) as caught:
        verify(broken, after="spoiling")
    assert FAULTS[spoil] in str(caught.value)
    assert any(invariant in str(caught.value) for invariant in INVARIANTS)


def test_the_error_shows_the_neighbours_and_the_users_line() -> None:
    broken = graph()
    forget_value(broken)
    with pytest.raises(InternalError) as caught:
        verify(broken, after="a pass")
    text = str(caught.value)
    assert "-> %cos" in text and "%sin" in text and "%tanh" in text
    assert "at model.py:3   x.sin().cos()" in text
    assert text.count("%") < 60


def test_copies_into_arguments_may_end_a_graph() -> None:
    g = graph()
    sin = first(g, ATEN.sin.default)
    with g.gm.graph.inserting_before(g.gm.graph.output_node()):
        copy = g.gm.graph.call_function(ATEN.copy_.default, (g.placeholders()[0], sin))
    copy.meta["val"] = sin.meta["val"]
    verify(g, after="the end")


def test_two_arguments_of_one_name_are_noticed() -> None:
    g = graph()
    with pytest.raises(InternalError, match="same slot"):
        verify(Graph(g.gm, (g.ins[0], g.ins[0]), g.outs), after="renaming")


def test_a_split_whose_halves_disagree_is_noticed() -> None:
    split = partition(graph(), "default")
    verify_split(split)
    swapped = dataclasses.replace(split, saved=split.saved[::-1])
    with pytest.raises(InternalError, match="the forward saves"):
        verify_split(swapped)
    half = split.backward
    backward = Graph(half.gm, half.ins[::-1], half.outs)
    with pytest.raises(InternalError, match="the backward takes"):
        verify_split(dataclasses.replace(split, backward=backward))
    primals = {slot: Slot("primal", "elsewhere") for slot in split.saved_primals}
    with pytest.raises(InternalError, match="no arguments"):
        verify_split(dataclasses.replace(split, saved_primals=primals))


def test_collectives_that_are_waited_for_pass() -> None:
    verify(record_mlp([[(4, 4)]], Layout(2)), after="recording")
