"""Blocks that are traced once: the graph is, node for node, the one of a trace of each call."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import aotdist
from tests.trace.recorded import recorded

SIZE = (2, 3, 8)
DEPTH = 5


class Block(nn.Module):
    """Attention and a feed-forward part; its number is for nobody."""

    def __init__(self, number: int = 0, dropped: float = 0.0) -> None:
        super().__init__()
        self.number = number
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropped)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if memory is not None:
            k, v = k + memory, v * memory
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v)))
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x)) * torch.tensor(0.5)
        return x * gate + self.out(F.silu(self.value(x)) * gate.square()).softmax(-1)


class Stack(nn.Module):
    """Blocks one after the other; gives the last values, or all of them."""

    def __init__(self, *blocks: nn.Module, all_values: bool = False) -> None:
        super().__init__()
        self.blocks, self.all_values = nn.ModuleList(blocks), all_values

    def forward(self, x: Tensor, *rest: Any) -> Any:
        values = [x]
        for block in self.blocks:
            values.append(block(values[-1], *rest))
        return values if self.all_values else values[-1]


class Telling(nn.Module):
    """Gives its values, what it was given, a number and None."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, *, bias: Tensor) -> dict[str, Any]:
        return {
            "values": self.inner(x) + bias,
            "bias": bias,
            "cost": self.inner(x.sin()).mean(),
            "n": (1, None),
        }


class Normalised(Block):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return super().forward(self.batch(x))


class Noting(Block):
    """Notes what it met, in one of two places of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("met", torch.zeros(2))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            self.met[1] += x.mean()
        y = super().forward(x)
        self.met[1:].add_(1)
        return y


def _telling() -> Callable[[Tensor], Any]:
    blocks = nn.ModuleList(Telling() for _ in range(DEPTH))

    def run(x: Tensor) -> Any:
        costs, bias = [], x.mean(-1, keepdim=True)
        for block in blocks:
            told = block(x, bias=bias)
            x, bias = told["values"], told["bias"]
            costs.append(told["cost"])
        return x.sum() + torch.stack(costs).sum()

    return run


class Overwritten(Block):
    """Writes what it computes, parts of it first, with a history."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.up(super().forward(x))
        y[..., 0].mul_(2)
        return x + self.down(y.relu_())


