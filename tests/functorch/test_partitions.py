"""Partitions: ours and PyTorch's under `aot_function`, ours under PyTorch's, and what a wrong one is told."""

from __future__ import annotations

import functools

import functorch.compile as theirs
import pytest
import torch
from torch.fx import GraphModule
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import aotdist.functorch as ours
from aotdist.api import compiled_call
from aotdist.errors import BadSettings, UnsupportedProgram
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

PARTITIONS = {
    "default": ours.default_partition,
    "min_cut": ours.min_cut_rematerialization_partition,
    "their default": theirs.default_partition,
    "their min_cut": theirs.min_cut_rematerialization_partition,
}
each_partition = pytest.mark.parametrize("partition", PARTITIONS.values(), ids=list(PARTITIONS))
each_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))


def _recording(partition, calls):
    def recorded(joint_module, joint_inputs, **options):
        calls.append((joint_module, joint_inputs, options))
        return partition(joint_module, joint_inputs, **options)

    return recorded


@each_program
@each_partition
def test_a_partition_changes_no_number(partition, program: Program):
    calls = []
    compilers = Compilers()
    compiled = ours.aot_function(program.fn, **compilers.all(), partition_fn=_recording(partition, calls))
    assert_same(run(program, compiled), run(program, program.fn))
    assert len(calls) == len(compilers.graphs.get("forward", []))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("partition", [ours.default_partition, ours.min_cut_rematerialization_partition])
@each_program
def test_our_partitions_serve_their_function(program: Program, partition):
    compiled = theirs.aot_function(program.fn, **Compilers().all(), partition_fn=partition)
    assert_same(run(program, compiled), run(program, program.fn), none_may_be_zero=True)


def test_a_partition_is_given_what_theirs_is():
    found = []
    for library in (ours, theirs):
        calls = []
        partition_fn = _recording(theirs.default_partition, calls)
        call = library.aot_function(
            lambda x, y, n: (x * y, n.add_(1) * y), ours.nop, partition_fn=partition_fn
        )
        call(leaf(3), leaf(3), data(3))[0].sum().backward()
        ((joint, inputs, options),) = calls
        found.append((_names(joint), [[t.shape for t in group] for group in inputs], options, _tags(joint)))
        values, grads = joint([torch.ones(3)] * 3, [torch.ones(3)] * 2)
        assert (len(values), len(grads)) == (3, 3) and grads[2] is None
    assert found[0] == found[1]


def _two_results_and_a_write(x, y, n):
    return x * y, n.add_(1) * y


def _names(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]


def _tags(gm: GraphModule) -> dict[str, str]:
    return {node.name: node.meta["partitioner_tag"] for node in gm.graph.nodes if node.op != "output"}


def test_a_partition_is_told_which_primals_stay_in_place():
    calls = []
    ours.aot_function(
        lambda w, b, x: x @ w + b,
        ours.nop,
        partition_fn=_recording(ours.default_partition, calls),
        num_params_buffers=2,
    )(leaf(3, 3), leaf(3), data(2, 3))
    assert calls[0][2]["static_lifetime_input_indices"] == [0, 1]


def test_no_partition_without_a_backward():
    calls = []
    ours.aot_function(lambda x: x + 1, ours.nop, partition_fn=_recording(ours.default_partition, calls))(
        data(3)
    )
    assert calls == []


def test_min_cut_saves_less_than_default():
    def saved_bytes(partition):
        compiled = ours.aot_function(
            lambda x: x.sin().cos().exp().sin(), Compilers().named("any"), partition_fn=partition
        )
        compiled(leaf(64)).sum().backward()
        return compiled.artifacts[0].compilation.region.joint.split.saved_bytes

    sizes = {name: saved_bytes(partition) for name, partition in PARTITIONS.items()}
    assert sizes["min_cut"] < sizes["default"]
    assert sizes["their min_cut"] < sizes["their default"]
    assert sizes["min_cut"] == sizes["their min_cut"]


