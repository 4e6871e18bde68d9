"""Nodes that a rewrite put in learn where they come from."""

import torch

from aotdist.codegen.inductor_rewrites import restore_provenance
from aotdist.program import Graph
from tests.codegen.captured import calls, captured

FORWARD = {"phase": "forward", "source": "model.py:3   x.sin()", "module": "a", "seq_nr": 1}
BACKWARD = {"phase": "backward", "source": "model.py:3   x.sin()", "module": "a", "seq_nr": 1}


def labelled(known: dict[int, dict[str, object]]) -> tuple[Graph, list[torch.fx.Node]]:
    """x -> sin -> exp; exp * tangent -> neg; only the nodes in `known` carry labels."""
    graph = captured(
        lambda x, tangent: [x.sin().exp(), (x.sin().exp() * tangent).neg()],
        [torch.ones(2), torch.ones(2)],
        in_roles=["primal", "tangent"],
    )
    nodes = calls(graph)
    assert [node.name for node in nodes] == ["sin", "exp", "sin_1", "exp_1", "mul", "neg"]
    for position, labels in known.items():
        nodes[position].meta.update(labels)
    restore_provenance(graph)
    return graph, nodes


def test_what_reads_a_tangent_is_backward():
    _, nodes = labelled({})
    assert [node.meta["phase"] for node in nodes] == ["forward"] * 4 + ["backward"] * 2


def test_labels_come_from_what_a_node_reads():
    _, nodes = labelled({0: FORWARD})
    assert nodes[1].meta["source"] == FORWARD["source"] and nodes[1].meta["seq_nr"] == 1
    assert "source" not in nodes[2].meta


def test_else_from_what_reads_it():
    _, nodes = labelled({3: FORWARD})
    assert nodes[2].meta["module"] == "a"


def test_labels_never_cross_from_forward_to_backward():
    _, nodes = labelled({3: FORWARD})
    assert "source" not in nodes[4].meta
    _, nodes = labelled({4: BACKWARD})
    assert nodes[5].meta["source"] == BACKWARD["source"]
    assert "source" not in nodes[3].meta


def test_labels_that_are_there_stay():
    _, nodes = labelled({i: {**FORWARD, "source": str(i)} for i in range(6)})
    assert [node.meta["source"] for node in nodes] == [str(i) for i in range(6)]
    assert {node.meta["phase"] for node in nodes} == {"forward"}
