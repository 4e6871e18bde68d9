"""Ahead-of-time compilation of a training step, from scratch: the idea of this library in one file.

Run it: `python docs/from_scratch.py`. It needs PyTorch and nothing of aotdist, and compares all that it makes
with eager. Read it from top to bottom. A program that people wrote, with writes in place and views, becomes
two flat graphs without either, which an `autograd.Function` runs as if nothing had happened:

    1. trace      run the program once; note what happens to memory, forward and backward alike
    2. cut        what is computed after the forward, and what the forward keeps for it
    3. schedule   a pass over a graph: collectives of small gradients become one
    4. emit       text that Python compiles
    5. wrap       what eager leaves behind beside its results: writes, views, history

What is left out here is what the library consists of: wrapper tensors (DTensor, FP8), inputs that share
memory, sizes that change, random numbers, hooks, gradients of gradients, other compilers, kernels, ranks
that fail together. docs/design.md begins where this file ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

# --- The program ----------------------------------------------------------------------------------
#
# A layer that keeps a running mean in a buffer, writes into a slice of what it computed, and returns a
# view of an argument beside its result. Nothing in it is unusual, and every line of it is a difficulty: a
# graph of pure functions has no "in place" and no "the same memory".


def program(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """A layer; `mean` is a buffer of it."""
    hidden = torch.addmm(bias, x, weight.t())
    with torch.no_grad():
        mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
    hidden = hidden - mean
    hidden[:, :2].mul_(2.0)
    return hidden.relu(), mean[1:]


def example() -> list[Tensor]:
    """What it is called with."""
    torch.manual_seed(0)
    x, weight, bias, mean = torch.randn(8, 4), torch.randn(6, 4), torch.randn(6), torch.randn(6)
    return [x, weight.requires_grad_(), bias.requires_grad_(), mean]


# --- 1. Trace -------------------------------------------------------------------------------------
#
# Beneath autograd, every operator goes through `__torch_dispatch__`. Whoever listens there hears the
# forward, and when `torch.autograd.grad` runs, the backward too: one list of both is the joint graph.
#
# Writes and views go by one observation: memory is the truth, and a tensor is a window on it (a size,
# strides and an offset). So a value of the graph belongs to a storage, not to a tensor. To read a tensor
# is to look through its window at the newest value of its storage; to write one is to make the storage a
# newer value, the old one with the window replaced. Operators that only make views compute nothing, and
# leave no nodes.


class Memory:
    """The newest value of one storage: a node, and the window that its own elements fill."""

    def __init__(self, node: Node, tensor: Tensor) -> None:
        self.node = node
        self.window = window(tensor)


def window(tensor: Tensor) -> tuple[Any, ...]:
    """Size, strides and offset: what of its storage a tensor shows."""
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


class Recorder(TorchDispatchMode):
    """Writes what runs into a graph of pure functions."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.memories: dict[int, Memory] = {}
        self.alive: list[Tensor] = []  # a storage that is freed could have its address taken by another

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record what it did to memory."""
        kwargs = kwargs or {}
        reads = tree_map_only(Tensor, self.read, (args, kwargs)) if not is_view(op) else None
        result = op(*args, **kwargs)
        if reads is None:
            return result
        written = [args[at] for at, arg in enumerate(op._schema.arguments) if arg.is_write]
        if not written:
            self.made(result, self.graph.call_function(op, *reads))
            return result
        assert len(written) == 1, f"{op} writes several tensors"
        self.write(written[0], self.graph.call_function(pure(op), *reads))
        return result

    def made(self, tensor: Tensor, node: Node) -> None:
        """From now on `tensor` is the value of `node`."""
        node.meta["val"] = tensor
        self.memories[tensor.untyped_storage().data_ptr()] = Memory(node, tensor)
        self.alive.append(tensor)

    def memory_of(self, tensor: Tensor) -> Memory:
        """That of a tensor, which is an argument or what an operator returned."""
        return self.memories[tensor.untyped_storage().data_ptr()]

    def read(self, tensor: Tensor) -> Node:
        """The node that has this tensor's value now."""
        memory = self.memory_of(tensor)
        if memory.window == window(tensor):
            return memory.node
        node = self.graph.call_function(aten.as_strided.default, (memory.node, *window(tensor)))
        node.meta["val"] = tensor
        return node

    def write(self, tensor: Tensor, value: Node) -> None:
        """Make the tensor's storage a newer value, in which `value` fills the tensor's window."""
        memory = self.memory_of(tensor)
        if memory.window != window(tensor):
            arguments = (memory.node, value, *window(tensor))
            value = self.graph.call_function(aten.as_strided_scatter.default, arguments)
        memory.node = value