def test_forwards_return_values_and_then_what_is_saved():
    compilers = Compilers()
    ours.aot_function(lambda x, w: (x * w, x + w), **compilers.all())(leaf(3), leaf(3))[0].sum().backward()
    (forward,), (backward,) = compilers.graphs["forward"], compilers.graphs["backward"]
    assert [node.name for node in forward.graph.output_node().args[0]] == [
        "mul",
        "add",
        "primals_1",
        "primals_2",
    ]
    assert _names(backward) == ["primals_1", "primals_2", "tangents_1", "tangents_2"]
    assert len(backward.graph.output_node().args[0]) == 2


@each_partition
def test_what_is_written_later_is_saved_as_it_was(partition):
    def fn(x, buffer):
        y = x * buffer.clone().sin()
        buffer.add_(10)
        return y

    x, expected = leaf(3), data(3)
    buffer = expected.clone()
    ours.aot_function(fn, Compilers().named("any"), partition_fn=partition)(x, buffer).sum().backward()
    assert torch.equal(x.grad, expected.sin())
    assert torch.equal(buffer, expected + 10)


@pytest.mark.parametrize("as_view", [False, True])
def test_a_partition_may_save_an_argument_that_is_written_later(as_view: bool):
    """The forward hands over the argument itself: it is copied before the caller replaces its data."""

    def fn(x, buffer):
        y = x * buffer.view(-1).clone()
        buffer.add_(10)
        return y

    def saves_arguments(joint_module, joint_inputs, *, num_fwd_outputs, **options):
        forward, backward = theirs.default_partition(
            joint_module, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        (saved,) = backward.graph.find_nodes(op="placeholder")[:1]
        values, argument = (
            list(forward.graph.output_node().args[0]),
            forward.graph.find_nodes(op="placeholder")[1],
        )
        if as_view:
            with forward.graph.inserting_after(argument):
                argument = forward.graph.call_function(torch.ops.aten.view.default, (argument, [-1]))
                argument.meta = dict(saved.meta)
        forward.graph.output_node().args = ((*values[:num_fwd_outputs], argument),)
        return forward, backward

    x, expected = leaf(3), data(3)
    buffer = expected.clone()
    ours.aot_function(fn, ours.nop, partition_fn=saves_arguments)(x, buffer).sum().backward()
    assert torch.equal(x.grad, expected)


@each_partition
def test_wrappers_are_taken_apart(partition):
    """A plain argument that meets a wrapper has a wrapper for a gradient: two plain ones in the graph."""
    x = TwoTensor(data(3), data(3)).requires_grad_()
    y = leaf(3)
    call = ours.aot_function(lambda x, y: (x * y).sin(), Compilers().named("any"), partition_fn=partition)
    grads = [torch.autograd.grad(fn(x, y).sum(), (x, y)) for fn in (call, lambda x, y: (x * y).sin())]
    for found, expected in zip(*grads, strict=True):
        assert torch.equal(found.a, expected.a) and torch.equal(found.b, expected.b)


@each_partition
def test_random_numbers_are_drawn_once(partition):
    module = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Dropout(0.5), torch.nn.ReLU())
    compiled, x = ours.aot_module(module, ours.nop, partition_fn=partition), leaf(4, 5)
    seen = []
    for call in (compiled, module):
        torch.manual_seed(3)
        out = call(x)
        seen.append([out, *torch.autograd.grad(out.sum(), x)])
    assert all(map(torch.equal, *seen))


@each_partition
def test_a_generator_of_the_users_is_drawn_from(partition):
    generator, x = torch.Generator(), leaf(4, 5)

    def fn(x, generator):
        return x * torch.rand(5, generator=generator) * torch.rand(4, 1, generator=generator)

    seen = []
    for call in (ours.aot_function(fn, ours.nop, partition_fn=partition), fn):
        generator.manual_seed(3)
        out = call(x, generator)
        seen.append([out, *torch.autograd.grad(out.sum(), x), generator.get_state()])
    assert all(map(torch.equal, *seen))


