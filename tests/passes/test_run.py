"""Running the passes of a stage: order, records, switches, verification."""

import pytest
import torch

from aotdist.errors import BadSettings, InternalError
from aotdist.passes import run
from aotdist.passes.run import ORDER, PASS_NAMES, run_passes
from aotdist.program import Graph
from aotdist.settings import Settings
from tests.partition.joint_graphs import record_joint


def graph() -> Graph:
    return record_joint(lambda x: (x.tanh().sum(),), [torch.ones(4, requires_grad=True)])


def test_every_pass_is_recorded_with_its_size_and_time() -> None:
    joint = graph()
    cleaned, (record, *others) = run_passes(joint, "joint", Settings())
    assert (record.stage, record.name) == ("joint", "cleanup")
    assert [other.name for other in others] == [step.__name__ for step in ORDER["joint"][1:]]
    assert record.nodes_before == len(joint.gm.graph.nodes)
    assert record.nodes_after == len(cleaned.gm.graph.nodes) < record.nodes_before
    assert record.seconds > 0


def test_a_disabled_pass_does_not_run() -> None:
    joint = graph()
    given, records = run_passes(joint, "joint", Settings(disabled_passes=frozenset({"cleanup"})))
    assert given is joint
    assert "cleanup" not in {record.name for record in records}


def test_an_unknown_name_is_refused_with_a_near_miss() -> None:
    with pytest.raises(BadSettings, match="did you mean `bucket`"):
        run_passes(graph(), "joint", Settings(disabled_passes=frozenset({"buckets"})))
    with pytest.raises(BadSettings, match=f"passes are {', '.join(PASS_NAMES)}"):
        run_passes(graph(), "joint", Settings(disabled_passes=frozenset({"xyz"})))


def test_every_stage_lists_its_passes_once() -> None:
    for steps in ORDER.values():
        assert len({step.__name__ for step in steps}) == len(steps)


def test_a_pass_that_breaks_the_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(given: Graph, settings: Settings) -> Graph:
        for node in given.gm.graph.nodes:
            node.meta.pop("val", None)
        return given

    monkeypatch.setattr(run, "ORDER", {"joint": (spoil,)})
    with pytest.raises(InternalError, match="after joint pass `spoil`"):
        run_passes(graph(), "joint", Settings())
    run_passes(graph(), "joint", Settings(verify=False))
