"""What a split promises: names, order, constants, metadata."""

import torch

from aotdist.partition import partition
from aotdist.program import Graph
from tests.partition.joint_graphs import record_joint

TABLE = torch.arange(4.0)


def joint() -> Graph:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((x * TABLE).sin() * w).sum(), (x + 1).exp()

    graph = record_joint(fn, [torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)])
    for node in graph.gm.graph.nodes:
        node.meta["source"] = f"model.py:{node.name}"
    return graph


def roles(slots: tuple) -> list[str]:  # type: ignore[type-arg]
    return [slot.role for slot in slots]


def test_arguments_and_results_stand_in_the_documented_order() -> None:
    split = partition(joint(), "default")
    assert roles(split.forward.ins) == ["primal", "primal"]
    assert roles(split.forward.outs) == ["output", "output", *["saved"] * (len(split.saved) - 1)]
    assert split.backward.ins[: len(split.saved)] == split.saved
    assert roles(split.backward.ins[len(split.saved) :]) == ["tangent", "tangent"]
    assert roles(split.backward.outs) == ["grad", "grad"]


def test_primals_come_first_and_name_themselves() -> None:
    split = partition(joint(), "default")
    first = split.saved[0]
    assert split.saved_primals == {first: split.forward.ins[1]}
    assert (first.path, first.inner) == (split.forward.ins[1].path, split.forward.ins[1].inner)
    assert all(slot.path.startswith("%") for slot in split.saved[1:])


def test_names_and_metadata_are_kept() -> None:
    whole = joint()
    known = {n.name: n for n in whole.gm.graph.nodes}
    split = partition(whole, "default")
    for half in (split.forward, split.backward):
        for node in half.gm.graph.nodes:
            if node.op != "output":
                assert node.meta["source"] == known[node.name].meta["source"]
                assert node.meta["val"] is known[node.name].meta["val"]


def test_both_halves_carry_the_constants_that_they_read() -> None:
    split = partition(joint(), "default")
    for half in (split.forward, split.backward):
        (constant,) = half.gm.graph.find_nodes(op="get_attr")
        assert torch.equal(half.gm.get_buffer(constant.target), TABLE)


def test_what_runs_again_runs_right_before_its_first_use() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for part in w.view(2, 2, 2).unbind():
            x = (x @ part).tanh()
        return (x.sum(),)

    split = partition(
        record_joint(fn, [torch.ones(2, 2, requires_grad=True), torch.ones(8, requires_grad=True)]), "default"
    )
    order = {n: i for i, n in enumerate(split.backward.gm.graph.nodes)}
    forward = {n.name for n in split.forward.gm.graph.nodes}
    for node in split.backward.gm.graph.nodes:
        if node.op == "call_function" and node.name in forward:
            again = {n for n in order if n.name in forward}
            first = min((u for u in node.users), key=order.__getitem__)
            between = [n for n in order if order[node] < order[n] < order[first]]
            assert all(n in again for n in between), node
