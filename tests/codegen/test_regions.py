"""Equal layers between collectives are compiled once, and what differs in anything is not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import aotdist
from aotdist.artifacts.cache.key import key_of
from aotdist.codegen.contract import Backend, Emission, Emitted
from aotdist.codegen.fx import FxBackend
from aotdist.codegen.regions import RegionCall, emit_by_regions, parts_of
from aotdist.errors import UnsupportedProgram
from aotdist.program import Graph, Slot
from aotdist.settings import Settings
from aotdist.torch_seam.inductor import inductor_config
from tests.codegen.captured import captured, emission
from tests.semantics.meshes import mesh as mesh

C10D = torch.ops._c10d_functional
Layer = Callable[[Tensor, Tensor], Tensor]


def mixed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight) * 0.5 + x.softmax(-1)


def stack(*layers: Layer) -> Callable[..., list[Tensor]]:
    """Layers with a sum over ranks behind each."""

    def fn(x: Tensor, *weights: Tensor) -> list[Tensor]:
        for layer, weight in zip(layers, weights, strict=True):
            x = C10D.wait_tensor(C10D.all_reduce(layer(x, weight), "sum", "0"))
        return [x]

    return fn


def tensors(num_layers: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator) for _ in range(num_layers + 1)]


@dataclass(frozen=True)
class Recording(Backend):
    """Runs what Inductor would be given operator by operator, and keeps it."""

    graphs: list[Graph] = field(default_factory=list[Graph])
    strides: Callable[[Graph], Any] = lambda _: None
    name: str = "inductor"
    any_tangents: bool = True

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        self.graphs.append(graph)
        return replace(FxBackend().emit(graph, emission), output_strides=self.strides(graph))


def kinds(graph: Graph, static_ins: frozenset[int] = frozenset()) -> list[int]:
    """The kinds of the regions of a graph, in order, as numbers."""
    calls = [
        part
        for part in parts_of(graph, emission(graph, static_ins=static_ins))
        if isinstance(part, RegionCall)
    ]
    seen = list(dict.fromkeys(call.kind for call in calls))
    return [seen.index(call.kind) for call in calls]


@pytest.mark.parametrize("num_layers", [3, 7])
def test_equal_layers_are_compiled_once_and_run_as_before(num_layers: int, mesh: Any) -> None:
    inputs, fn = tensors(num_layers), stack(*[mixed] * num_layers)
    graph, backend = captured(fn, inputs), Recording()
    emitted = emit_by_regions(backend, graph, emission(graph))
    assert emitted.regions == (num_layers,) and len(backend.graphs) == 1
    args, (expected,) = list(inputs), fn(*inputs)
    (result,) = emitted.call(args)
    assert torch.equal(result, expected) and not args
    assert emitted.source.count("= region_0(args)") == num_layers


def test_a_region_frees_what_nobody_reads_any_more(mesh: Any) -> None:
    alive = list[bool]()

    class Watching(Recording):
        def emit(self, graph: Graph, emission: Emission) -> Emitted:
            emitted = FxBackend().emit(graph, emission)

            def call(args: list[Any]) -> Any:
                first = weakref.ref(args[0])
                results = emitted.call(args)
                alive.append(first() is not None)
                return results

            return replace(emitted, call=call)

    graph = captured(stack(*[mixed] * 3), tensors(3))
    emit_by_regions(Watching(), graph, emission(graph)).call(tensors(3))
    assert alive == [False] * 3


def scaled(by: Any) -> Layer:
    return lambda x, weight: mixed(x, weight) * by


def written(x: Tensor, weight: Tensor) -> Tensor:
    made = mixed(x, weight)
    weight.copy_(made)
    return made


DIFFERENT: dict[str, tuple[Layer, Layer]] = {
    "a number": (scaled(0.25), scaled(0.75)),
    "the type of a number": (scaled(2), scaled(2.0)),
    "the sign of a zero": (scaled(0.0), scaled(-0.0)),
    "an operator": (mixed, lambda x, weight: torch.sin(x @ weight) * 0.5 + x.softmax(-1)),
    "a write": (mixed, written),
    "which values it reads": (lambda x, w: mixed(x, w) - x, lambda x, w: x - mixed(x, w)),
    "how results lie": (lambda x, w: mixed(x, w).contiguous(), lambda x, w: mixed(x, w).t().clone().t()),
    "a graph in it": (
        lambda x, w: torch.cond(x.sum() > 0, mixed, lambda x, w: x @ w, (x, w)),
        lambda x, w: torch.cond(x.sum() > 0, mixed, lambda x, w: w @ x, (x, w)),
    ),
    "a number in a graph in it": (
        lambda x, w: torch.cond(x.sum() > 0, mixed, lambda x, w: w * 2, (x, w)),
        lambda x, w: torch.cond(x.sum() > 0, mixed, lambda x, w: w * 3, (x, w)),
    ),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=list(DIFFERENT))
def test_what_differs_is_compiled_twice(one: Layer, other: Layer) -> None:
    assert kinds(captured(stack(one, other, one, other), tensors(4))) == [0, 1, 0, 1]


GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "strides": lambda weight: weight.t(),
    "dtype": lambda weight: weight.to(torch.bfloat16),
    "sizes": lambda weight: weight.new_zeros(1, 4).expand(4, 4),
    "where memory begins": lambda weight: weight.new_zeros(17)[1:].view(4, 4),
}


@pytest.mark.parametrize("other", GIVEN.values(), ids=list(GIVEN))
def test_what_is_given_other_tensors_is_compiled_twice(other: Callable[[Tensor], Tensor]) -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return mixed(x, weight.float())

    x, *weights = tensors(4)
    weights[1], weights[3] = other(weights[1]), other(weights[3])
    assert kinds(captured(stack(*[layer] * 4), [x, *weights])) == [0, 1, 0, 1]


def test_what_keeps_its_address_and_what_shares_memory() -> None:
    graph = captured(stack(*[mixed] * 4), tensors(4))
    assert kinds(graph, static_ins=frozenset({2, 4})) == [0, 1, 0, 1]

    def fn(x: Tensor, *weights: Tensor) -> list[Tensor]:
        both = [(weights[0], weights[1]), (weights[2], weights[2]), (weights[3], weights[0])]
        for one, other in both:
            x = C10D.wait_tensor(C10D.all_reduce(mixed(x, one) + other.view(4, 4), "sum", "0"))
        return [x]

    assert kinds(captured(fn, tensors(4))) == [0, 1, 0]


def test_constants_that_are_tensors_are_given(mesh: Any) -> None:
    constants = torch.randn(3, 4, 4).unbind()

    def fn(x: Tensor) -> list[Tensor]:
        return stack(*[mixed] * 3)(x, *constants)

    graph, backend = captured(fn, tensors(0)), Recording()
    emitted = emit_by_regions(backend, graph, emission(graph))
    assert len(backend.graphs) == 1 or graph is backend.graphs[0]
    (result,), (expected,) = emitted.call(tensors(0)), fn(*tensors(0))
    assert torch.equal(result, expected)


def test_a_deeper_model_finds_what_a_shallow_one_left() -> None:
    def keys(num_layers: int) -> set[str]:
        graph = captured(stack(*[mixed] * num_layers, torch.matmul), tensors(num_layers + 1))
        for node in graph.gm.graph.nodes:
            node.meta.pop("eager_input_vals", None)  # `make_fx` leaves these, our own trace does not
        known = emission(graph)
        assert known.fake_mode is not None
        alone = [part.graph for part in parts_of(graph, known) if isinstance(part, RegionCall)]
        return {key_of("forward", one, known.fake_mode, Settings()) for one in alone}

    assert len(keys(3)) == 2 and keys(3) == keys(9)


def test_what_fills_a_bucket_belongs_to_another_layer(mesh: Any) -> None:
    """Gathers start one layer ahead, so the last layer starts none."""

    def fn(x: Tensor, *shards: Tensor) -> list[Tensor]:
        gathers = list[Tensor]()
        for shard in shards:
            bucket = torch.ops.aten.cat.default([shard.view(-1), shard.view(-1)])
            gathers.append(C10D.all_gather_into_tensor(bucket, 1, "0"))
            if len(gathers) > 1:
                x = mixed(x, C10D.wait_tensor(gathers[-2]).view(8, 4)[:4])
        return [mixed(x, C10D.wait_tensor(gathers[-1]).view(8, 4)[:4])]

    inputs = tensors(4)
    graph, backend = captured(fn, inputs), Recording()
    emitted = emit_by_regions(backend, graph, emission(graph))
    assert emitted.regions == (4,)
    assert torch.equal(emitted.call(list(inputs))[0], fn(*inputs)[0])


def whole(backend: Recording, num_layers: int = 3) -> bool:
    graph = captured(stack(*[mixed] * num_layers), tensors(num_layers))
    emitted = emit_by_regions(backend, graph, emission(graph))
    return backend.graphs[-1] is graph and emitted.regions == ()


def test_what_would_not_save_much_is_compiled_as_a_whole() -> None:
    def long(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.cos(x) @ weight
        return x

    graph, backend = captured(stack(mixed, long, mixed), tensors(3)), Recording()
    assert kinds(graph) == [0, 1, 0]
    emit_by_regions(backend, graph, emission(graph))
    assert backend.graphs == [graph]


def test_a_region_that_lays_results_out_otherwise() -> None:
    assert whole(Recording(strides=lambda graph: tuple((1, 4) for _ in graph.outs)))


def test_a_region_that_does_not_compile() -> None:
    class Refusing(Recording):
        def emit(self, graph: Graph, emission: Emission) -> Emitted:
            if len(graph.ins) == 2:
                raise UnsupportedProgram("no")
            return super().emit(graph, emission)

    assert whole(Refusing())


def test_other_backends_get_the_whole() -> None:
    assert whole(Recording(name="mine"))


@pytest.mark.parametrize("name", ["bucket_all_gathers_fx", "reorder_for_compute_comm_overlap"])
def test_inductor_sees_the_collectives_that_it_is_asked_to_move(name: str) -> None:
    assert not whole(Recording())
    with inductor_config(**{name: "all" if name.startswith("bucket") else True}):
        assert whole(Recording())


def deep(layer: Layer) -> Callable[..., list[Tensor]]:
    """Layers with nothing between them."""

    def fn(x: Tensor, *weights: Tensor) -> list[Tensor]:
        for weight in weights:
            x = layer(x, weight)
        return [x]

    return fn


def long(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(8):
        x = x - x.softmax(-1) * 0.5
    return x @ weight


def test_layers_are_compiled_once_where_nothing_communicates() -> None:
    inputs, fn = tensors(5), deep(long)
    graph, backend = captured(fn, inputs), Recording()
    emitted = emit_by_regions(backend, graph, emission(graph))
    assert max(emitted.regions) >= 4 and len(backend.graphs) <= 3
    args, (expected,) = list(inputs), fn(*inputs)
    (result,) = emitted.call(args)
    assert torch.equal(result, expected) and not args


def test_new_values_of_arguments_are_stored_by_the_region_that_computes_them() -> None:
    """A weight that is read again at the end is left to the caller."""

    def fn(x: Tensor, *weights: Tensor) -> list[Tensor]:
        made = []
        for weight in weights:
            x = long(x, weight)
            made.append(weight * 0.5 + x)
        return [x + weights[0].t(), *made]

    inputs = tensors(5)
    graph = captured(fn, inputs)
    slots = (graph.outs[0], *(Slot("write", f"args[{position}]") for position in range(1, 6)))
    graph = Graph(graph.gm, graph.ins, slots)
    calls = [part for part in parts_of(graph, emission(graph)) if isinstance(part, RegionCall)]
    written = {argument.name for call in calls for argument in call.segment.writes.values()}
    assert written == {graph.placeholders()[position].name for position in range(2, 6)}
    roles = [slot.role for call in calls for slot in call.graph.outs]
    assert roles.count("write") == 4


def test_memory_may_begin_elsewhere_if_it_is_aligned_alike() -> None:
    x, *_ = tensors(1)
    memory = torch.randn(8 * 16 + 1)
    alike = [memory[16 * position : 16 * position + 16].view(4, 4) for position in range(4)]
    assert len(set(kinds(captured(stack(*[mixed] * 4), [x, *alike])))) == 1
    askew = [*alike[:3], memory[65:81].view(4, 4)]
    assert kinds(captured(stack(*[mixed] * 4), [x, *askew])) == [0, 0, 0, 1]


@pytest.mark.skipif(torch.__version__ < "2.12", reason="its attention compares sizes with numbers")
def test_sizes_that_are_symbols_are_given_to_each_region() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(5)]
        return torch.nn.Sequential(*layers)

    eager, compiled = model(), aotdist.compile(model(), backend="inductor", dynamic=True)
    for length in (5, 7):
        x = torch.randn(2, length, 8)
        expected, result = eager(x), compiled(x)
        expected.square().sum().backward()
        result.square().sum().backward()
        torch.testing.assert_close(result, expected)
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    (artifact,) = aotdist.explain(compiled).artifacts
    assert [max(graph.regions, default=0) for graph in artifact.graphs if graph.regions] == [3, 3]


class Block(torch.nn.Module):
    """A feed-forward layer on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def test_a_whole_step_is_compiled_by_its_layers() -> None:
    """The updates of a layer's parameters are part of its backward, and stored in place there."""

    def training() -> tuple[Callable[[Tensor], Tensor], torch.nn.Module]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[Block() for _ in range(6)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

        def step(x: Tensor) -> Tensor:
            loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, model

    (eager, expected), (plain, model) = training(), training()
    compiled = aotdist.compile(plain, backend="inductor")
    for _ in range(3):
        x = torch.randn(2, 5, 8)
        torch.testing.assert_close(compiled(x), eager(x))
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    *_, artifact = aotdist.explain(compiled).artifacts
    assert sum(count > 1 for count in artifact.graphs[-1].regions) == 2  # forward, backward and updates


def test_what_is_sent_behind_a_region_is_the_old_value() -> None:
    """What fills a bucket runs behind the region that it stands in, and may read what that would store."""

    def fn(x: Tensor, weight: Tensor) -> list[Tensor]:
        bucket = torch.ops.aten.cat.default([weight.view(-1), weight.view(-1)])
        new = mixed(x, weight)
        sent = C10D.wait_tensor(C10D.all_reduce(bucket, "sum", "0"))
        return [sent, new]

    graph = captured(fn, tensors(1))
    graph = Graph(graph.gm, graph.ins, (graph.outs[0], Slot("write", "args[1]")))
    calls = [part for part in parts_of(graph, emission(graph)) if isinstance(part, RegionCall)]
    assert calls and not any(call.segment.writes for call in calls)
