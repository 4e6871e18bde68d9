"""The law of backwards: what is derived for a request equals eager's gradient of these results alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from aotdist.facts import BackwardFacts, Facts, Fresh, NodeOut, OutputFact, Untouched
from aotdist.partition.gates import Gate
from aotdist.partition.policy import partition
from aotdist.program import Graph, NodeOutIdx, OutIdx, PrimalIdx, Row, Slot
from aotdist.runtime.derive import BackwardRequest, Joint, compiled_ahead, derive, without_choices
from aotdist.subclasses.protocol import recipe_of
from tests.partition.joint_graphs import record_joint

Fn = Callable[..., Sequence[torch.Tensor]]

PROGRAMS: dict[str, Fn] = {
    "results that share": lambda x, w: ((h := (x * w).sin()), (h @ w.t()).exp(), h.sum()),
    "results that share nothing": lambda x, w: (x.sin(), w.exp(), (x * x).sum()),
    "sums": lambda x, w: ((x + w) + x * 2, x + w, (x + w).mean()),
    "a loss beside results": lambda x, w: ((y := x @ w.t()), y.softmax(-1), y.logsumexp(-1).sum()),
}


def joint_of(fn: Fn, primals: Sequence[torch.Tensor]) -> Joint:
    """What `derive` is given, made without a trace of ours."""
    recorded = record_joint(fn, primals)
    split = partition(recorded, "default")
    outs = list(fn(*primals))
    tangents = [Slot("tangent", f"t{k}") for k in range(len(outs))]
    named = {slot: Slot("tangent", f"out[{k}]") for k, slot in enumerate(tangents)}

    def renamed(graph: Graph) -> Graph:
        return Graph(graph.gm, tuple(named.get(slot, slot) for slot in graph.ins), graph.outs)

    recorded, backward = renamed(recorded), renamed(split.backward)
    num = len(primals)
    facts = Facts(
        inputs=Row([Untouched()] * num),
        outputs=Row[OutIdx, OutputFact](Fresh(NodeOutIdx(k)) for k in range(len(outs))),
        order=tuple(map(OutIdx, range(len(outs)))),
        node_outs=Row(
            NodeOut(Slot("output", f"out[{k}]"), recipe_of(out), differentiable=True)
            for k, out in enumerate(outs)
        ),
        recipes=Row(map(recipe_of, primals)),
        backward=BackwardFacts(grads=Row(map(recipe_of, primals))),
    )
    ins = Row[PrimalIdx, Slot](Slot("primal", f"p{k}") for k in range(num))
    halves = type(split)(split.forward, backward, split.saved, split.saved_primals, split.saved_bytes)
    whole = without_choices(backward, facts, ins)
    return Joint(recorded, recorded, backward, whole, halves, facts, ins)


def run(
    joint: Joint, graph: Graph, primals: Sequence[torch.Tensor], grads: dict[Slot, torch.Tensor]
) -> list[Any]:
    """The results of a backward, from what the forward saves."""
    forward = joint.split.forward
    given = dict(zip((Slot("primal", f"p{k}") for k in range(len(primals))), primals, strict=True))
    with torch.no_grad():
        results = dict(zip(forward.outs, forward.gm(*(given[slot] for slot in forward.ins)), strict=True))
        held = {slot: given[at] for slot, at in joint.split.saved_primals.items()} | results | grads
        return list(graph.gm(*(held[slot] for slot in graph.ins)))


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_of_some_results(name: str) -> None:
    fn, primals = PROGRAMS[name], inputs()
    joint = joint_of(fn, primals)
    for size in (1, 2, 3):
        for some in itertools.combinations(map(NodeOutIdx, range(3)), size):
            outs = list(fn(*primals))
            given = {idx: torch.randn_like(outs[idx]) for idx in some}
            expected = torch.autograd.grad(
                [outs[idx] for idx in some], primals, list(given.values()), allow_unused=True
            )
            graph = derive(joint, BackwardRequest(some)).graph
            gradients = {Slot("tangent", f"out[{idx}]"): grad for idx, grad in given.items()}
            assert {slot for slot in graph.ins if slot.role == "tangent"} <= gradients.keys()
            found = run(joint, graph, primals, gradients)
            for one, other in zip(found, expected, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)


def test_the_one_that_is_compiled_ahead_is_of_the_loss() -> None:
    primals = inputs()
    joint = joint_of(PROGRAMS["a loss beside results"], primals)
    assert compiled_ahead(joint) == BackwardRequest((NodeOutIdx(2),))
    assert compiled_ahead(joint_of(lambda x, w: (x.sin(), w.exp()), primals)).results == (0, 1)


def test_requests_of_the_same_backward_are_one() -> None:
    gate = Gate(1, (NodeOutIdx(1),), ((0, 0),))
    one, other = (BackwardRequest((NodeOutIdx(1),), watched=True, gate=gate) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != BackwardRequest((NodeOutIdx(1),), watched=True)


def test_without_a_trace_there_are_no_other_kinds() -> None:
    primals = inputs()
    joint = joint_of(PROGRAMS["sums"], primals)
    request = BackwardRequest((NodeOutIdx(0),), kinds=(recipe_of(primals[0]),))
    with pytest.raises(Exception, match="other kinds than the results, and the trace cannot run"):
        derive(joint, request)
