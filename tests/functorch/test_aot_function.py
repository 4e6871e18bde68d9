"""`aot_function` against eager and against PyTorch's own."""

from __future__ import annotations

from typing import Any

import functorch.compile as theirs
import pytest
import torch

import aotdist.functorch as ours
from aotdist.compiled import CompiledFunction
from aotdist.errors import BadSettings
from aotdist.torch_seam.functional import FakeTensor
from aotdist.torch_seam.inductor import TracingContext
from tests.functorch.programs import (
    PROGRAMS,
    AddsUpGradients,
    Compilers,
    Program,
    assert_same,
    data,
    leaf,
    run,
)

their_warning = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
"""PyTorch reads `.grad` of arguments that are no leaves."""
each_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))


@each_program
def test_results_writes_and_gradients_are_eagers(program: Program):
    compiled = ours.aot_function(program.fn, **Compilers().all())
    assert_same(run(program, compiled), run(program, program.fn))


@their_warning
@each_program
def test_results_writes_and_gradients_are_theirs(program: Program):
    found = run(program, ours.aot_function(program.fn, **Compilers().all()))
    expected = run(program, theirs.aot_function(program.fn, **Compilers().all()))
    assert_same(found, expected, none_may_be_zero=True)


def test_nodes_of_both_graphs_have_the_stack_of_the_users_line():
    compilers = Compilers()
    ours.aot_function(lambda x: x.sin() * 2, **compilers.all())(leaf(3)).sum().backward()
    for graphs in compilers.graphs.values():
        calls = [node for node in graphs[0].graph.nodes if node.op == "call_function"]
        assert calls
        for node in calls:
            assert f'File "{__file__}", line ' in node.stack_trace
            assert "x.sin() * 2" in node.stack_trace


@pytest.mark.parametrize("keep", [False, True])
def test_graphs_return_the_new_values_of_inputs(keep: bool):
    x, compilers = torch.zeros(3), Compilers()
    fn = lambda x: x.add_(1).mul_(2)  # noqa: E731
    ours.aot_function(fn, **compilers.all(), keep_inference_input_mutations=keep)(x)
    assert torch.equal(x, torch.full((3,), 2.0)) and x._version == 2
    (gm,) = compilers.graphs["inference"]
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)


@their_warning
@each_program
def test_compilers_are_called_as_often_as_theirs(program: Program):
    mine, other = Compilers(), Compilers()
    for compilers, library in ((mine, ours), (other, theirs)):
        compiled = library.aot_function(program.fn, **compilers.all())
        for _ in range(3):
            run(program, compiled)
    assert mine.counts() == other.counts()


@their_warning
@each_program
def test_backwards_are_compiled_when_they_run(program: Program):
    mine, other = Compilers(), Compilers()
    for compilers, library in ((mine, ours), (other, theirs)):
        run(program, library.aot_function(program.fn, **compilers.all()), backward=False)
    assert mine.counts() == other.counts()
    assert "backward" not in mine.graphs


SAME_GRAPHS = [
    "one result",
    "two inputs",
    "two results",
    "one result is not used",
    "an input is not used",
    "a write",
    "a write to what is saved",
]
"""Programs of tensors alone that return neither inputs nor views: there the graphs take and return the same.

Two others differ: a repeated argument is one here, and what is saved under two names (`softmax` and its
`detach`) is saved once.
"""


@pytest.mark.parametrize("name", SAME_GRAPHS)
def test_graphs_take_and_return_what_theirs_do(name: str):
    program = PROGRAMS[name]
    mine, other = Compilers(), Compilers()
    for compilers, library in ((mine, ours), (other, theirs)):
        partition_fn = theirs.default_partition
        run(program, library.aot_function(program.fn, **compilers.all(), partition_fn=partition_fn))
    assert mine.graphs.keys() == other.graphs.keys()
    for kind, graphs in mine.graphs.items():
        for graph, expected in zip(graphs, other.graphs[kind], strict=True):
            assert _signature(graph) == _signature(expected), kind


def _signature(gm: torch.fx.GraphModule) -> tuple[list[str], list[tuple[int, ...] | None]]:
    """Shapes of arguments, with the names of those that are not saved, and shapes of results."""
    arguments = gm.graph.find_nodes(op="placeholder")
    named = [n.name if n.name.startswith(("primals", "tangents", "arg")) else "saved" for n in arguments]
    shapes = [tuple(n.meta["val"].shape) for n in arguments]
    results = gm.graph.output_node().args[0]
    return [f"{name} {shape}" for name, shape in zip(named, shapes, strict=True)], [
        None if value is None else tuple(value.meta["val"].shape) for value in results
    ]


