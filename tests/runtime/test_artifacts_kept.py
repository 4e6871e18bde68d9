"""What is kept for each kind of call: how much of it, how many, and what they can do without the rest."""

from __future__ import annotations

import gc
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import aotdist
from aotdist.runtime.artifact import Artifact
from aotdist.torch_seam.functional import FunctionalTensor
from aotdist.trace.later_backwards import LaterBackwards
from aotdist.trace.recorder import Recorder


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def objects_of(artifact: Artifact, *shared: Any) -> Counter[type]:
    """How many objects of each type an artifact holds, beside what is shared, and classes and modules."""
    seen, waiting, found = {id(one) for one in shared}, [artifact], Counter[type]()
    while waiting:
        one = waiting.pop()
        is_namespace = isinstance(one, dict) and "__file__" in one
        if id(one) in seen or is_namespace or isinstance(one, (type, types.ModuleType)):
            continue
        seen.add(id(one))
        found[type(one)] += 1
        waiting += gc.get_referents(one)
    return found


def artifacts_of(model: Any) -> list[Artifact]:
    return model._compiled_call_impl.artifacts


@pytest.mark.parametrize("training", [True, False])
def test_an_artifact_holds_its_graphs_and_nothing_of_its_trace(training: bool) -> None:
    model = aotdist.compile(encoder().train(training), backend="fx", dynamic=False)
    with torch.set_grad_enabled(training):
        for length in (3, 4):
            model(torch.randn(2, length, 8))
    first = artifacts_of(model)[1]
    found = objects_of(first, model, model._compiled_call_impl)
    assert found[FunctionalTensor] == found[Recorder] == 0 and found[Artifact] == 1
    graphs = {graph.gm.graph for one in artifacts_of(model) for graph in one.compilation.every_graph()}
    num_nodes = sum(len(graph.nodes) + 1 for graph in graphs)  # each has a root; it shows those of all
    assert 50 < found[torch.fx.Node] <= num_nodes


def test_a_report_says_what_is_kept() -> None:
    model = aotdist.compile(encoder(), backend="fx")
    for length in (3, 4):
        model(torch.randn(2, length, 8))
    last, first = (one.memory for one in model.explain().artifacts)
    assert (last.trace, first.trace) == (True, False)
    nodes = sum(len(graph.graph.nodes) for graph in model.graphs[1].values())
    assert nodes <= first.nodes and len(artifacts_of(model)[1].source) < first.code < 10**6
    text = str(model.explain())
    assert " nodes, " in text and "KiB of code, and the trace\n" in text and "KiB of code\n" in text
    constant = aotdist.compile(lambda x: x + torch.tensor([1.0, 2.0]), backend="fx")
    constant(torch.ones(2))
    assert constant.explain().artifacts[0].memory.constants == 8


def test_the_trace_goes_when_another_call_is_compiled_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[weakref.ref[LaterBackwards]] = []
    made = LaterBackwards.__init__

    def noting(self: LaterBackwards, *args: Any, **named: Any) -> None:
        traced.append(weakref.ref(self))
        made(self, *args, **named)

    monkeypatch.setattr(LaterBackwards, "__init__", noting)
    model = aotdist.compile(encoder(), backend="fx", dynamic=False)
    model(torch.randn(2, 3, 8))
    gc.collect()
    assert len(traced) == 1 and traced[0]() is not None
    model(torch.randn(2, 4, 8))
    gc.collect()
    assert len(traced) == 2 and traced[0]() is None and traced[1]() is not None


def test_a_program_that_is_another_by_the_time_it_is_traced_anew() -> None:
    model = aotdist.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="fx")
    x = torch.randn(2, 4, requires_grad=True)
    y = model(x).sum()
    model(torch.randn(3, 4))
    model[1] = nn.Sigmoid()
    with pytest.raises(aotdist.UnsupportedProgram, match="traced anew(.|\n)* it is another program now"):
        torch.autograd.grad(y, x, create_graph=True)
    assert torch.autograd.grad(y, x)[0].shape == x.shape


