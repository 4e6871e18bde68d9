"""What is recorded, when it is replayed, and whose memory its results lie in; on the CPU, with a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import aotdist
from aotdist.codegen import cuda_graphs
from aotdist.codegen.cuda_capture import recorded_device
from aotdist.program import Graph, Slot
from tests.codegen.recording import Rerun
from tests.kernels.reference import outcome
from tests.kernels.test_programs import SIZES, Program, program_of, tensors

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU, for which kernels are compiled: see tests/device"
)
IN_USE = "results of the last replay are in use"
ELSEWHERE = "the forward ran without its recording"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Rerun:
    rerun = Rerun()
    monkeypatch.setattr(cuda_graphs, "CAPTURE", rerun)
    return rerun


def graphed(target: Any, backend: str = "fx", **settings: Any) -> Any:
    return aotdist.compile(target, backend=backend, settings={"cuda_graphs": True, **settings})


def recordings(compiled: Any, name: str = "inference") -> Any:
    """What became of the calls of a graph, over all artifacts."""
    (artifact,) = compiled.explain().artifacts
    return next(graph.recordings for graph in artifact.graphs if graph.name == name)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def steps(call: Callable[..., Any], module: nn.Module, count: int) -> list[list[torch.Tensor]]:
    """Loss and parameters of some steps of training; the last loss is held during the next."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    found = []
    generator = torch.Generator().manual_seed(1)
    device = next(module.parameters()).device
    for _ in range(count):
        loss = call(torch.randn(3, 4, generator=generator).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.detach().clone(), *(p.detach().clone() for p in module.parameters())])
    return found


def same(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("backend", ["fx", pytest.param("triton", marks=interpreted)])
def test_training_is_recorded_at_the_second_step(backend: str, recorder: Rerun) -> None:
    plain, module = model(), model()
    without = aotdist.compile(plain, backend=backend)
    compiled = graphed(module, backend)
    assert same(steps(compiled, module, 5), steps(without, plain, 5))
    assert recorder.log == ["warm"] * 2 + ["record", "replay"] * 2 + ["replay"] * 6
    for half in ("forward", "backward"):
        assert recordings(compiled, half).made == 1
        assert recordings(compiled, half).without == {"to warm up": 1}


def test_inputs_are_copied_and_results_copied_out(recorder: Rerun) -> None:
    compiled = graphed(lambda x: x * 2)
    held = [compiled(torch.full((3,), float(number))) for number in range(5)]
    assert [out.tolist() for out in held] == [[2.0 * number] * 3 for number in range(5)]
    assert recorder.log == ["warm", "record", "replay", "replay", "replay", "replay"]


def test_expanded_and_transposed_inputs_are_copied_as_they_lie(recorder: Rerun) -> None:
    compiled = graphed(lambda x, y: (x + y.t()).sum(0))
    for number in range(4):
        x, y = torch.randn(1, 3).expand(5, 3), torch.randn(3, 5)
        assert torch.equal(compiled(x, y), (x + y.t()).sum(0)), number
    assert recorder.log.count("replay") == 3


def test_two_forwards_before_a_backward_run_apart(recorder: Rerun) -> None:
    module, eager = model(), model()
    compiled = graphed(module)
    for number in range(4):
        batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(number + k)) for k in (0, 9)]
        for call, owner in ((compiled, module), (eager, eager)):
            losses = [call(batch).square().mean() for batch in batches]
            for loss in losses:
                loss.backward()
            owner.grads = [p.grad.clone() for p in owner.parameters()]
            owner.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(module.grads, eager.grads, strict=True)), number
    assert recordings(compiled, "forward").without[IN_USE] > 0


def test_gradients_that_are_kept_are_not_written_over(recorder: Rerun) -> None:
    module, eager = model(), model()
    compiled = graphed(module)
    kept: list[list[list[torch.Tensor]]] = []
    for number in range(5):
        x = torch.randn(3, 4)
        kept.append(
            [
                list(torch.autograd.grad(call(x).sum() * number, list(call.parameters())))
                for call in (compiled, eager)
            ]
        )
    assert all(same([mine], [theirs]) for mine, theirs in kept)
    assert recordings(compiled, "backward").without[IN_USE] == 3


