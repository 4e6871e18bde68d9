"""What is listed of a graph's collectives, and what ranks compare."""

from typing import Any

import pytest
import torch

from aotdist.partition import partition
from aotdist.passes.collectives import collectives, reads_of_state
from aotdist.program import Graph, Slot
from tests.passes.fsdp_graphs import REPLICA_GROUP, SHARD_GROUP, Layout, record_mlp

C10D = torch.ops._c10d_functional
Call = tuple[Any, ...]
"""An operator, and its arguments behind the first."""


def test_the_list_names_what_each_collective_moves() -> None:
    layout = Layout(2, param_dtype=torch.bfloat16)
    (gather,) = collectives(partition(record_mlp([[(8, 4)]], layout, reshard=False), "default").forward)
    assert (gather.op, gather.group, gather.group_size) == ("all_gather_into_tensor", SHARD_GROUP, 2)
    assert (gather.dtype, gather.numel, gather.num_bytes) == ("bfloat16", 16, 64)
    assert (gather.reduce_op, gather.unit) == (None, "layers.0")


def test_each_group_has_its_own_sequence() -> None:
    joint = record_mlp([[(8, 4)], [(2, 8)]], Layout(2, replicas=2))
    found = collectives(partition(joint, "default").backward)
    assert [c.op for c in found if c.group == SHARD_GROUP][1:] == ["reduce_scatter_tensor"] * 2
    reduced = [c.fingerprint()[:4] for c in found if c.group == REPLICA_GROUP]
    assert reduced == [("all_reduce", "float32", 8, "sum"), ("all_reduce", "float32", 16, "sum")]


def test_a_collective_names_the_state_that_it_holds_and_whose_gradients() -> None:
    joint, state = record_mlp([[(8, 4)], [(2, 8)]], Layout(2, replicas=2)), ("p0", "p1")
    split = partition(joint, "default")
    assert [c.serves for c in collectives(split.forward, state)] == [("p0",), ("p1",)]
    reduced = [c.serves for c in collectives(split.backward, state) if c.group == REPLICA_GROUP]
    assert reduced == [("p1",), ("p0",)]
    assert not any(c.serves for c in collectives(split.forward))


def test_state_is_read_where_it_meets_what_is_none() -> None:
    joint = record_mlp([[(8, 4)], [(2, 8)]], Layout(2))
    assert reads_of_state(joint, ("p1", "p0")) == ("p0", "p1")
    assert reads_of_state(joint, ("p1",)) == ("p1",)


def test_what_lies_in_a_bucket_is_named_in_its_order() -> None:
    def bucket(order: list[int]) -> list[tuple[str, ...]]:
        graph = torch.fx.Graph()
        shards = [graph.placeholder(f"p{number}") for number in range(2)]
        whole = graph.call_function(torch.ops.aten.cat.default, ([shards[number] for number in order],))
        gathered = graph.call_function(C10D.all_gather_into_tensor.default, (whole, 2, "g"))
        graph.output((graph.call_function(C10D.wait_tensor.default, (gathered,)),))
        for node in graph.nodes:
            node.meta["val"] = torch.empty(4, device="meta")
        ins, outs = tuple(Slot("primal", f"p{k}") for k in range(2)), (Slot("output", "out[0]"),)
        found = collectives(Graph(torch.fx.GraphModule({}, graph), ins, outs), ("p0", "p1"))
        return [each.serves for each in found]

    assert (bucket([0, 1]), bucket([1, 0])) == ([("p0", "p1")], [("p1", "p0")])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((C10D.all_reduce.default, "sum", "g"), (C10D.all_reduce.default, "avg", "g")),
        ((C10D.broadcast.default, 0, "g"), (C10D.broadcast.default, 1, "g")),
        ((C10D.all_reduce.default, "sum", "g"), (C10D.all_gather_into_tensor.default, 2, "g")),
    ],
)
def test_what_ranks_must_agree_on_is_in_the_fingerprint(left: Call, right: Call) -> None:
    assert fingerprint(left) == fingerprint(left) != fingerprint(right)


def test_the_size_is_in_the_fingerprint_unless_ranks_may_differ() -> None:
    reduce, exchange = (C10D.all_reduce.default, "sum", "g"), (C10D.all_to_all_single.default, [2], [2], "g")
    assert fingerprint(reduce, 4) != fingerprint(reduce, 8)
    assert fingerprint(exchange, 4) == fingerprint(exchange, 8)


def fingerprint(call: Call, size: int = 4) -> tuple[str, str, int, str]:
    """Of a graph that makes just this call."""
    target, *rest = call
    graph = torch.fx.Graph()
    argument = graph.placeholder("x")
    node = graph.call_function(target, (argument, *rest))
    argument.meta["val"] = node.meta["val"] = torch.empty(size)
    graph.output((node,))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    (found,) = collectives(Graph(gm, (Slot("primal", "x"),), (Slot("output", "out[0]"),)))
    return found.fingerprint()