def twice(call: Callable[[torch.Tensor], torch.Tensor], size: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(size)
    x = torch.randn(size, 4, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(call(x).sin().sum(), x, create_graph=True)
    return grad.detach(), *torch.autograd.grad(grad.square().sum(), x)


def _normed(x: torch.Tensor) -> torch.Tensor:
    norm = x.norm().clone()
    with torch.no_grad():
        norm.clamp_min_(1e-8)
    return x / norm


WEIGHT = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
TWICE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear and gelu": lambda x: F.gelu(x @ WEIGHT),
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "softmax": lambda x: F.softmax(x, -1) * x,
    "what no history leads to": lambda x: x * torch.no_grad()(torch.cos)(WEIGHT[0]),
    "another formula": F.silu,
    "a write under no_grad": _normed,
    "a value under no_grad": lambda x: x * torch.no_grad()(torch.sin)(x),
    "complex numbers": lambda x: torch.fft.rfft(x).abs(),
    "an assigned slice": lambda x: F.pad(x[None], (1, 1), mode="circular").sin(),
}


@pytest.mark.parametrize("name", TWICE)
def test_gradients_of_gradients_once_others_were_compiled(name: str) -> None:
    fn = TWICE[name]
    compiled = aotdist.compile(lambda x: fn(x), backend="fx")
    for size in (2, 3):
        compiled(torch.randn(size, 4, dtype=torch.float64, requires_grad=True)).sum().backward()
    for size in (3, 2):
        artifact = next(a for a in compiled.artifacts if a.fit.examples[0].shape[0] == size)
        assert artifact.compilation.region.has_trace() is (size == 3)
        (grad, second), (expected, of_eager) = twice(compiled, size), twice(fn, size)
        assert torch.equal(grad, expected)
        torch.testing.assert_close(second, of_eager, rtol=1e-10, atol=1e-12)


def test_a_trace_that_was_used_stays() -> None:
    compiled = aotdist.compile(lambda x: F.gelu(x @ WEIGHT), backend="fx")
    twice(compiled, 2)
    compiled(torch.randn(3, 4, dtype=torch.float64, requires_grad=True))
    assert compiled.artifacts[1].compilation.region.has_trace()


def test_what_eager_cannot_differentiate_twice_keeps_no_trace() -> None:
    def attention(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    compiled = aotdist.compile(attention, backend="fx")
    for length in (3, 4):
        x = torch.randn(1, 2, length, 8, requires_grad=True)
        compiled(x).sum().backward()
    assert not compiled.artifacts[1].compilation.region.has_trace()
    x = torch.randn(1, 2, 3, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(attention(x).sum(), x)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    assert torch.equal(grad, expected)
    with pytest.raises(RuntimeError, match="flash_attention_for_cpu_backward is not implemented"):
        grad.sum().backward()


def lengths_of(compiled: Any) -> list[int]:
    return [artifact.fit.examples[0].shape[0] for artifact in compiled.artifacts]


def test_the_one_used_longest_ago_is_dropped_and_freed() -> None:
    settings = {"max_artifacts": 2, "dynamic": False}
    compiled = aotdist.compile(lambda x: (x * 2).exp(), backend="fx", settings=settings)
    x = torch.ones(1, requires_grad=True)
    first = compiled(x)
    dropped = weakref.ref(compiled.artifacts[0].call)
    compiled(torch.ones(2))
    compiled(torch.ones(1, requires_grad=True))
    with pytest.warns(UserWarning, match="dropped") as warned:
        compiled(torch.ones(3))
        assert lengths_of(compiled) == [3, 1]
        compiled(torch.ones(4))
        assert lengths_of(compiled) == [4, 3]
    assert len(warned) == 1
    gc.collect()
    assert dropped() is None
    first.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * (2 * torch.ones(1)).exp())
    compiled(torch.ones(1, requires_grad=True)).sum().backward()
    assert lengths_of(compiled) == [1, 4]


def test_a_warning_early_and_one_at_the_limit() -> None:
    settings = {"max_artifacts": 10, "dynamic": False}
    compiled = aotdist.compile(lambda x: x * 2, backend="fx", settings=settings)
    texts: dict[int, str] = {}
    for size in range(2, 15):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            compiled(torch.ones(size))
        texts |= dict.fromkeys([size] * len(seen), "".join(str(one.message) for one in seen))
    assert list(texts) == [10, 12] and len(compiled.artifacts) == 10
    assert "dropped" not in texts[10] and "`max_artifacts` is 10" in texts[12]
    for text in texts.values():
        assert all(word in text for word in ("args[0]", "dynamic=True", "mark_dynamic", "disable"))
    compiled.reset()
    for size in range(2, 10):
        compiled(torch.ones(size))
    with pytest.warns(UserWarning, match="compiled 9 times"):
        compiled(torch.ones(11))