def is_view(op: Any) -> bool:
    """Whether an operator returns its argument's memory, unwritten."""
    return any(result.alias_info is not None for result in op._schema.returns) and not op._schema.is_mutable


def pure(op: Any) -> Any:
    """The operator that returns what `op` writes: `add` for `add_`, by PyTorch's own naming."""
    return getattr(getattr(aten, op._schema.name.removeprefix("aten::").removesuffix("_")), op._overloadname)


class Joint:
    """Forward and backward of a program as one graph, and which of its results is what.

    The graph takes the arguments, then the gradient of the first result. It returns that result, the new
    values of the arguments that are written, and the gradients of those that require one.
    """

    def __init__(self, program: Callable[..., Any], arguments: Sequence[Tensor]) -> None:
        # The trace runs on copies: nothing that the user owns is touched before the compiled program runs.
        copies = [each.detach().clone().requires_grad_(each.requires_grad) for each in arguments]
        recorder = Recorder()
        for at, copy in enumerate(copies):
            recorder.made(copy, recorder.graph.placeholder(f"argument_{at}"))
        before = [recorder.memory_of(copy).node for copy in copies]
        with recorder:
            result, view = program(*copies)
        # The backward begins with a tensor that only a caller will have: one more placeholder.
        tangent = torch.ones_like(result)
        with recorder.graph.inserting_before(next(n for n in recorder.graph.nodes if n.op != "placeholder")):
            self.tangent = recorder.graph.placeholder("tangent")
        recorder.made(tangent, self.tangent)
        self.params = [at for at, copy in enumerate(copies) if copy.requires_grad]
        with recorder:
            grads = torch.autograd.grad(result, [copies[at] for at in self.params], tangent)
        nodes = [recorder.memory_of(copy).node for copy in copies]
        self.written = [at for at, (old, new) in enumerate(zip(before, nodes, strict=True)) if old is not new]
        # A result in an argument's memory is not computed: the wrapper takes a view of the argument.
        addresses = [copy.untyped_storage().data_ptr() for copy in copies]
        self.view_of = addresses.index(view.untyped_storage().data_ptr())
        self.view = window(view)
        self.forward_outs = [recorder.read(result), *(nodes[at] for at in self.written)]
        self.backward_outs = [recorder.read(grad) for grad in grads]
        self.graph = recorder.graph
        self.graph.output((*self.forward_outs, *self.backward_outs))
        self.graph.eliminate_dead_code()
        self.graph.lint()


# --- 2. Cut ---------------------------------------------------------------------------------------
#
# The forward is whatever its results need. The backward is the rest; what it needs of the forward is kept
# in between. A window on kept memory costs nothing, so the cut keeps the memory and looks through the
# window again.


def cut(joint: Joint) -> tuple[GraphModule, GraphModule, int]:
    """The two halves, and how many values the first hands to the second behind its own results."""
    arguments = [node for node in joint.graph.find_nodes(op="placeholder") if node is not joint.tangent]
    needed = {*arguments, *ancestors(joint.forward_outs)}
    forward = [node for node in joint.graph.nodes if node in needed]
    backward = [node for node in joint.graph.nodes if node.op == "call_function" and node not in needed]
    seen = [used for node in backward for used in node.all_input_nodes if used in needed]
    windows = [node for node in dict.fromkeys(seen) if node.target is aten.as_strided.default]
    backward = [*windows, *backward]
    made = {joint.tangent, *backward}
    used = [used for node in backward for used in node.all_input_nodes] + joint.backward_outs
    saved = [node for node in dict.fromkeys(used) if node not in made]
    first = half([], forward, [*joint.forward_outs, *saved])
    second = half([*saved, joint.tangent], backward, joint.backward_outs)
    return first, second, len(saved)