@each_partition
def test_arguments_that_share_memory_are_written(partition):
    def fn(x, a, b):
        a.add_(1)
        b.mul_(2)
        return x * a.clone()

    seen = []
    for call in (ours.aot_function(fn, ours.nop, partition_fn=partition), fn):
        x, memory = torch.ones(3, requires_grad=True), torch.arange(6.0)
        out = call(x, memory[:3], memory[1:4])
        out.sum().backward()
        seen.append([out, memory, x.grad])
    assert all(map(torch.equal, *seen))


@each_partition
def test_selective_checkpoints(partition):
    def policy(context, op, *args, **kwargs):
        is_product = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def fn(x, w):
        return checkpoint(lambda x: (x @ w).sin() @ w, x, use_reentrant=False, context_fn=contexts).sum()

    program = Program(fn, lambda: (leaf(3, 3), leaf(3, 3)), lambda outs: outs[0])
    compiled = ours.aot_function(fn, ours.nop, partition_fn=partition)
    assert_same(run(program, compiled), run(program, fn))


@each_partition
def test_checkpointed_regions(partition):
    def fn(x, w):
        return checkpoint(lambda x: (x @ w).sin().cos(), x, use_reentrant=False).sum()

    program = Program(fn, lambda: (leaf(3, 3), leaf(3, 3)), lambda outs: outs[0])
    compiled = ours.aot_function(fn, Compilers().named("any"), partition_fn=partition)
    assert_same(run(program, compiled), run(program, fn))


def test_a_partition_may_save_a_value_twice():
    def twice(*args, **options):
        forward, backward = ours.default_partition(*args, **options)
        output = forward.graph.output_node()
        output.args = ((*output.args[0], output.args[0][-1]),)
        last_saved, tangent = backward.graph.find_nodes(op="placeholder")[-2:]
        with backward.graph.inserting_before(tangent):
            again = backward.graph.placeholder("again")
        again.meta = dict(last_saved.meta)
        last_saved.replace_all_uses_with(again)
        return forward, backward

    program = PROGRAMS["several matmuls"]
    compiled = ours.aot_function(program.fn, Compilers().named("any"), partition_fn=twice)
    assert_same(run(program, compiled), run(program, program.fn))


def test_compilers_get_what_the_partition_returned():
    halves, compilers = [], Compilers()

    def partition(*args, **options):
        forward, backward = theirs.min_cut_rematerialization_partition(*args, **options)
        halves.extend([forward.code, backward.code])
        return forward, backward

    program = PROGRAMS["several matmuls"]
    run(program, ours.aot_function(program.fn, **compilers.all(), partition_fn=partition))
    (forward,), (backward,) = compilers.graphs["forward"], compilers.graphs["backward"]
    assert [forward.code, backward.code] == halves
    assert "aotdist_cut" not in {key for node in forward.graph.nodes for key in node.meta}


BROKEN = {
    "an argument too few": (
        lambda fw, bw: (_without_argument(fw), bw),
        "forward takes 1 values where there are 2",
    ),
    "a saved value too few": (lambda fw, bw: (_without_last_result(fw), bw), "backward takes 3 values"),
    "a gradient too few": (lambda fw, bw: (fw, _without_last_result(bw)), "backward returns 1 values"),
}


def _without_argument(gm: GraphModule) -> GraphModule:
    unused = gm.graph.find_nodes(op="placeholder")[1]
    unused.replace_all_uses_with(gm.graph.find_nodes(op="placeholder")[0])
    gm.graph.erase_node(unused)
    return gm


def _without_last_result(gm: GraphModule) -> GraphModule:
    output = gm.graph.output_node()
    output.args = (output.args[0][:-1],)
    return gm


@pytest.mark.parametrize(("breaking", "fault"), BROKEN.values(), ids=list(BROKEN))
def test_a_partition_that_breaks_the_convention_is_told_how(breaking, fault: str):
    def partition(*args, **options):
        return breaking(*ours.default_partition(*args, **options))

    with pytest.raises(UnsupportedProgram, match=fault):
        ours.aot_function(lambda x, y: x * y, ours.nop, partition_fn=partition)(leaf(3), leaf(3))