def test_views_of_what_is_lent_count(recorder: Rerun) -> None:
    weight = torch.ones(4, requires_grad=True)
    compiled = graphed(lambda x: (x * weight).exp().sum())
    kept = []
    for number in range(4):
        (grad,) = torch.autograd.grad(compiled(torch.full((4,), float(number))), weight)
        kept.append(grad[1:].view(-1))
        del grad
    expected = [number * torch.tensor(float(number)).exp().item() for number in range(4)]
    assert [view[0].item() for view in kept] == pytest.approx(expected)


def test_memory_that_is_lent_outlives_its_recording(recorder: Rerun) -> None:
    weight = torch.ones(4, requires_grad=True)
    compiled = graphed(lambda x: (x * weight).sum())
    for _ in range(3):
        (grad,) = torch.autograd.grad(compiled(torch.full((4,), 3.0)), weight)
        kept = grad
        del grad
    del compiled
    assert kept.tolist() == [3.0] * 4


def test_every_size_has_a_recording(recorder: Rerun) -> None:
    compiled = graphed(lambda x: x.sin().sum(0), dynamic=True)
    for size in (3, 5, 3, 5, 7, 3):
        x = torch.randn(size, 2)
        assert torch.equal(compiled(x), x.sin().sum(0))
    assert recordings(compiled).made == 2
    assert recordings(compiled).replays == 3


def test_sizes_beyond_the_limit_are_not_recorded(recorder: Rerun) -> None:
    compiled = graphed(lambda x: x.sin(), dynamic=True, max_artifacts=2)
    for size in (3, 4, 5, 5, 5):
        compiled(torch.randn(size))
    assert recordings(compiled).without == {"to warm up": 2, "more sizes than `max_artifacts`": 3}


def test_a_parameter_that_moves_is_recorded_anew_a_few_times(recorder: Rerun) -> None:
    module = nn.Linear(3, 3)
    compiled = graphed(module)
    x = torch.randn(2, 3)
    with torch.no_grad():
        for _ in range(8):
            module.weight.data = module.weight.data.clone() + 1
            assert torch.equal(compiled(x), nn.functional.linear(x, module.weight, module.bias))
    assert recorder.log.count("record") == 3
    assert recordings(compiled).without["parameters keep moving"] == 4


def test_both_halves_follow_parameters_that_moved_once(recorder: Rerun) -> None:
    module, plain = model(), model()
    compiled, without = graphed(module), aotdist.compile(plain, backend="fx")
    assert same(steps(compiled, module, 3), steps(without, plain, 3))
    for parameter in (*module.parameters(), *plain.parameters()):
        parameter.data = parameter.data.clone()
    assert same(steps(compiled, module, 3), steps(without, plain, 3))
    for half in ("forward", "backward"):
        assert recordings(compiled, half).made == 2
        assert recordings(compiled, half).without == {"to warm up": 1}


@interpreted
def test_buffers_that_the_program_writes_are_written_in_place(recorder: Rerun) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(x)
            return self.count * 2

    module = Counting()
    compiled = graphed(module, "triton")
    for number in range(1, 6):
        assert compiled(torch.ones(2)).tolist() == [2.0 * number] * 2
    assert module.count.tolist() == [5.0] * 2


@interpreted
def test_arguments_that_the_program_writes_are_copied_back(recorder: Rerun) -> None:
    def update(x: torch.Tensor, y: torch.Tensor) -> None:
        x.mul_(2).add_(y)

    compiled = graphed(update, "triton")
    for number in range(5):
        x, y = torch.full((4,), float(number)), torch.ones(4)
        compiled(x, y)
        assert x.tolist() == [2.0 * number + 1] * 4
    assert recorder.log.count("replay") == 4


def test_another_stream_runs_without(recorder: Rerun) -> None:
    compiled = graphed(lambda x: x + 1)
    for _ in range(3):
        compiled(torch.ones(2))
    recorder.stream = 1
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert recordings(compiled).without["on another stream than it was recorded for"] == 1


def test_a_backward_whose_forward_was_not_replayed_runs_without(recorder: Rerun) -> None:
    weight = torch.ones(4, requires_grad=True)
    compiled = graphed(lambda x: (x * weight).exp().sum())
    x = torch.ones(4)
    for _ in range(3):
        compiled(x).backward()
    first, second = compiled(x), compiled(x)
    weight.grad = None
    second.backward()
    assert weight.grad.tolist() == pytest.approx([torch.e] * 4)
    first.backward()
    assert recordings(compiled, "backward").without[ELSEWHERE] == 1


def test_explain_says_what_became_of_the_calls(recorder: Rerun) -> None:
    compiled = graphed(lambda x: x + 1)
    for _ in range(3):
        compiled(torch.ones(2))
    assert "CUDA graph: 1 recorded, 2 replays; run without: 1 to warm up" in str(compiled.explain())


