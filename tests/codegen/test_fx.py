"""The reference emitter: equal to eager bit for bit, frees what it can, reads well, is fast."""

import gc
import linecache
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aotdist.codegen.fx import FxBackend, print_graph
from aotdist.errors import InternalError
from aotdist.program import Graph, Slot
from aotdist.torch_seam.modes import TorchDispatchMode
from tests.codegen.captured import branching, calls, captured, emission
from tests.work import calls_of

SIZE = 4


def run(graph: Graph, inputs: list[torch.Tensor]) -> Any:
    return FxBackend().emit(graph, emission(graph)).call(list(inputs))


def assert_bit_equal(actual: Any, expected: Any) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours.nan_to_num(nan=12345.0), theirs.nan_to_num(nan=12345.0))


Step = tuple[Callable[..., torch.Tensor], int]
STEPS: list[Step] = [
    (torch.add, 2),
    (torch.mul, 2),
    (torch.mm, 2),
    (torch.where, 3),
    (lambda x: x.t(), 1),
    (lambda x: x.sum(0, keepdim=True).expand(SIZE, SIZE), 1),
    (lambda x: x.softmax(-1), 1),
    (lambda x: torch.cat([chunk for chunk in x.chunk(2)][::-1]), 1),
    (lambda x: torch.topk(x, 2).values.repeat(1, 2), 1),
    (lambda x: x.masked_fill(x > 0, float("-inf")), 1),
    (lambda x: x[:, [2, 0, 3, 1]], 1),
    (lambda x: torch.full_like(x, float("nan"), dtype=torch.float32), 1),
    (lambda x: x.to(torch.bfloat16).float(), 1),
    (lambda x: x.contiguous(memory_format=torch.contiguous_format) - 0.1, 1),
    (lambda x: torch.arange(SIZE, dtype=torch.float32, device="cpu") + x, 1),
    (lambda x: x.clamp(min=-1e-30, max=1e30), 1),
]


@st.composite
def programs(draw: st.DrawFn) -> Callable[..., list[torch.Tensor]]:
    """A random straight-line function of three square matrices."""
    steps: list[tuple[Callable[..., torch.Tensor], list[int]]] = []
    for known in range(3, 3 + draw(st.integers(1, 12))):
        fn, arity = draw(st.sampled_from(STEPS))
        steps.append((fn, draw(st.lists(st.integers(0, known - 1), min_size=arity, max_size=arity))))
    returned = draw(st.lists(st.integers(0, 2 + len(steps)), min_size=1, max_size=4))

    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        values = list(inputs)
        for fn, sources in steps:
            arguments = [values[i] for i in sources]
            values.append(fn(arguments[0] > 0, *arguments[1:]) if fn is torch.where else fn(*arguments))
        return [values[i] for i in returned]

    return program


@hypothesis.given(program=programs())
def test_random_programs_are_bit_equal_to_eager(program: Callable[..., list[torch.Tensor]]):
    inputs = [torch.randn(SIZE, SIZE) for _ in range(3)]
    assert_bit_equal(run(captured(program, inputs), inputs), program(*inputs))


def test_the_argument_list_is_emptied():
    graph = captured(lambda x, y: [x + y], [torch.ones(2), torch.ones(2)])
    arguments = [torch.ones(2), torch.ones(2)]
    FxBackend().emit(graph, emission(graph)).call(arguments)
    assert arguments == []