class Rectified(Block):
    """Writes a view, as an in-place ReLU behind an instance norm does."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.up(super().forward(x))
        y.flatten(1).relu_()
        return x + self.down(y)


@dataclass
class Scaling:
    bias: Tensor
    number: float


class Scaled(Block):
    """Is given an object with a tensor and a number."""

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        return super().forward(x) * memory.number + memory.bias


def _with_objects() -> Callable[[Tensor], Any]:
    stack = Stack(*(Scaled() for _ in range(DEPTH)))
    return lambda x: stack(x, Scaling(x.mean(-1, keepdim=True), 0.5))


def _with_memory(stack: Stack) -> Callable[[Tensor], Any]:
    """All blocks read one tensor in two places, and so does what follows them."""

    def run(x: Tensor) -> Tensor:
        memory = x.sin()
        return stack(x, memory) * memory + memory

    return run


def _under(context: Callable[[], Any], module: nn.Module) -> Callable[[Tensor], Any]:
    def run(x: Tensor) -> Any:
        with context():
            return module(x)

    return run


def _half() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def _frozen(stack: Stack) -> Stack:
    """The third block alone has parameters that are not trained."""
    stack.blocks[2].requires_grad_(requires_grad=False)
    return stack


def _whole_step(kind: type[Block]) -> tuple[Stack, Callable[[Tensor], Any]]:
    """Two micro-batches, the backward and the update in the program."""
    model = Stack(*(kind(k, 0.1) for k in range(DEPTH)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run(x: Tensor) -> Tensor:
        for part in x.detach().split(1):
            loss = model(part).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, run


def _of_transformers() -> Callable[[Tensor], Any]:
    """Layers in which modules of other kinds are met for the first time."""
    from transformers import LlamaConfig, LlamaModel

    sizes: dict[str, Any] = {"hidden_size": SIZE[-1], "intermediate_size": 16, "vocab_size": 4}
    config = LlamaConfig(num_hidden_layers=DEPTH, num_attention_heads=2, use_cache=False, **sizes)
    model = LlamaModel(config)
    return lambda x: model(inputs_embeds=x).last_hidden_state


def _checkpointed(
    called: Callable[[nn.Module], Any], kind: type[Block] | None = None, **options: Any
) -> Callable[[Tensor], Any]:
    """Each block is run by a checkpoint, as what `called` makes of it."""
    stack = Stack(*_blocks(dropped=0.1) if kind is None else (kind() for _ in range(DEPTH)))

    def run(x: Tensor) -> Any:
        memory = x.sin()
        for block in stack.blocks:
            x = checkpoint(called(block), x, **options)  # type: ignore[assignment]
        return x * memory

    return run


def _saves_products(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_saves_products)


def _blocks(**options: Any) -> list[Block]:
    return [Block(number, **options) for number in range(DEPTH)]


COPIED: dict[str, tuple[Callable[[], Callable[[Tensor], Any]], int]] = {
    "layers": (lambda: Stack(*_blocks()), DEPTH - 2),
    "dropout": (lambda: Stack(*_blocks(dropped=0.1)), DEPTH - 2),
    "turns": (lambda: Stack(*(made for _ in range(4) for made in (Block(), Gated()))), 4),
    "one block several times": (lambda: Stack(*[Block()] * DEPTH), DEPTH - 2),
    "all values": (lambda: Stack(*_blocks(), all_values=True), DEPTH - 2),
    "values that are written": (lambda: Stack(*(Overwritten() for _ in range(DEPTH))), DEPTH - 2),
    "objects": (_with_objects, DEPTH - 2),
    "a memory of all": (lambda: _with_memory(Stack(*_blocks())), DEPTH - 2),
    "results of several kinds": (_telling, DEPTH - 2),
    "without grad": (lambda: _under(torch.no_grad, Stack(*_blocks())), DEPTH - 3),
    "autocast": (lambda: _under(_half, Stack(*_blocks())), DEPTH - 2),
    "one that is not trained": (lambda: _frozen(Stack(*_blocks())), DEPTH - 3),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), DEPTH, enable_nested_tensor=False
        ),
        DEPTH - 2,
    ),
    "layers of transformers": (_of_transformers, DEPTH - 2),
    "buffers": (lambda: Stack(*(Normalised() for _ in range(DEPTH))), DEPTH - 2),
    "parts of buffers": (lambda: Stack(*(Noting() for _ in range(DEPTH))), DEPTH - 2),
    "buffers under no_grad": (
        lambda: _under(torch.no_grad, Stack(*(Normalised() for _ in range(DEPTH)))),
        DEPTH - 3,
    ),
    "checkpoints": (lambda: _checkpointed(lambda block: block, use_reentrant=False), DEPTH - 2),
    "reentrant checkpoints": (lambda: _checkpointed(lambda block: block, use_reentrant=True), DEPTH - 2),
    "checkpoints of methods": (
        lambda: _checkpointed(lambda block: partial(block.forward, memory=None), use_reentrant=False),
        DEPTH - 2,
    ),
    "selective checkpoints": (
        lambda: _checkpointed(lambda block: block, use_reentrant=False, context_fn=_selective),
        DEPTH - 2,
    ),
    "stacks in a stack": (lambda: Stack(*(Stack(*_blocks()) for _ in range(3))), DEPTH - 1),
}
"""Programs with blocks of one kind, and how many calls of these are copied at least."""
SHARED = {
    "one block several times",
    "all values",
    "objects",
    "a memory of all",
    "results of several kinds",
    "stacks in a stack",
}
"""Several blocks send gradients to one tensor, in several places each: they are added up behind the block."""


OF_SYMBOLIC_SIZES = ("layers", "turns", "a memory of all", "autocast", "encoder", "buffers", "checkpoints")


def _num_copies(program: Callable[[Tensor], Any], **settings: Any) -> int:
    call = aotdist.compile(lambda x: program(x), backend="fx", settings=aotdist.Settings(**settings))
    call(torch.ones(SIZE, requires_grad=True))
    return len(call.artifacts[-1].compilation.traced.copies.instances)


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, {}) for name in COPIED), *((name, {"dynamic": True}) for name in OF_SYMBOLIC_SIZES)],
    ids=[*COPIED, *(f"{name}, any size" for name in OF_SYMBOLIC_SIZES)],
)
def test_the_graph_is_the_one_of_a_trace_of_each_call(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, fewest = COPIED[name]
    program = make()
    found = recorded(program, SIZE, monkeypatch, **settings)
    expected = recorded(program, SIZE, monkeypatch, instantiate=False, **settings)
    assert _num_copies(program, **settings) >= fewest - len(settings)  # the first block meets new symbols
    assert [len(graph) for graph in found] == [len(graph) for graph in expected]
    for graph, other in zip(found, expected, strict=True):
        if name in SHARED:
            assert _meanings(graph) == _meanings(other)
            continue
        for (line, meta), (traced, of_traced) in zip(graph, other, strict=True):
            assert line == traced
            assert line[0] == "placeholder" or meta == of_traced


def _meanings(graph: list[Any]) -> Counter[str]:
    """How each node is computed from arguments, whatever the order."""
    meanings: dict[str, str] = {}
    for (op, name, target, args, kwargs), _ in graph:
        given = re.sub(r"[a-z_]\w*", lambda found: meanings.get(found[0], found[0]), f"{args} {kwargs}")
        said = name if op == "placeholder" else f"{op} {target} {given}"
        meanings[name] = sha256(said.encode()).hexdigest()
    return Counter(meanings.values())


class Numbered(Block):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return super().forward(x) * (self.number // 3 + 1)


class Counting(Block):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        self.number += 1
        return super().forward(x)


class Keeping(Block):
    kept: list[Tensor] = []

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        self.kept.append(x.detach().mean())
        return super().forward(x)


class Printing(Block):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        print("mean", x.detach().mean())
        return super().forward(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class Doubling(Block):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return super().forward(Doubled.apply(x))


class Hooking(Block):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = super().forward(x)
        x.register_hook(lambda grad: grad * 2)
        return x.sin()


class Layer:
    number = 0


def _told_outside(layer: Any) -> Callable[[Tensor], Any]:
    """What the blocks find outside of themselves says which of them it is."""

    class Told(Block):
        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            return super().forward(x) * (2 if layer.number == 3 else 1)

    blocks = nn.ModuleList(Told() for _ in range(DEPTH))

    def run(x: Tensor) -> Tensor:
        for number, block in enumerate(blocks):
            layer.number = number
            x = block(x)
        return x

    return run


def _writing_outside() -> Callable[[Tensor], Any]:
    """The blocks add to a part of a tensor that they close over."""
    held: list[Tensor] = []

    class Writing(Block):
        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            x = super().forward(x)
            held[0][0].add_(x.detach().mean())
            return x

    blocks = nn.ModuleList(Writing() for _ in range(DEPTH))

    def run(x: Tensor) -> Any:
        total = torch.zeros(2)
        held[:] = [total]
        for block in blocks:
            x = block(x)
        held.clear()
        return x, total

    return run


class Holder:
    def __init__(self) -> None:
        self.values: list[Tensor] = []


class Handing(Block):
    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        memory.values.append(x.mean())
        return super().forward(x)


def _handing() -> Callable[[Tensor], Any]:
    stack = Stack(*(Handing() for _ in range(DEPTH)))

    def run(x: Tensor) -> Any:
        holder = Holder()
        return stack(x, holder), torch.stack(holder.values)

    return run


class Drawing(Block):
    """Takes what it adds from an iterator."""

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        return super().forward(x) + next(memory)


def _iterating() -> Callable[[Tensor], Any]:
    stack = Stack(*(Drawing() for _ in range(DEPTH)))
    return lambda x: stack(x, iter([1.0, 1.0, 2.0, 1.0, 3.0]))


def _with_state() -> Callable[[Tensor], Any]:
    """One object is given to all blocks; its number is another for the last."""
    stack = Stack(*(Scaled() for _ in range(3)))

    def run(x: Tensor) -> Any:
        scaling = Scaling(x.mean(), 0.5)
        for block in stack.blocks:
            x = block(x, scaling)
            scaling.number += 0.5
        return x

    return run


class Overwriting(Block):
    """Writes the memory that all blocks are given."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        assert memory is not None
        memory.mul_(y.mean())
        return y


