"""Kernels compile for GPUs that are not here, and are as good there as their source lets one hope."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import aotdist
from aotdist.kernels import compilation
from aotdist.kernels.compilation import Usage
from aotdist.kernels.gpus import TARGETS
from benchmarks.kernels.binaries import Binary, compile_kernel
from tests.kernels.reference import Emissions, assert_same

ROOT = Path(__file__).parents[2]


def said_without_interpreting(module: str, *arguments: object) -> list[str]:
    """What a program of this folder says in a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error::UserWarning:triton"]
    command += ["-m", f"tests.kernels.{module}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def assert_faultless(target: str, every: int = 1) -> None:
    lines = said_without_interpreting("gates", target, every)
    assert len(lines) == 1, "\n".join(lines)
    assert int(lines[0].removesuffix(" kernels")) > 40 // every


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernels_of_small_programs_are_faultless_on_an_h100() -> None:
    assert_faultless("sm_90", every=16)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_small_programs_are_faultless(target: str) -> None:
    assert_faultless(target)


@pytest.fixture
def emissions(monkeypatch: pytest.MonkeyPatch) -> Emissions:
    emissions = Emissions(monkeypatch)
    assert_same(lambda x: x + 1, torch.ones(4))
    return emissions


def test_an_unknown_target_is_refused(emissions: Emissions) -> None:
    with pytest.raises(aotdist.BadSettings, match=r"there is no target 'sm_1'(.|\n)*sm_80, sm_90"):
        compile_kernel(emissions.made[0].kernels[0], "sm_1")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process compiles")
def test_an_interpreting_process_is_refused(emissions: Emissions) -> None:
    with pytest.raises(aotdist.BadSettings, match=r"interprets its kernels(.|\n)*without TRITON_INTERPRET"):
        compile_kernel(emissions.made[0].kernels[0], "sm_90")


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilation.triton_seam, "is_interpreting", lambda: False)
    monkeypatch.setattr(compilation.triton_seam, "nvidia_tools", lambda: tmp_path)
    with pytest.raises(aotdist.BadSettings, match="without cuobjdump and nvdisasm"):
        compilation.check("sm_90")
    compilation.check("gfx942")
    monkeypatch.setattr(compilation.triton_seam, "is_installed", lambda: False)
    with pytest.raises(aotdist.BadSettings, match="Triton, which is not installed"):
        compilation.check("gfx942")


def test_instructions_are_counted_by_the_words_of_their_names() -> None:
    binary = Binary(
        "k", "sm_90", b"", Usage(1, 0), 0, {"LDG.E.128": 2, "LDG.E.EL.128": 1, "LDG.E": 4, "STG.E.128": 8}
    )
    assert [binary.count("LDG", "128"), binary.count("LDG"), binary.count("LDL")] == [3, 7, 0]
