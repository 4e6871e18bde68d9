"""What `torch.compile` made, inside of programs of `aotdist.compile`: inlined, and every bit is eager's.

Eager means that they run as they were written, too (`torch.compiler.set_stance("force_eager")`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import aotdist
from aotdist.api import compiled_call
from aotdist.functorch import aot_module
from tests.dynamo.comparison import played
from tests.semantics.observation import Scene, assert_same

FULL = {"fullgraph": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "fullgraph": FULL,
    "dynamic": {"dynamic": True},
    "static": {"fullgraph": True, "dynamic": False},
    "mode": {"mode": "max-autotune", "fullgraph": True},
    "options": {"options": {"shape_padding": True}},
    "another backend": {"backend": "eager", "fullgraph": True},
    "our backend": {"backend": "aotdist", "fullgraph": True},
}

Compile = Callable[[Any], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.linear(self.norm(x)).relu(), 0.25, self.training)

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


def wrapped(module: nn.Module) -> nn.Module:
    return torch.compile(module, **FULL)


def in_place(module: nn.Module) -> nn.Module:
    module.compile(**FULL)
    return module


def by_us(module: nn.Module) -> nn.Module:
    module.compile(backend="aotdist", options={"backend": "fx"})
    return module


def blocks_of(compiled: Compile) -> nn.Module:
    return nn.Sequential(compiled(Block()), compiled(Block()))


def a_method() -> Any:
    block = Block()
    block.called = torch.compile(block.other, **FULL)
    block.forward = lambda x: block.called(x) + 1
    return block


def its_forward() -> Any:
    block = Block()
    block.forward = torch.compile(block.forward, **FULL)
    return nn.Sequential(block, Block())


class Decorated(Block):
    @torch.compile(fullgraph=True)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x) + 1


@torch.compile(fullgraph=True)
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y).sin()


def made_inside(x: torch.Tensor) -> torch.Tensor:
    return torch.compile(product, dynamic=False, fullgraph=True)(x, x.t())


def one_in_another() -> Any:
    inner = torch.compile(torch.sin, **FULL)
    outer = torch.compile(lambda x: inner(x) * product(x, x.t()).sum(), **FULL)
    return lambda x: outer(x) + inner(x)


def without_tensors() -> Any:
    positions = torch.compile(lambda count: torch.arange(count).float(), **FULL)
    return lambda x: x * positions(x.size(1))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.compile(fullgraph=True)
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0].cos()


def hooked() -> Any:
    halved = torch.compile(lambda grad: grad / 2, **FULL)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        y.register_hook(halved)
        return y.sin()

    return fn


def with_a_region() -> Any:
    region = torch.compiler.nested_compile_region(lambda x: x.sin() * 2)
    return torch.compile(lambda x: region(x) + region(x + 1), **FULL)


def saves_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, saves_products)


def checkpointed(compiled: Compile, **how: Any) -> Any:
    blocks = nn.ModuleList([compiled(Block()), compiled(Block())])

    def fn(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = checkpoint(block, x, **how)
        return x

    return fn


MAKERS: dict[str, Callable[[], Any]] = {
    "modules in place": lambda: blocks_of(in_place),
    "modules that are wrapped": lambda: blocks_of(wrapped),
    "modules by our backend": lambda: blocks_of(by_us),
    "the whole module in place": lambda: in_place(nn.Sequential(Block(), Block())),
    "the whole module, wrapped": lambda: wrapped(nn.Sequential(Block(), Block())),
    "a method": a_method,
    "a forward that is replaced": its_forward,
    "a forward that is decorated": Decorated,
    "a function": lambda: lambda x: product(x, x.t()) + 1,
    "made in the call": lambda: made_inside,
    "one in another": one_in_another,
    "a function without tensors": without_tensors,
    "the backward of a function": lambda: lambda x: Twice.apply(x * 2),
    "a hook": hooked,
    "under vmap": lambda: lambda x: torch.vmap(lambda row: product(x, row))(x.unsqueeze(-1)),
    "around torch.func": lambda: torch.compile(torch.func.grad(lambda x: product(x, x.t()).sum()), **FULL),
    "a region": with_a_region,
    "what is disabled": lambda: torch.compile(torch.compiler.disable(lambda x: x.sin() * 2)),
    "a checkpoint": lambda: checkpointed(wrapped, use_reentrant=False),
    "a checkpoint, in place": lambda: checkpointed(in_place, use_reentrant=False),
    "a checkpoint of our backend": lambda: checkpointed(by_us, use_reentrant=False),
    "a reentrant checkpoint": lambda: checkpointed(wrapped, use_reentrant=True),
    "a selective checkpoint": lambda: checkpointed(in_place, use_reentrant=False, context_fn=SELECTIVE),
    "around a checkpoint": lambda: in_place(checkpoint_wrapper(Block(), context_fn=SELECTIVE)),
    "in a checkpoint": lambda: checkpoint_wrapper(wrapped(Block()), context_fn=SELECTIVE),
}

pytestmark = pytest.mark.filterwarnings("ignore:Using .torch.compile.module:UserWarning")


def scenes(make: Callable[[], Any]) -> Sequence[Scene]:
    target = make()
    return [Scene(target, (torch.randn(rows, 8, requires_grad=True),)) for rows in (4, 4, 3)]


def assert_as_written(make: Callable[[], Any], compile: Compile) -> None:
    build = functools.partial(scenes, make)
    with torch.compiler.set_stance("force_eager"):
        eager = played(build, lambda target: target)
    assert_same(eager, played(build, compile))


def by_fx(target: Any) -> Any:
    return aotdist.compile(target, backend="fx")


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_what_is_compiled(make: Callable[[], Any]):
    assert_as_written(make, by_fx)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_however_it_is_compiled(options: dict[str, Any]):
    def make() -> Any:
        weight = nn.Parameter(torch.randn(8, 8))
        inner = torch.compile(lambda x: (x @ weight).sin(), **options)
        return lambda x: inner(x) + 1

    assert_as_written(make, by_fx)


@pytest.mark.parametrize("stance", ["fail_on_recompile", "eager_then_compile"])
def test_whatever_the_stance(stance: str):
    with torch.compiler.set_stance(stance):
        assert torch.equal(by_fx(lambda x: product(x, x))(torch.eye(3)), torch.eye(3).sin())


@pytest.mark.parametrize("backend", ["inductor", "auto"])
@pytest.mark.parametrize("name", ["modules in place", "a selective checkpoint"])
def test_other_backends(name: str, backend: str):
    def trained(compile: Compile) -> list[torch.Tensor]:
        torch.manual_seed(0)
        call = compile(MAKERS[name]())
        x = torch.randn(4, 8, requires_grad=True)
        for seed in range(2):
            torch.manual_seed(seed)
            call(x).square().sum().backward()
        return [x.grad]

    with torch.compiler.set_stance("force_eager"):
        expected = trained(lambda target: target)
    torch.testing.assert_close(trained(lambda t: aotdist.compile(t, backend=backend)), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # of eager
@pytest.mark.parametrize("backend", ["fx", "inductor"])
def test_flex_attention(backend: str):
    attention = torch.compile(flex_attention, fullgraph=True)
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    q = torch.randn(1, 2, 128, 16)
    got = aotdist.compile(lambda q: attention(q, q, q, block_mask=mask), backend=backend)(q)
    torch.testing.assert_close(got, flex_attention(q, q, q, block_mask=mask))


@pytest.mark.parametrize("compiled", [in_place, wrapped])
def test_other_ways_in(compiled: Compile):
    torch.manual_seed(0)
    model, x = blocks_of(compiled).eval(), torch.randn(3, 8)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        expected = model(x)
    assert torch.equal(aotdist.freeze(model, backend="fx")(x), expected)
    assert torch.equal(aot_module(model, lambda graph, args: graph)(x), expected)
    for settings in ({"is_compiling": True}, {"dynamic": True}):
        assert torch.equal(aotdist.compile(model, backend="fx", settings=settings)(x), expected)
    assert all("relu" in str(graphs["forward"].code) for graphs in model.graphs) and aotdist.explain(model)


class Counting:
    """A backend that counts what it compiles, and what runs of that."""

    def __init__(self) -> None:
        self.compiled, self.ran = 0, 0

    def __call__(self, graph: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return graph(*args)

        return run


def test_what_dynamo_has_is_neither_used_nor_lost():
    counting = Counting()
    inner = torch.compile(lambda x: x.sin(), backend=counting, fullgraph=True)
    x = torch.ones(3)
    inner(x)
    assert torch.equal(by_fx(lambda x: inner(x) + 1)(x), x.sin() + 1)
    assert (counting.compiled, counting.ran) == (1, 1)
    inner(x)
    assert (counting.compiled, counting.ran) == (1, 2)


def test_other_threads_run_what_was_compiled():
    counting = Counting()
    inner = torch.compile(lambda x: x.sin(), backend=counting, fullgraph=True)

    inner(torch.ones(3))  # while a program is captured, other threads wait with what Dynamo has to compile

    def elsewhere() -> None:
        inner(torch.ones(3))
        with torch.compiler.set_stance("force_eager"):
            inner(torch.ones(3))

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = inner(x)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return y + inner(x)

    assert torch.equal(by_fx(fn)(torch.ones(3)), 2 * torch.ones(3).sin())
    assert (counting.compiled, counting.ran) == (1, 2)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def in_function(call: Any) -> Any:
    return lambda x: call(x) + 1


TURNED_AROUND: dict[str, tuple[Callable[[], Any], Compile]] = {
    "a module": (Block, lambda call: call),
    "a container": (lambda: nn.Sequential(nn.ReLU()), lambda call: call),
    "in a module": (Block, Outer),
    "a module in a function": (Block, in_function),
    "a function": (lambda: torch.sin, lambda call: call),
    "a function in another": (lambda: lambda x: x.sin(), in_function),
}


@pytest.mark.parametrize(("make", "around"), TURNED_AROUND.values(), ids=TURNED_AROUND.keys())
def test_torch_compile_around_ours_keeps_our_program(make: Callable[[], Any], around: Compile):
    inner, x = by_fx(make()), torch.randn(2, 8)
    torch.manual_seed(0)
    expected = around(inner)(x)
    compiled_call(inner).reset()
    counting = Counting()
    outer = torch.compile(around(inner), backend=counting)
    with torch.no_grad():  # Dynamo reads `.grad` of what comes back, which warns if it has a history
        torch.manual_seed(0)
        assert torch.equal(outer(x), expected)
    assert len(compiled_call(inner).artifacts) == 1
    assert counting.compiled == (around(inner) is not inner)
    # Before torch 2.12, Dynamo says nothing where it is left no frame at all.
    if torch.__version__ >= "2.12" or counting.compiled:
        with pytest.raises((torch._dynamo.exc.Unsupported, RuntimeError), match="aotdist"):
            torch.compile(around(inner), backend="eager", fullgraph=True)(x)


def test_export_goes_on_through_ours():
    model = by_fx(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    x = torch.randn(2, 8)
    exported = torch.export.export(Outer(model), (x,), strict=True).module()
    assert torch.equal(exported(x), 2 * model(x))
