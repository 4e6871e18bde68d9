"""What is built in one process runs in another, as eager would, and without a trace."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import aotdist
from aotdist.codegen.contract import Emitted
from aotdist.codegen.emit import EmittedHalves, Emitter
from aotdist.program import Graph, Split
from tests.artifacts.comparison import assert_same, assert_same_as_eager, forbid_tracing
from tests.artifacts.programs import PROGRAMS, Made, mlp, with_loss

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_an_artifact_is_what_eager_is(
    name: str, grad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.set_grad_enabled(grad):
        aotdist.build(PROGRAMS[name], tmp_path / "it.aot")
    forbid_tracing(monkeypatch)
    assert_same_as_eager(PROGRAMS[name], tmp_path / "it.aot", grad=grad)


def test_another_process_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "aotdist", "build", "tests.artifacts.programs:mlp"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "-o", tmp_path / "it.aot"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "`Sequential` for cpu and 1 rank" in done.stdout
    forbid_tracing(monkeypatch)
    assert_same_as_eager(mlp, tmp_path / "it.aot")


def test_a_loaded_module_keeps_its_type_and_says_what_runs(tmp_path: Path) -> None:
    aotdist.build(mlp, tmp_path / "it.aot")
    model, args = mlp()
    names = list(model.state_dict())
    assert aotdist.load(tmp_path / "it.aot", model) is model
    model(*args)
    assert type(model) is torch.nn.Sequential and list(model.state_dict()) == names
    assert "class Node" in model.source
    assert "forward        " in str(model.explain())


def test_the_same_program_is_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / "a.aot", tmp_path / "b.aot"]
    for file in files:
        aotdist.build(mlp, file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_gradients_with_respect_to_some_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of some results is cut out of the graphs that are there, when it is asked for."""

    def make() -> tuple[object, tuple[torch.Tensor, ...]]:
        return two_results, (torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True))

    aotdist.build(make, tmp_path / "it.aot")
    forbid_tracing(monkeypatch)
    called, (x, y) = aotdist.load(tmp_path / "it.aot", two_results), make()[1]
    first, second = called(x, y)
    assert torch.equal(torch.autograd.grad(second.sum(), y, retain_graph=True)[0], torch.full((3,), 4.0))
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], torch.full((3,), 2.0))


def test_the_backward_of_a_loss_beside_other_results_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (eager, args), (model, _) = with_loss(), with_loss()
    aotdist.build(with_loss, tmp_path / "it.aot")
    forbid_tracing(monkeypatch)
    aotdist.load(tmp_path / "it.aot", model)
    compiled_on_demand: list[Graph] = []
    monkeypatch.setattr(Emitter, "another_backward", noting(Emitter.another_backward, compiled_on_demand))
    for losses in ([0], [0], [0, 1]):
        assert not compiled_on_demand
        for each in (eager, model):
            results = each(*args)
            torch.stack([results[k].square().sum() for k in losses]).sum().backward()
        assert_same([p.grad for p in eager.parameters()], [p.grad for p in model.parameters()])
    assert len(compiled_on_demand) == 1


def noting(compile_one: Callable[..., Emitted], graphs: list[Graph]) -> Callable[..., Emitted]:
    def compiling(self: Emitter, split: Split, halves: EmittedHalves, graph: Graph) -> Emitted:
        graphs.append(graph)
        return compile_one(self, split, halves, graph)

    return compiling


def two_results(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * y, y.square()


def training_and_validation() -> Iterator[Made]:
    model, args = mlp()
    yield model, args
    with torch.no_grad():
        yield model.eval(), args


def test_several_calls_are_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aotdist.build(training_and_validation, tmp_path / "it.aot")
    assert torch.is_grad_enabled()
    forbid_tracing(monkeypatch)
    (eager, args), (model, _) = mlp(), mlp()
    aotdist.load(tmp_path / "it.aot", model)
    for training in (True, False, True):
        eager.train(training)
        model.train(training)
        results = []
        for each in (eager, model):
            torch.manual_seed(0)
            with torch.set_grad_enabled(training):
                results.append(each(*args))
        assert torch.equal(*results) and results[1].requires_grad == training
    assert len(model.graphs) == 2
    with pytest.raises(aotdist.SignatureMismatch, match=r"built for 2 calls(.|\n)*1\. (.|\n)*2\. "):
        model(args[0][:2])


def test_gradients_of_gradients_are_refused(tmp_path: Path) -> None:
    aotdist.build(mlp, tmp_path / "it.aot")
    model, args = mlp()
    aotdist.load(tmp_path / "it.aot", model)
    with pytest.raises(aotdist.UnsupportedProgram, match="loaded from an artifact, which holds no such"):
        torch.autograd.grad(model(*args).sum(), list(model.parameters()), create_graph=True)


def test_what_pytorch_chooses_by_data_is_refused(tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder, mask = torch.nn.TransformerEncoder(layer, 1), torch.zeros(4, 4)
    with pytest.raises(aotdist.UnsupportedProgram, match="reads a tensor's data"):
        aotdist.build(lambda: (encoder, (torch.randn(2, 4, 8), mask)), tmp_path / "it.aot")
