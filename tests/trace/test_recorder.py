"""The recorder: every new tensor gets a node, and a tensor that has one keeps it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from aotdist.errors import InternalError, UnsupportedProgram
from aotdist.program import Graph, Slot
from aotdist.torch_seam.functional import FunctionalTensor, FunctionalTensorMode, functional, functional_value
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.operators import OpOverload
from aotdist.trace.recorder import Recorder, RecordOptions

ATEN = torch.ops.aten
X, Y = Slot("primal", "x"), Slot("primal", "y")
ELSEWHERE = torch.ones(3)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder(RecordOptions()) as recorder:
        yield recorder


def argument(recorder: Recorder, slot: Slot, *size: int) -> FunctionalTensor:
    with no_modes():
        example = torch.empty(size)
    return recorder.argument(slot, recorder.fake(example))


def targets(graph: Graph) -> list[Any]:
    return [node.target for node in graph.gm.graph.nodes if node.op == "call_function"]


def test_an_operation_is_a_node(recorder: Recorder) -> None:
    x = argument(recorder, X, 3)
    y = x.sin() + x
    graph = recorder.graph([(Slot("output", "out"), recorder.value(y))])
    assert targets(graph) == [ATEN.sin.default, ATEN.add.Tensor]
    assert graph.ins == (X,) and graph.outs == (Slot("output", "out"),)


def test_every_new_tensor_has_a_node_and_keeps_it(recorder: Recorder) -> None:
    x = argument(recorder, X, 4, 3)
    made = [x, x.t(), x.sin(), *x.split(2), x[0], x.detach(), torch.zeros_like(x)]
    nodes = [recorder.value(tensor) for tensor in made]
    x.exp(), x.t().cos(), made[2] * 2, torch.cat(made[3:5])
    assert [recorder.value(tensor) for tensor in made] == nodes
    assert len(set(nodes)) == len(nodes)


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "in place": lambda x, y: x.mul_(y),
    "through a view": lambda x, y: x[0].add_(1),
    "copy_": lambda x, y: x.copy_(y),
    "out=": lambda x, y: torch.sin(y, out=x),
    "an index": lambda x, y: x.__setitem__(y > 0, 2.0),
    "foreach": lambda x, y: torch._foreach_add_([x], [y]),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_makes_a_new_value_and_leaves_the_old_ones_their_nodes(name: str, recorder: Recorder) -> None:
    x, y = argument(recorder, X, 3, 2), argument(recorder, Y, 3, 2)
    before, other, old = recorder.value(x), recorder.value(y), functional_value(x)
    WRITES[name](x, y)
    after = recorder.value(x)
    assert after is not before and recorder.value(y) is other
    assert functional_value(x) is not old
    assert before.op == "placeholder"
    graph = recorder.graph([(Slot("write", "x"), after)])
    assert not any(isinstance(op, OpOverload) and op._schema.is_mutable for op in targets(graph))


def test_a_view_sees_what_its_base_was_given(recorder: Recorder) -> None:
    x = argument(recorder, X, 3, 2)
    row = x[1]
    before = recorder.value(row)
    x.mul_(2)
    assert recorder.value(row) is not before
    recorder.graph([(Slot("output", "out"), recorder.value(row))])


def test_arguments_may_come_late(recorder: Recorder) -> None:
    x = argument(recorder, X, 3)
    y = x.sin()
    late = argument(recorder, Y, 3)
    graph = recorder.graph([(Slot("output", "out"), recorder.value(y * late))])
    assert [node.op for node in graph.gm.graph.nodes][:2] == ["placeholder", "placeholder"]
    assert graph.ins == (X, Y)


def test_constants_are_nodes(recorder: Recorder) -> None:
    x = argument(recorder, X, 3)
    y = x + torch.tensor([1.0, 2.0, 3.0])
    assert recorder.value(y).target is ATEN.add.Tensor


def test_a_wrapper_that_computes_when_it_is_copied_leaves_no_writes(recorder: Recorder) -> None:
    x, y = argument(recorder, X, 3), argument(recorder, Y, 3)
    two = TwoTensor(x, y)
    two.copy_(two * 2)
    graph = recorder.graph([(Slot("write", "x", ".a"), recorder.value(two.a))])
    assert not any(isinstance(op, OpOverload) and op._schema.is_mutable for op in targets(graph))


def test_a_tensor_from_elsewhere_is_an_error(recorder: Recorder) -> None:
    with pytest.raises(InternalError, match="reached the graph's results"):
        recorder.value(ELSEWHERE)
    with pytest.raises(UnsupportedProgram, match="by a tracer of the program's own"):
        recorder.value(functional(recorder.fake(ELSEWHERE), FunctionalTensorMode()))


def test_nodes_know_where_they_come_from(recorder: Recorder) -> None:
    x = argument(recorder, X, 3)
    with torch.no_grad():
        forward = recorder.value(x.sin())
    recorder.tracer.phase = "backward"
    backward = recorder.value(x.cos())
    assert (forward.meta["phase"], backward.meta["phase"]) == ("forward", "backward")
    assert forward.meta["grad"] is False and "x.sin()" in forward.meta["source"]