def ancestors(nodes: Sequence[Node]) -> set[Node]:
    """The nodes, and all that they are computed from."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def half(inputs: Sequence[Node], nodes: Sequence[Node], outs: Sequence[Node]) -> GraphModule:
    """A graph of some nodes of another."""
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[out] for out in outs))
    graph.lint()
    return GraphModule({}, graph)


# --- 3. Schedule ----------------------------------------------------------------------------------
#
# With several ranks, each gradient is summed over them. In a graph a collective is two nodes, one that
# starts it and one that waits, so where each of them stands is a decision. Starting one for every small
# gradient costs a latency each; here all that can be started together is joined into one.


def summed_over_ranks(backward: GraphModule, group: str) -> None:
    """Let every result of the graph be the mean over the ranks."""
    graph = backward.graph
    (output,) = graph.find_nodes(op="output")
    c10d = torch.ops._c10d_functional
    with graph.inserting_before(output):
        outs = []
        for out in output.args[0]:
            started = graph.call_function(c10d.all_reduce.default, (out, "avg", group))
            started.meta["val"] = out.meta["val"]
            outs.append(graph.call_function(c10d.wait_tensor.default, (started,)))
        output.args = (tuple(outs),)
    backward.recompile()


def bucketed(backward: GraphModule) -> None:
    """Replace the graph's all-reduces by one of all their tensors, end to end."""
    graph, c10d = backward.graph, torch.ops._c10d_functional
    started = graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    waits = [next(iter(node.users)) for node in started]
    _, operation, group = started[0].args
    with graph.inserting_before(started[-1].next):
        flat = [graph.call_function(aten.reshape.default, (node.args[0], [-1])) for node in started]
        bucket = graph.call_function(aten.cat.default, (flat,))
        summed = graph.call_function(c10d.all_reduce.default, (bucket, operation, group))
        summed = graph.call_function(c10d.wait_tensor.default, (summed,))
        offset = 0
        for node, wait in zip(started, waits, strict=True):
            like = node.meta["val"]
            part = graph.call_function(aten.slice.Tensor, (summed, 0, offset, offset + like.numel()))
            wait.replace_all_uses_with(graph.call_function(aten.reshape.default, (part, list(like.shape))))
            offset += like.numel()
    for node in (*waits, *started):
        graph.erase_node(node)
    graph.lint()
    backward.recompile()


# --- 4. Emit, and 5. Wrap -------------------------------------------------------------------------
#
# `GraphModule` prints a graph as Python, one line a node: that is this file's backend. The wrapper is an
# `autograd.Function`, so autograd sees one node with our backward. Around the two pure graphs it does
# what eager did beside its results: it copies what was written into the arguments, and hands out views as
# views.


def compiled(program: Callable[..., Any], arguments: Sequence[Tensor], group: str = "") -> Callable[..., Any]:
    """The program, for arguments of these sizes; with a group, gradients are means over its ranks."""
    joint = Joint(program, arguments)
    forward, backward, num_saved = cut(joint)
    if group:
        summed_over_ranks(backward, group)
        bucketed(backward)

    class Step(torch.autograd.Function):
        """Forward and backward of the program."""

        @staticmethod
        def forward(ctx: Any, *args: Tensor) -> Tensor:
            result, *more = forward(*args)
            for at, value in zip(joint.written, more, strict=False):
                args[at].copy_(value)
            ctx.save_for_backward(*more[len(more) - num_saved :])
            return result

        @staticmethod
        def backward(ctx: Any, tangent: Tensor) -> Any:
            grads: list[Any] = [None] * len(arguments)
            for at, grad in zip(joint.params, backward(*ctx.saved_tensors, tangent), strict=True):
                grads[at] = grad
            return tuple(grads)

    def call(*args: Tensor) -> tuple[Tensor, Tensor]:
        result = Step.apply(*args)
        return result, args[joint.view_of].as_strided(*joint.view)

    call.forward, call.backward, call.num_saved = forward, backward, num_saved
    return call


# --- The oracle -----------------------------------------------------------------------------------


def outcome(call: Callable[..., Any]) -> list[Tensor]:
    """All that a step leaves behind: result, gradients, and the buffer, after the caller wrote the view."""
    arguments = example()
    result, view = call(*arguments)
    result.square().sum().backward()
    assert view._base is arguments[3], "the second result is a view of the buffer"
    view.zero_()
    return [result.detach(), *(each.grad for each in arguments[1:3]), arguments[3]]


def main() -> None:
    """Compile the program, and compare it with itself, bit for bit."""
    step = compiled(program, example())
    print("forward", step.forward.code, "backward", step.backward.code, sep="\n")
    assert all(map(torch.equal, outcome(step), outcome(program)))
    operators = [node.target for node in (*step.forward.graph.nodes, *step.backward.graph.nodes)]
    assert not any(op._schema.is_mutable for op in operators if not isinstance(op, str)), "no node writes"

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    alone = dist.group.WORLD
    assert alone is not None
    ranks = compiled(program, example(), alone.group_name)
    reduce = torch.ops._c10d_functional.all_reduce.default
    assert len(ranks.backward.graph.find_nodes(op="call_function", target=reduce)) == 1
    assert all(map(torch.equal, outcome(ranks), outcome(program)))
    dist.destroy_process_group()
    print(
        f"same bits as eager; {step.num_saved} values kept for the backward; one all-reduce for two gradients"
    )


if __name__ == "__main__":
    main()