class Census(TorchDispatchMode):
    """Notes, before each operator, which of the watched tensors are still alive."""

    def __init__(self, watched: list[weakref.ref[torch.Tensor]]) -> None:
        super().__init__()
        self.watched = watched
        self.alive: list[tuple[str, list[bool]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.alive.append((str(func), [ref() is not None for ref in self.watched]))
        return func(*args, **kwargs or {})


def test_each_argument_and_local_dies_after_its_last_use():
    def program(x: torch.Tensor, y: torch.Tensor, unused: torch.Tensor) -> list[torch.Tensor]:
        return [((x.sin() * y).cos() - 1.0).exp()]

    graph = captured(program, [torch.ones(3)] * 3)
    call = FxBackend().emit(graph, emission(graph)).call
    arguments = [torch.ones(3) for _ in range(3)]
    census = Census([weakref.ref(tensor) for tensor in arguments])
    with census:
        call(arguments)
    assert census.alive == [
        ("aten.sin.default", [True, True, False]),
        ("aten.mul.Tensor", [False, True, False]),
        ("aten.cos.default", [False, False, False]),
        ("aten.sub.Tensor", [False, False, False]),
        ("aten.exp.default", [False, False, False]),
    ]


def test_modes_see_every_operator():
    graph = captured(lambda x, y: [x @ y], [torch.ones(2, 3), torch.ones(3, 5)])
    with FlopCounterMode(display=False) as flops:
        run(graph, [torch.ones(2, 3), torch.ones(3, 5)])
    assert flops.get_total_flops() == 2 * 2 * 3 * 5


def test_absent_repeated_and_passed_through_results():
    graph = captured(lambda x, y: [x, x + y, y, x], [torch.ones(2), torch.ones(2)])
    first, total, second, again = graph.results()
    graph.gm.graph.output_node().args = ((first, None, total, total, second, again),)
    graph = Graph(graph.gm, graph.ins, tuple(Slot("output", f"out[{i}]") for i in range(6)))
    x, y = torch.ones(2), torch.full((2,), 2.0)
    results = run(graph, [x, y])
    assert results[0] is x and results[5] is x and results[4] is y
    assert results[1] is None
    assert results[2] is results[3]


def test_a_graph_without_arguments():
    assert_bit_equal(run(captured(lambda: [torch.arange(3)], []), []), [torch.arange(3)])


def test_tensor_constants_are_bound_not_copied():
    constant = torch.tensor([1.0, 2.0])
    graph = captured(lambda x: [x * 1], [torch.ones(2)])
    graph.gm.register_buffer("table", constant)
    (node,) = calls(graph)
    with graph.gm.graph.inserting_before(node):
        node.args = (node.args[0], graph.gm.graph.get_attr("table"))
    assert_bit_equal(run(graph, [torch.full((2,), 3.0)]), [torch.tensor([3.0, 6.0])])
    assert any(value is constant for value in print_graph(graph).bound.values())


def test_locals_and_bound_names_do_not_collide():
    graph = captured(lambda x, y: [x.masked_fill(y, float("inf"))], [torch.ones(2), torch.ones(2).bool()])
    for names in (["inf", "aten_masked_fill_Scalar"], ["args", "args_1"], ["forward", "inf_1"]):
        for node, name in zip(graph.placeholders(), names, strict=True):
            node.name = name
        result = run(graph, [torch.ones(2), torch.tensor([True, False])])
        assert result[0].tolist() == [float("inf"), 1.0]


def test_any_python_function_can_be_a_target():
    graph = captured(lambda x: [x + 1], [torch.ones(2)])
    (node,) = calls(graph)
    node.target = lambda x, amount: {"sum": [x, (amount, slice(0, 1))]}
    (result,) = run(graph, [torch.ones(2)])
    assert result["sum"][1] == (1, slice(0, 1))


def test_nested_arguments_of_every_shape():
    graph = captured(lambda x: [x + 1], [torch.ones(2)])
    (node,) = calls(graph)
    (placeholder,) = graph.placeholders()
    node.target = lambda *args, **kwargs: (args, kwargs)
    given = ([placeholder, None], (), (1,), {"key": (placeholder, ...)}, slice(None, 3), "it's", 2.5, 1j)
    node.args, node.kwargs = given, {"dtype": torch.int8, "device": torch.device("cpu"), "dim": (0, -1)}
    x = torch.ones(2)
    ((args, kwargs),) = run(graph, [x])
    assert args == ([x, None], (), (1,), {"key": (x, ...)}, slice(None, 3), "it's", 2.5, 1j)
    assert kwargs == {"dtype": torch.int8, "device": torch.device("cpu"), "dim": (0, -1)}


def test_a_branch_runs_its_graphs():
    graph = captured(branching, [torch.ones(3)])
    assert "(true_graph_0 if gt else false_graph_0)(x_1,)" in print_graph(graph).source
    for x in (torch.ones(3), -torch.ones(3)):
        assert_bit_equal(run(graph, [x]), [x.sin() if x.sum() > 0 else x.cos()])


class Refused(Exception):
    pass


def refuse(tensor: torch.Tensor, amount: float) -> torch.Tensor:
    raise Refused(amount)


def test_exceptions_pass_through_and_show_the_printed_line():
    graph = captured(lambda x: [x + 1], [torch.ones(2)])
    (node,) = calls(graph)
    node.target = refuse
    with pytest.raises(Refused) as caught:
        run(graph, [torch.ones(2)])
    shown = "".join(traceback.format_exception(caught.value))
    assert "add = refuse(x_1, 1)" in shown
    assert "<aotdist test inference" in shown


def test_printed_source_leaves_linecache_with_the_function():
    graph, before = captured(lambda x: [x + 1], [torch.ones(2)]), set(linecache.cache)
    emitted = FxBackend().emit(graph, emission(graph))
    (filename,) = set(linecache.cache) - before
    assert "".join(linecache.getlines(filename)) == emitted.source
    del emitted
    gc.collect()
    assert filename not in linecache.cache


def test_source_names_slots_lines_and_modules():
    graph = captured(lambda x, w: [(x @ w).relu()], [torch.ones(2, 3), torch.ones(3, 4)])
    graph = Graph(graph.gm, (Slot("primal", "args[0]"), Slot("primal", "proj.weight")), graph.outs)
    for node in calls(graph):
        node.meta |= {"source": "model.py:88   return x @ w", "module": "layers.0.proj"}
    assert print_graph(graph).source == SOURCE


SOURCE = """\
def forward(args):
    (
        x_1,  # args[0] f32[2, 3]
        w_1,  # proj.weight f32[3, 4]
    ) = args
    args.clear()
    # layers.0.proj   model.py:88   return x @ w
    mm = aten_mm(x_1, w_1); del x_1, w_1  # f32[2, 4]
    relu = aten_relu(mm); del mm  # f32[2, 4]
    return (
        relu,  # out[0]
    )
"""


def test_emitting_changes_nothing_of_the_graph():
    graph = captured(lambda x: [x.sin().cos()], [torch.ones(2)])
    before = [(node.name, node.args, dict(node.meta)) for node in graph.gm.graph.nodes]
    FxBackend().emit(graph, emission(graph))
    assert [(node.name, node.args, dict(node.meta)) for node in graph.gm.graph.nodes] == before


def test_modules_in_a_functional_graph_are_our_bug():
    graph = captured(lambda x: [x + 1], [torch.ones(2)])
    graph.gm.add_module("linear", torch.nn.Linear(2, 2))
    (node,) = calls(graph)
    node.op, node.target, node.args = "call_module", "linear", graph.placeholders()
    with pytest.raises(InternalError, match="call_module"):
        FxBackend().emit(graph, emission(graph))


def chain(length: int) -> Graph:
    """`length` additions, each of the two values before it."""
    nodes = torch.fx.Graph()
    values = [nodes.placeholder("x"), nodes.placeholder("y")]
    for _ in range(length):
        values.append(nodes.call_function(torch.ops.aten.add.Tensor, tuple(values[-2:])))
    nodes.output((values[-1],))
    gm = torch.fx.GraphModule({}, nodes)
    return Graph(gm, (Slot("primal", "x"), Slot("primal", "y")), (Slot("output", "out"),))


@pytest.mark.sweep
def test_work_of_printing_grows_with_the_nodes_and_no_faster():
    def emit(graph: Graph) -> Callable[..., Any]:
        return FxBackend().emit(graph, emission_without_values()).call

    small, large = chain(10_000), chain(40_000)
    assert calls_of(lambda: emit(large)) < 4.5 * calls_of(lambda: emit(small))
    assert emit(large)([torch.zeros(1), torch.zeros(1)])[0].item() == 0.0


def emission_without_values() -> Any:
    return emission(captured(lambda x: [x + 1], [torch.ones(2)]))


def test_what_rewrites_left_as_a_number_is_not_overwritten() -> None:
    graph = captured(lambda x: [x - x], [torch.randn(4)])
    graph = Graph(graph.gm, graph.ins, (Slot("write", "args[0]"),))
    (node,) = calls(graph)
    node.args = (1, node.args[1])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    (result,) = FxBackend().emit(graph, emission(graph)).call([x])
    assert result is x and x.tolist() == [0.0, -1.0, -2.0, -3.0]