def test_inference_graphs_go_to_the_forward_compiler_if_there_is_no_other():
    compilers = Compilers()
    compiled = ours.aot_function(lambda x: x + 1, compilers.named("forward"), compilers.named("backward"))
    compiled(data(3))
    assert compilers.counts() == {"forward": 1}
    assert [n.name for n in compilers.graphs["forward"][0].graph.find_nodes(op="placeholder")] == ["arg0_1"]


def test_backwards_go_to_the_forward_compiler_if_there_is_no_other():
    compilers = Compilers()
    ours.aot_function(lambda x: x.sin(), compilers.named("any"))(leaf(3)).sum().backward()
    assert compilers.counts() == {"any": 2}


def test_compilers_are_given_fakes_in_a_tracing_context():
    modes = []

    def compiler(gm, examples):
        assert all(isinstance(example, FakeTensor) for example in examples)
        modes.append(TracingContext.get().fake_mode)
        assert modes[-1] is examples[0].fake_mode
        return gm

    ours.aot_function(lambda x: x.sin(), compiler)(leaf(3)).sum().backward()
    assert len(modes) == 2


@pytest.mark.parametrize("boxed", [True, False])
def test_what_a_compiler_returns_may_be_boxed_or_not(boxed: bool):
    program = PROGRAMS["several matmuls"]
    compiled = ours.aot_function(program.fn, Compilers().named("any", boxed=boxed))
    assert_same(run(program, compiled), run(program, program.fn))


def test_a_compiled_graph_may_return_a_single_tensor():
    compiled = ours.aot_function(lambda x: x + 1, lambda gm, _: lambda x: gm(x)[0])
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_a_graph_may_be_changed_by_its_compiler():
    def to_cos(gm, _):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default
        gm.recompile()
        return ours.make_boxed_func(gm)

    x = data(3)
    assert torch.equal(ours.aot_function(lambda x: x.sin(), to_cos)(x), x.cos())


def test_decompositions_are_applied():
    def decomposed_tanh_backward(grad, y):
        return grad * (1 - y * y)

    def operators(**options):
        compilers = Compilers()
        call = ours.aot_function(lambda x: x.tanh(), **compilers.all(), **options)
        call(leaf(3)).sum().backward()
        return {str(node.target) for node in compilers.graphs["backward"][0].graph.nodes}

    table = {torch.ops.aten.tanh_backward.default: decomposed_tanh_backward}
    assert "aten.tanh_backward.default" in operators()
    assert "aten.tanh_backward.default" not in operators(decompositions=table)


def test_a_call_that_does_not_fit_is_compiled_anew():
    compilers = Compilers()
    compiled = ours.aot_function(lambda x: x.sin(), **compilers.all())
    for x in (leaf(3), leaf(4), leaf(3), data(3)):
        assert torch.equal(compiled(x), x.sin())
    assert compilers.counts() == {"forward": 2, "inference": 1}


def test_a_closed_over_parameter_gets_its_gradient():
    weight = leaf(3)
    ours.aot_function(lambda x: x * weight, **Compilers().all())(torch.full((3,), 2.0)).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def test_gradients_of_results_that_were_not_differentiated_are_none():
    x, y = leaf(3), leaf(3)
    compilers = Compilers()
    first, _ = ours.aot_function(lambda x, y: (x * 2, y * 3), **compilers.all())(x, y)
    first.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0)) and y.grad is None
    assert compilers.counts()["backward"] == 1


@pytest.mark.parametrize("library", [ours, theirs])
@pytest.mark.parametrize("partition", ["default_partition", "min_cut_rematerialization_partition"])
def test_each_backward_reads_what_the_one_before_it_wrote(library: Any, partition: str):
    fn, seen = AddsUpGradients.apply, []
    for call in (fn, ours.aot_function(fn, ours.nop, partition_fn=getattr(library, partition))):
        x, total = torch.ones(3, requires_grad=True), torch.zeros(3)
        out = call(x, total)
        for _ in range(3):
            out.backward(torch.arange(3.0), retain_graph=True)
        seen.append((x.grad, total))
    for expected, found in zip(*seen, strict=True):
        assert torch.equal(found, expected)