def test_a_recording_that_fails_is_an_error_of_ours(recorder: Rerun, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = graphed(lambda x: x + 1)
    compiled(torch.ones(2))

    def record(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorder, "record", record)
    with pytest.raises(aotdist.UnsupportedProgram, match="cannot be recorded as a CUDA graph: operation not"):
        compiled(torch.ones(2))


def test_tensors_on_the_cpu_are_refused() -> None:
    with pytest.raises(aotdist.UnsupportedProgram, match=r"`args\[0\]` is a tensor on the cpu"):
        graphed(lambda x: x + 1)(torch.ones(2))


def test_conjugates_are_refused(recorder: Rerun) -> None:
    with pytest.raises(aotdist.UnsupportedProgram, match="is to be read otherwise than its bytes"):
        graphed(lambda x: x * 2)(torch.ones(2, dtype=torch.complex64).conj())


def test_results_are_no_views(recorder: Rerun) -> None:
    compiled = graphed(lambda x: (x + 1, x[:1].expand(4)))
    for _ in range(3):
        assert not compiled(torch.ones(4))[0]._is_view()


def test_masks_are_refused_and_indices_are_not(recorder: Rerun) -> None:
    def fill(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.index_put(x, (at,), torch.zeros(()))

    x, at = torch.ones(4), torch.tensor([0, 2])
    assert graphed(lambda x, at: x[at] + 1)(x, at).tolist() == [2.0, 2.0]
    assert graphed(fill)(x, at).tolist() == [0.0, 1.0, 0.0, 1.0]
    with pytest.raises(aotdist.UnsupportedProgram, match="waits for what a tensor holds"):
        graphed(fill)(x, x > 0)


def test_branches_that_depend_on_data_are_refused(recorder: Rerun) -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with pytest.raises(aotdist.UnsupportedProgram, match="goes on by what a tensor holds"):
        graphed(choose)(torch.ones(2))


def graph_of(target: Any, *more: Any, **kwargs: Any) -> Graph:
    """A graph that calls one operator on its only input."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    called = graph.call_function(target, (x, *more))
    called.meta["val"] = torch.empty(4, device="meta")
    graph.output((called,))
    gm = torch.fx.GraphModule({}, graph)
    called.kwargs = kwargs  # of which some cannot be printed as code
    return Graph(gm, (Slot("primal", "x"),), (Slot("output", "out[0]"),))


ATEN = torch.ops.aten
OBSTACLES = {
    "waits for what a tensor holds": graph_of(ATEN.nonzero.default),
    "is a collective": graph_of(torch.ops._c10d_functional.all_reduce.default, "sum", "0"),
    "draws from a generator of its own": graph_of(ATEN.bernoulli.default, generator=torch.Generator()),
    "writes an input that does not stay where it is": graph_of(ATEN.mul_.Tensor, 2.0),
}


@pytest.mark.parametrize("why", OBSTACLES)
def test_what_cannot_be_recorded_is_named(why: str) -> None:
    with pytest.raises(aotdist.UnsupportedProgram, match=why):
        recorded_device(OBSTACLES[why], frozenset(), "meta")


def test_what_stays_where_it_is_may_be_written() -> None:
    graph = OBSTACLES["writes an input that does not stay where it is"]
    assert recorded_device(graph, frozenset({0}), "meta") == torch.device("meta")


def test_a_compiled_gradient_of_a_gradient_is_recorded_too(recorder: Rerun) -> None:
    compiled = graphed(lambda x: (x.sin() * x).sum())
    for number in range(4):
        x = torch.full((3,), float(number), requires_grad=True)
        (first,) = torch.autograd.grad(compiled(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert torch.allclose(second, 2 * x.cos() - x * x.sin())


@given(program_of(), SIZES, st.booleans())
def test_random_programs_compute_the_same_when_replayed(
    program: Program, sizes: list[int], grad: bool
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cuda_graphs, "CAPTURE", rerun := Rerun())
        compiled, plain = graphed(program), aotdist.compile(program, backend="fx")
        for _ in range(3):
            args = tensors(sizes, torch.float64, transposed=False, grad=grad)
            args = [(arg.detach() * torch.rand(())).requires_grad_(grad) for arg in args]
            found, expected = outcome(compiled, args), outcome(plain, args)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert "replay" in rerun.log or "warm" not in rerun.log