def _written_inside() -> Callable[[Tensor], Any]:
    stack = Stack(*(Overwriting() for _ in range(DEPTH)))

    def run(x: Tensor) -> Any:
        memory = x.sin()
        return stack(x, memory) + memory

    return run


class Straight(torch.autograd.Function):
    """Calls a block without gradients, and passes the gradient of its result on."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def _drawing_without_gradients() -> Callable[[Tensor], Any]:
    stack = Stack(*(Block(dropped=0.25) for _ in range(DEPTH)))

    def run(x: Tensor) -> Any:
        for block in stack.blocks:
            x = cast("Tensor", Straight.apply(block, x))
        return x

    return run


def _hooked() -> Stack:
    stack = Stack(*_blocks())
    for block in stack.blocks:
        block.down.register_forward_hook(lambda module, args, result: result * 2)  # type: ignore[union-attr]
    return stack


class Caching(Block):
    """Gives its buffer another tensor of the same kind, as a cache of the last values does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, *SIZE))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        self.last = torch.cat([self.last[1:], x.detach()[None]])
        return super().forward(x + self.last.mean(0))


class Scoring(Block):
    """Gives its values, and what it computes of these."""

    def forward(self, x: Tensor, memory: Any = None) -> Any:
        x = super().forward(x)
        return x, x.square().mean()


