"""Kernels that are compiled in threads: once for all that are alike, in the ways that may be needed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aotdist.codegen.triton import with_kernels
from aotdist.kernels import triton_seam
from aotdist.kernels.background import Background
from aotdist.kernels.emission import Fused
from aotdist.kernels.tuning import Choices, Tuner, _key
from benchmarks.kernels.graphs import graphs_of
from tests.kernels.as_on_a_gpu import cut_as_on_a_gpu

X = torch.zeros(64, 512)


class Compiler:
    """Stands in for Triton's.

    Args:
        fails: whether it raises.
    """

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.asked = Counter[tuple[Any, ...]]()
        self.launchers: list[object] = []

    def __call__(self, function: Any, pointers: Any, sizes: Any, constants: Any, **given: Any) -> Any:
        self.asked[(*constants.values(), *given["options"].values())] += 1
        if self.fails:
            raise RuntimeError("no")
        return function.__name__


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    cut_as_on_a_gpu(monkeypatch)
    compiler = Compiler()
    monkeypatch.setattr(triton_seam, "compiled", compiler)
    monkeypatch.setattr(triton_seam, "build_launcher", compiler.launchers.append)
    monkeypatch.setattr(triton_seam, "gpu_and_version", lambda: ("a GPU", "3"))
    return compiler


def emitted(program: Any, background: Background, tuner: Tuner) -> Fused:
    ((_, graph),) = graphs_of(program, X)
    return with_kernels(graph, keeps_casts=False, label="it", tuner=tuner, background=background)


def runners(fused: Fused) -> list[Any]:
    targets = (node.target for node in fused.graph.gm.graph.nodes)
    return [target.runner for target in targets if hasattr(target, "runner")]


def test_kernels_alike_are_compiled_once_in_each_way(compiler: Compiler, tmp_path: Path) -> None:
    background, tuner = Background("cuda", 90), Tuner(Choices(tmp_path), reductions=True)

    def other_names(y: Tensor) -> Tensor:
        return F.gelu(y)

    kept = [emitted(program, background, tuner) for program in (F.gelu, other_names)]
    ways = kept[0].kernels[0].ways
    codes = [[way._code() for way in runner._ways.values()] for fused in kept for runner in runners(fused)]
    assert codes[0] == codes[1] == [kept[0].kernels[0].printed.name] * len(ways)
    assert len(ways) > 1
    assert len(compiler.asked) == len(ways)
    assert set(compiler.asked.values()) == {1}
    assert compiler.launchers


def test_of_a_kernel_that_was_measured_one_way_is_compiled(compiler: Compiler, tmp_path: Path) -> None:
    tuner = Tuner(Choices(tmp_path), reductions=True)
    (runner,) = runners(emitted(F.gelu, Background("cuda", 90), tuner))
    *_, chosen = runner._ways
    [way._code() for way in runner._ways.values()]
    tuner.choices.keep(_key(runner._source), {chosen: 1.0})
    compiler.asked.clear()
    (again,) = runners(emitted(F.gelu, Background("cuda", 90), tuner))
    assert [way._code() is not None for way in again._ways.values()] == [way == chosen for way in again._ways]
    assert sum(compiler.asked.values()) == 1


def test_what_fails_in_the_background_is_left_to_who_starts_it(compiler: Compiler, tmp_path: Path) -> None:
    compiler.fails = True
    (runner,) = runners(emitted(F.gelu, Background("cuda", 90), Tuner(Choices(tmp_path), reductions=True)))
    assert [way._code() for way in runner._ways.values()] == [None] * len(runner._ways)


def test_without_a_gpu_nothing_is_compiled() -> None:
    assert Background.here() is None
