"""Artifacts for GPUs: graphs run with interpreted kernels, cubins are launched by a driver that is none."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import aotdist
from aotdist.codegen.emit import Emitter
from aotdist.kernels.running import Loaded, aligned
from aotdist.kernels.triton_seam import Process
from aotdist.trace.operators.attention import chosen_for
from tests.artifacts import cases_ranks
from tests.artifacts.comparison import assert_same, forbid_tracing
from tests.artifacts.interpreting import interpret
from tests.artifacts.programs import PROGRAMS, PROGRAMS_OF_TWO_RANKS, Made, decoder, with_loss
from tests.ranks.harness import World

ROOT = Path(__file__).parents[2]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process compiles its kernels")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["an MLP", "an MLP in eval mode", "buffers and views", "a decoder"])
def test_graphs_with_kernels_come_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The artifact is, to the last bit, what the `triton` backend gives without one."""
    make, settings = PROGRAMS[name], aotdist.Settings(functional_rng=True)
    aotdist.build(make, tmp_path / "it.aot", target="sm_90", settings=settings)
    compiled, loaded_model = make(), make()
    aotdist.compile(compiled[0], backend="triton", settings=settings)
    with chosen_for("sm_90"):
        expected = step(*compiled)
    forbid_tracing(monkeypatch)
    aotdist.load(tmp_path / "it.aot", loaded_model[0])
    assert_same(expected, step(*loaded_model))
    halves = [graph.fusion for graph in loaded_model[0].explain().artifacts[0].graphs if graph.fusion]
    assert all(kernel.text.startswith("@triton.jit") for half in halves for kernel in half.kernels)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process compiles its kernels")
@pytest.mark.usefixtures("interpreted")
def test_the_backward_of_a_loss_beside_other_results_has_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aotdist.build(with_loss, tmp_path / "it.aot", target="sm_90")
    compiled, loaded = with_loss(), with_loss()
    aotdist.compile(compiled[0], backend="triton")
    aotdist.load(tmp_path / "it.aot", loaded[0])
    losses = [model(*args)[0] for model, args in (compiled, loaded)]
    monkeypatch.setattr(Emitter, "another_backward", None)  # nothing is compiled any more
    for loss in losses:
        loss.backward()
    assert_same(*([p.grad for p in model.parameters()] for model, _ in (compiled, loaded)))
    backward = next(graph for graph in loaded[0].explain().artifacts[0].graphs if graph.name == "backward")
    assert backward.fusion is not None and backward.fusion.kernels


def step(model: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    result = model(*args)
    result = result["y"] if isinstance(result, dict) else result
    result.float().square().mean().backward()
    return [result, *model.buffers(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="this process compiles its kernels")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", PROGRAMS_OF_TWO_RANKS)
def test_graphs_with_kernels_come_back_on_two_ranks(world2: World, name: str, tmp_path: Path) -> None:
    aotdist.build(PROGRAMS_OF_TWO_RANKS[name], tmp_path / "it.aot", target="sm_90", world_size=2)
    world2.run(cases_ranks.close_to_eager_with_kernels, name, str(tmp_path / "it.aot"))


@pytest.mark.usefixtures("interpreted")
def test_nothing_in_it_is_of_the_machine_that_built_it(tmp_path: Path) -> None:
    aotdist.build(decoder, tmp_path / "it.aot", target="sm_90")
    with zipfile.ZipFile(tmp_path / "it.aot") as file:
        record = file.read("variants/0.json").decode()
        assert "cpu" not in record and str(Path(torch.__file__).parent) not in record
        assert sum(name.startswith("kernels/") for name in file.namelist()) > 10


def flash(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]


def squared() -> Made:
    return lambda x: x @ x, (torch.randn(3, 3),)


def squared_under_autocast() -> Made:
    def square(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return x @ x

    return square, (torch.randn(3, 3),)


@pytest.mark.usefixtures("interpreted")
def test_what_only_cpus_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        aotdist.UnsupportedProgram, match=r"comes to `aten._scaled.*_for_cpu.default`, which only"
    ):
        aotdist.build(lambda: (flash, (torch.randn(1, 1, 4, 4),)), tmp_path / "it.aot", target="sm_90")
    with torch.autocast("cpu"), pytest.raises(aotdist.UnsupportedProgram, match="casts other operators"):
        aotdist.build(squared, tmp_path / "it.aot", target="sm_90")
    with pytest.raises(aotdist.UnsupportedProgram, match="casts other operators"):
        aotdist.build(squared_under_autocast, tmp_path / "it.aot", target="sm_90")


def compiling(*arguments: str) -> str:
    """What a process prints that compiles kernels, and launches them by a driver that is none."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.artifacts.cubins", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.sweep)])
def test_cubins_are_launched_without_a_compiler(target: str, tmp_path: Path) -> None:
    compiling("build", target, str(tmp_path / "it.aot"))
    assert (
        compiling("run", target, str(tmp_path / "it.aot"))
        == "as many launches as kernels, all of them told\n"
    )


def test_what_triton_compiled_is_started_directly_where_tensors_are_aligned_and_with_its_sizes() -> None:
    directly, with_sizes = compiling("jit", "sm_90").splitlines()
    assert directly == "Triton, directly, Triton, directly"
    assert with_sizes == "sub_exp_sum_div_0, sub_exp_sum_div_0_looped"


def test_an_input_that_is_written_is_written_wherever_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adding:
        function = packed_metadata = None

        def run(self, *arguments: Any) -> None:
            *_, first, second, block = arguments
            assert first.data_ptr() % 16 == second.data_ptr() % 16 == 0 and block == 8
            first.add_(second)

    settings = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    process = Process(lambda: 0, lambda device: 0, settings)
    monkeypatch.setattr(Process, "here", lambda: process)
    memory = torch.zeros(20)
    memory = memory[(-memory.data_ptr() // 4) % 4 :]
    for first in (memory[:8], memory[1:9]):
        expected, more = first + 1, torch.ones(8)
        Loaded(Adding(), 1, (8,), torch.device("cpu"), frozenset({0}))((first, more), ())
        assert torch.equal(first, expected) and torch.equal(more, torch.ones(8))


def test_a_tensor_that_begins_elsewhere_is_copied() -> None:
    memory = torch.arange(16.0)
    memory = memory[(-memory.data_ptr() // 4) % 4 :]
    assert aligned(memory) is memory
    strided = memory[1:9].view(4, 2).t()
    copy = aligned(strided)
    assert copy.data_ptr() % 16 == 0 and copy.stride() == strided.stride() and torch.equal(copy, strided)