def test_keyword_arguments():
    compiled = ours.aot_function(lambda x, *, scale: x * scale, ours.nop)
    assert torch.equal(compiled(torch.ones(2), scale=torch.full((2,), 3.0)), torch.full((2,), 3.0))


def test_the_result_is_a_function_that_can_be_asked():
    def half(x):
        """Halves."""
        return x / 2

    compiled = ours.aot_function(half, ours.nop)
    compiled(data(3))
    assert compiled.__name__ == "half" and compiled.__doc__ == "Halves."
    assert isinstance(compiled, CompiledFunction) and list(compiled.graphs[0]) == ["inference"]
    assert "FORWARD" in compiled.source


def test_an_error_of_a_compiler_is_the_callers():
    def broken(gm, _):
        raise ZeroDivisionError("in the compiler")

    with pytest.raises(ZeroDivisionError, match="in the compiler"):
        ours.aot_function(lambda x: x.sin(), broken)(leaf(3))


def test_what_cannot_be_honoured_is_refused_by_name():
    with pytest.raises(BadSettings, match="`disable_functionalization` cannot be honoured"):
        ours.aot_function(lambda x: x, ours.nop, disable_functionalization=True)


def test_logging_makes_no_difference():
    assert ours.aot_function(lambda x: x + 1, ours.nop, enable_log=False)(torch.ones(())) == 2


def test_a_compiler_may_choose_the_strides_of_what_it_returns():
    """It says so as Inductor does; what is saved reaches the backward's compiler with these strides."""
    given: list[tuple[int, ...]] = []

    def transposing(gm, examples):
        TracingContext.get().output_strides.extend((1, 2) for _ in gm.graph.output_node().args[0])
        return lambda *args: [result.t().contiguous().t() for result in gm(*args)]

    def backward(gm, examples):
        given.extend(example.stride() for example in examples)
        return gm

    x = leaf(2, 2)
    out = ours.aot_function(lambda x: x.sin().exp(), transposing, backward)(x)
    out.sum().backward()
    assert out.stride() == (1, 2) and (1, 2) in given
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_a_module_is_a_function_too():
    linear = torch.nn.Linear(3, 3)
    compiled = ours.aot_function(linear, ours.nop)
    compiled(torch.ones(2, 3)).sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((3,), 2.0))


def test_compilers_of_autocast_programs_see_the_casts():
    compilers, linear = Compilers(), torch.nn.Linear(3, 3)
    compiled = ours.aot_module(linear, **compilers.all())
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = compiled(torch.ones(2, 3)), linear(torch.ones(2, 3))
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    assert linear.weight.grad.dtype == torch.float32
    targets = [str(node.target) for node in compilers.graphs["forward"][0].graph.nodes]
    assert "aten._to_copy.default" in targets


# --- helpers --------------------------------------------------------------------------------------


def test_a_boxed_function_takes_one_list():
    boxed = ours.make_boxed_func(lambda a, b: a - b)
    arguments = [5, 3]
    assert boxed(arguments) == 2 and boxed._boxed_call is True
    assert arguments == [5, 3]


def test_a_boxed_compiler_returns_boxed_functions():
    @ours.make_boxed_compiler
    def compiler(gm, examples):
        """A compiler."""
        return lambda *args: sum(args)

    assert compiler.__name__ == "compiler"
    assert compiler(None, None)([1, 2, 3]) == 6


def test_print_compile_prints_the_code(capsys: pytest.CaptureFixture[str]):
    assert ours.aot_function(lambda x: x.sin(), ours.print_compile)(torch.zeros(())) == 0
    assert "torch.ops.aten.sin.default(arg0_1)" in capsys.readouterr().out


def test_random_numbers_are_drawn_whatever_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch):
    """PyTorch's convention has no place for a seed among the arguments."""
    monkeypatch.setenv("AOTDIST_FUNCTIONAL_RNG", "1")
    x, seen = leaf(5), []
    for call in (torch.nn.functional.dropout, ours.aot_function(torch.nn.functional.dropout, ours.nop)):
        torch.manual_seed(0)
        out = call(x)
        seen.append([out, *torch.autograd.grad(out.sum(), x)])
    assert all(map(torch.equal, *seen))
