"""What a library lays out otherwise than it was traced: kernels that read it are emitted anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import custom_op

import aotdist
from aotdist.codegen import cuda_graphs
from aotdist.codegen.ahead import Ahead
from aotdist.codegen.triton import summary, with_kernels
from aotdist.errors import UnsupportedProgram
from aotdist.kernels.checking import CheckedLaunch
from aotdist.kernels.running import Jitted
from aotdist.settings import Settings
from benchmarks.kernels.graphs import graphs_of
from tests.codegen.recording import Rerun
from tests.kernels.reference import outcome, strides


@custom_op("checking::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """The last dimension varies slowest if that dimension is even, which the fake kernel does not know."""
    twice = x * 2
    return twice.mT.contiguous().mT if x.shape[-1] % 2 == 0 else twice.contiguous()


@custom_op("checking::both", mutates_args=())
def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * 2).mT.contiguous().mT, x + 1


@custom_op("checking::wrong", mutates_args=())
def wrong(x: Tensor) -> Tensor:
    return x.double()


doubled.register_fake(lambda x: x.new_empty(x.shape))
both.register_fake(lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)))
wrong.register_fake(lambda x: x.new_empty(x.shape))
doubled.register_autograd(lambda ctx, gradient: doubled(gradient))
both.register_autograd(lambda ctx, *gradients: doubled(gradients[0]) + gradients[1])


def returned_too(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first = doubled(x)
    return first, (first * y).sin(), doubled(first.relu()).exp()


def viewed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    flat = doubled(x * y).flatten(1)
    return (flat * 3).sum(1), flat.cos(), doubled(y).mT.exp()


def picked(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first, second = both(x)
    total = first.square() + second * y
    return (total / total.sum(-1, keepdim=True)), torch.var_mean(first, -1)[1] * y.sum()


def inputs(size: int = 6) -> list[Tensor]:
    torch.manual_seed(size)
    return [torch.rand(3, 4, size, dtype=torch.float64, requires_grad=True) for _ in range(2)]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[CheckedLaunch]:
    """The launches that looked, as often as they did."""
    seen: list[CheckedLaunch] = []
    call = CheckedLaunch.__call__
    monkeypatch.setattr(
        CheckedLaunch, "__call__", lambda self, *given: (seen.append(self), call(self, *given))[1]
    )
    return seen


def restrided(compiled: Any) -> list[tuple[str, ...]]:
    """What the report says of each graph."""
    (artifact,) = compiled.explain().artifacts
    return [graph.fusion.restrided for graph in artifact.graphs if graph.fusion is not None]


def assert_eager_s(program: Callable[..., Any], compiled: Any, args: list[Tensor]) -> None:
    expected, found = outcome(program, args), outcome(compiled, args)
    torch.testing.assert_close(found, expected)
    assert [strides(out) for out in found[0]] == [strides(out) for out in expected[0]]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [returned_too, viewed, picked])
def test_every_call_is_eager_s_and_the_third_looks_no_more(
    program: Callable[..., Any], dynamic: bool, looks: list[CheckedLaunch]
) -> None:
    compiled: Any = aotdist.compile(program, backend="triton", settings={"dynamic": dynamic})
    has_looked = []
    for _ in range(3):
        looks.clear()
        assert_eager_s(program, compiled, inputs())
        has_looked.append(bool(looks))
    assert has_looked == [True, True, False]
    report = str(compiled.explain())
    assert re.search(
        r"anew for checking\.\w+ \(.*test_checking.py:.*\): strides \(24, 1, 4\), traced as \(24, 6, 1\)",
        report,
    )
    assert all(len(lines) == len(set(lines)) for lines in restrided(compiled))


def test_operator_by_operator_strides_do_not_matter() -> None:
    expected = outcome(returned_too, inputs())
    found = outcome(aotdist.compile(returned_too, backend="fx"), inputs())
    for one, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert one is not None and other is not None
        assert torch.equal(one, other) and one.stride() == other.stride()


def test_nothing_is_said_of_what_lies_as_it_was_traced(looks: list[CheckedLaunch]) -> None:
    compiled: Any = aotdist.compile(returned_too, backend="triton")
    assert_eager_s(returned_too, compiled, inputs(5))
    assert looks and restrided(compiled) == [(), ()]
    looks.clear()
    assert_eager_s(returned_too, compiled, inputs(5))
    assert not looks


def test_layouts_may_differ_from_size_to_size() -> None:
    compiled: Any = aotdist.compile(returned_too, backend="triton", settings={"dynamic": True})
    for size in (5, 6, 5, 8, 6, 8):
        assert_eager_s(returned_too, compiled, [tensor.detach() for tensor in inputs(size)])
    assert len(compiled.explain().artifacts) == 1


def test_a_new_value_is_stored_over_the_old_one() -> None:
    def step(x: Tensor, y: Tensor) -> None:
        x.add_(doubled(y), alpha=-0.5)

    compiled = aotdist.compile(step, backend="triton")
    for _ in range(3):
        (x, y), (other, _) = ([tensor.detach() for tensor in inputs()] for _ in range(2))
        compiled(x, y)
        step(other, y)
        torch.testing.assert_close(x, other)
        assert x._version == other._version


def test_two_threads_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    one_kernel, run_kernel = Lock(), Jitted.__call__  # the interpreter is for one thread

    def alone(self: Jitted, *given: Any) -> None:
        with one_kernel:
            run_kernel(self, *given)

    monkeypatch.setattr(Jitted, "__call__", alone)
    compiled = aotdist.compile(returned_too, backend="triton")
    barrier = Barrier(2)

    def run(_: int) -> None:
        for _ in range(3):
            barrier.wait(20)
            assert_eager_s(returned_too, compiled, inputs())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))


def test_what_is_emitted_anew_is_recorded_once_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Rerun()
    monkeypatch.setattr(cuda_graphs, "CAPTURE", recorder)

    def program(x: Tensor, y: Tensor) -> Tensor:
        return (doubled(x) * y).sin()

    compiled: Any = aotdist.compile(program, backend="triton", settings={"cuda_graphs": True})
    args = [tensor.detach() for tensor in inputs()]
    for _ in range(4):
        assert_eager_s(program, compiled, args)
    assert recorder.log == ["warm", "record", "replay", "replay"]
    (artifact,) = compiled.explain().artifacts
    assert (
        artifact.graphs[0].recordings.without["the strides of a library's results had to be looked at"] == 1
    )


def test_profilers_see_the_kernels_that_fit() -> None:
    compiled = aotdist.compile(returned_too, backend="triton")
    for _ in range(3):
        with torch.profiler.profile(acc_events=True):
            assert_eager_s(returned_too, compiled, inputs())


def test_a_graph_that_comes_from_elsewhere_is_checked_too(looks: list[CheckedLaunch]) -> None:
    args = [tensor.detach() for tensor in inputs()]
    ((_, graph),) = graphs_of(returned_too, *args)
    fused = with_kernels(graph, keeps_casts=False, label="elsewhere")
    loaded = Ahead(fused.graph, summary(fused)).emitted_on(torch.device("cpu"), graph, Settings(), "here")
    for _ in range(3):
        looks.clear()
        torch.testing.assert_close(tuple(loaded.call([*args])), returned_too(*args))
    assert not looks
    assert loaded.fusion is not None and len(loaded.fusion().restrided) == 2


def test_another_dtype_is_refused() -> None:
    compiled = aotdist.compile(lambda x: wrong(x).sin() * 2, backend="triton")
    with pytest.raises(UnsupportedProgram, match=r"wrong .*test_checking.py.* returns torch.float64"):
        compiled(torch.ones(3))