def test_another_compilers_cheap_operations_are_not_known():
    with pytest.raises(BadSettings, match="compiler='nvfuser'"):
        ours.min_cut_rematerialization_partition(
            GraphModule({}, torch.fx.Graph()), (), "nvfuser", num_fwd_outputs=0
        )


def test_reports_know_the_split():
    compiled = ours.aot_function(lambda x: x.sin(), ours.nop)
    compiled(leaf(3))
    assert list(compiled_call(compiled).graphs[0]) == ["joint", "forward", "backward"]
    assert "saved" in str(compiled.explain())


def _reads_what_it_wrote(x, y):
    y.add_(1)
    return x * y.sin()


def _writes_what_it_read(x, y):
    out = (x * y.sin()).exp()
    y.mul_(out.detach())
    return out.sin() * y


@pytest.mark.parametrize("fn", [_reads_what_it_wrote, _writes_what_it_read])
@pytest.mark.parametrize("library", [ours, theirs], ids=["ours", "theirs"])
@pytest.mark.parametrize("policy", ["default_partition", "min_cut_rematerialization_partition"])
def test_an_input_that_the_forward_writes_is_not_saved(fn, library, policy: str):
    seen = []
    for call in (fn, library.aot_function(fn, library.nop, partition_fn=getattr(ours, policy))):
        torch.manual_seed(0)
        x, y = leaf(3), data(3)
        call(x, y).sum().backward()
        seen.append((x.grad, y))
    assert all(map(torch.equal, *seen))


@pytest.mark.parametrize("partition", [ours.default_partition, ours.min_cut_rematerialization_partition])
def test_what_both_write_in_a_joint_graph_of_theirs_is_refused(partition):
    def program(x, total):
        total.add_(1)
        return AddsUpGradients.apply(x, total)

    options = {"partition_fn": partition, "keep_inference_input_mutations": True}
    with pytest.raises(UnsupportedProgram, match="writes `primals_2` in the forward and in the backward"):
        theirs.aot_function(program, theirs.nop, **options)(leaf(3), data(3))


@each_partition
def test_an_argument_that_is_reshaped_may_be_saved_as_a_view(partition):
    def program(y, w):
        y.t_()
        return y * w.sum()

    gradients = []
    for call in (program, ours.aot_function(program, ours.nop, partition_fn=partition)):
        x = torch.arange(4.0).view(2, 2).requires_grad_()
        call(x * 1, x * 2).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


class Counted(torch.autograd.Function):
    """Both ways, in a tensor; the backward reads what it writes."""

    @staticmethod
    def forward(ctx, x, counter):
        counter.add_(1)
        ctx.counter = counter
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        ctx.counter.mul_(2)
        return grad * ctx.counter, None


@each_partition
def test_backwards_write_what_they_find(partition):
    def fn(x, w, counter):
        return Counted.apply(x, counter) * w, w.sin()

    compilers, seen = Compilers(), []
    for call in (fn, ours.aot_function(fn, **compilers.all(), partition_fn=partition)):
        torch.manual_seed(0)
        x, w, counter = leaf(3), leaf(3), data(3)
        for positions in ([0, 1], [0]):
            results = call(x, w, counter)
            outs = [results[position].sum() for position in positions]
            counter.add_(10)
            for _ in range(2):
                torch.autograd.backward(outs, retain_graph=True)
        seen.append((x.grad, w.grad, counter))
    assert all(map(torch.equal, *seen))
    (backward,) = compilers.graphs["backward"]
    assert [name for name in _names(backward) if name.startswith("tangents")] == [
        "tangents_1",
        "tangents_2",
        "tangents_3",
    ], "what the counter holds comes after the tangents"
    assert len(backward.graph.output_node().args[0]) == 4, "its new value comes after the gradients"