def _scoring() -> Callable[[Tensor], Any]:
    blocks = nn.ModuleList(Scoring() for _ in range(DEPTH))

    def run(x: Tensor) -> tuple[Tensor, ...]:
        values, total = [x], torch.zeros(())
        for block in blocks:
            x, score = block(x)
            values.append(x)
            total = total + score
        return total + x.sum(), *values[1:]

    return run


TRACED: dict[str, tuple[Callable[[], Callable[[Tensor], Any]], str]] = {
    "its number decides": (lambda: Stack(*(Numbered(k) for k in range(4))), ""),
    "it counts": (lambda: Stack(*(Counting(k) for k in range(DEPTH))), ""),
    "it writes what it is given": (_written_inside, "no buffer"),
    "a checkpoint writes buffers again": (
        lambda: _checkpointed(lambda block: block, Normalised, use_reentrant=False),
        "",
    ),
    "it keeps values": (lambda: Stack(*(Keeping() for _ in range(DEPTH))), "in Python"),
    "it assigns a buffer": (lambda: Stack(*(Caching() for _ in range(DEPTH))), "its own attributes"),
    "it gives what follows from a result": (_scoring, "what follows from it"),
    "it prints": (lambda: Stack(*(Printing() for _ in range(DEPTH))), "it prints"),
    "a function of the user's": (lambda: Stack(*(Doubling() for _ in range(DEPTH))), "autograd function"),
    "it hooks gradients": (lambda: Stack(*(Hooking() for _ in range(DEPTH))), "hooks a gradient"),
    "it writes a part of a tensor outside": (_writing_outside, "closes over"),
    "an object decides": (lambda: _told_outside(Layer()), ""),
    "a module decides": (lambda: _told_outside(nn.Identity()), ""),
    "it changes an object": (_handing, "or its arguments"),
    "it is given an iterator": (_iterating, "given an object (list_iterator)"),
    "an object says which it is": (_with_state, ""),
    "modules in it have hooks": (_hooked, "has hooks"),
    "it is called in a checkpoint": (
        lambda: _checkpointed(lambda block: lambda x: block(x), use_reentrant=False),
        "in a checkpoint",
    ),
    "a function draws without gradients": (_drawing_without_gradients, "draws random numbers"),
}
"""Programs whose blocks are traced at each call, and what is said of that."""


@pytest.mark.parametrize("name", TRACED)
def test_what_cannot_be_copied_is_traced_and_says_why(name: str) -> None:
    make, reason = TRACED[name]
    program = make()
    Keeping.kept.clear()
    original = copy.deepcopy(program) if isinstance(program, nn.Module) else program
    compiled = aotdist.compile(program, backend="fx")
    ends = []
    for call in (original, compiled):
        x = torch.arange(48.0).view(SIZE).sin().requires_grad_()
        torch.manual_seed(0)
        out = call(x)
        sum(end.sum() for end in (out if isinstance(out, tuple) else (out,))).backward()  # type: ignore[union-attr]
        ends.append((*(out if isinstance(out, tuple) else (out,)), x.grad))
    assert all(torch.equal(eager, ours) for eager, ours in zip(*ends, strict=True))
    if isinstance(original, nn.Module) and isinstance(program, nn.Module):
        assert all(map(torch.equal, original.buffers(), program.buffers()))
    eager, ours = Keeping.kept[: len(Keeping.kept) // 2], Keeping.kept[len(Keeping.kept) // 2 :]
    assert len(eager) == len(ours) == (DEPTH if name == "it keeps values" else 0)
    assert all(map(torch.equal, eager, ours))
    said = str(aotdist.explain(compiled))
    assert reason in said
    assert "traced once" not in said


@pytest.mark.parametrize("kind", [Block, Rectified])
def test_backwards_of_a_step_are_copied(kind: type[Block]) -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model, step = _whole_step(kind)
        call = aotdist.compile(step, backend="fx") if compiles else step
        losses = [call(torch.randn(SIZE)) for _ in range(3)]
        found.append((*losses, *model.parameters()))
    assert all(map(torch.equal, *found))
    assert "traced once" in str(aotdist.explain(call))


def test_gradients_of_results_have_what_comes_by_way_of_others() -> None:
    run, found = _scoring(), []
    for call in (run, aotdist.compile(run, backend="fx")):
        total, *values = call(torch.arange(48.0).view(SIZE).sin().requires_grad_())
        found.append(torch.autograd.grad(total, values))
    assert all(map(torch.equal, *found))


def test_gradients_of_gradients_are_those_of_a_trace_of_each_call() -> None:
    model = Stack(*(Gated() for _ in range(DEPTH)))  # attention has none on every torch
    found = []
    for instantiate in (True, False):
        settings = aotdist.Settings(instantiate=instantiate)
        call = aotdist.compile(copy.deepcopy(model), backend="fx", settings=settings)
        x = torch.arange(48.0).view(SIZE).sin().requires_grad_()
        (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), (x, *call.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_gradients_of_gradients_of_batches_of_several_sizes() -> None:
    """The second size is a symbol, and a program with symbols is not traced anew."""
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Stack(*(Gated() for _ in range(DEPTH))).double()
        call = aotdist.compile(model, backend="fx") if compiles else model
        for batch in (2, 3, 4):
            x = torch.randn(batch, *SIZE[1:], dtype=torch.float64, requires_grad=True)
            (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
            grad.square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-18)  # sums in another order
    assert len(aotdist.explain(call).artifacts) == 2


def test_a_program_that_asks_more_of_its_blocks_than_copies_give_is_traced_whole() -> None:
    model = Stack(*(Gated() for _ in range(DEPTH)))

    def penalty(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    compiled, found = aotdist.compile(penalty, backend="fx"), []
    for call in (penalty, compiled):
        x = torch.arange(48.0).view(SIZE).sin().requires_grad_()
        call(x).backward()
        found.append(x.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]
    assert "traced once" not in str(aotdist.explain(compiled))
