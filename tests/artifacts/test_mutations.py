"""Of a file that was changed inside, with checksums that fit: `BadArtifact`, or a program.

Nothing of it is executed, whatever it holds. What loads gives equal results, or fails where it runs, unless
the graphs that it shows are others, or what the trace found out: these are a program, which computes what it
says.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import GraphModule

import aotdist
from aotdist.artifacts.archive import FORMAT, Manifest, merged, version_of
from aotdist.artifacts.archive import save as save_archive
from aotdist.artifacts.record import written
from aotdist.capture.captured import UserCall
from aotdist.codegen.fx import FxBackend
from aotdist.export import aot_export_module
from aotdist.export import load as load_graph
from aotdist.export import save as save_graph
from aotdist.pipeline import compilation_of
from aotdist.settings import Settings
from aotdist.subclasses.protocol import module_rules, plain_tensors
from aotdist.torch_seam.modules import uncompiled_call
from tests.artifacts.comparison import step
from tests.artifacts.mutations import mutated, places, read, watched, write
from tests.artifacts.programs import PROGRAMS, Made
from tests.semantics.meshes import mesh as mesh

Found = tuple[list[Any], str]
"""What a program returns, and the program as it shows itself."""


def step_of(make: Callable[[], Made], path: Path) -> Found:
    target, args = make()
    called = aotdist.load(path, target)
    results = step(target, args, called, grad=True)
    return results, called.source + "".join(
        text for gms in called.graphs for text in map(shown, gms.values())
    )


def shown(gm: GraphModule) -> str:
    """A graph as text, with those inside it, and what they hold."""
    parts = [part for part in gm.modules() if isinstance(part, GraphModule)]
    held = [[*part.buffers(recurse=False), *vars(part).values()] for part in parts]
    tensors = [str(value) for values in held for value in values if isinstance(value, torch.Tensor)]
    return "\n".join([*(part.code for part in parts), *tensors])


class AnySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        numbers = torch.arange(x.shape[0] * 2) + y.shape[1] // 2 + y.stride(0)
        return self.linear(x).view(-1)[1:].sum(), numbers, y.t(), y.shape[1] * 2


def of_graph(path: Path) -> Found:
    torch.manual_seed(0)
    module = AnySize()
    state, args = [p.detach() for p in module.parameters()], (torch.randn(4, 3), torch.randn(2, 7)[:, 1:])
    gm = load_graph(path).graph_module
    return list(gm(*state, *args)), shown(gm)


def save_module(path: Path) -> None:
    torch.manual_seed(0)
    args = torch.randn(4, 3), torch.randn(2, 7)[:, 1:]
    pair = aot_export_module(AnySize(), args, trace_joint=True, output_loss_index=0)
    save_graph(pair, path)


CASES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Found]]] = {
    **{name: (partial(aotdist.build, make), partial(step_of, make)) for name, make in PROGRAMS.items()},
    "an exported graph": (save_module, of_graph),
}


class Sharded:
    """A model of DTensors on one rank: a process group is there, so that `build` cannot make it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def make(self) -> Made:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 8), nn.GELU(), nn.Linear(8, 6))
        parallelize_module(model, self._mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return model, (torch.randn(3, 7),)

    def save(self, path: Path) -> None:
        model, args = self.make()
        call = UserCall(model, uncompiled_call(model), args, {})
        module_rules(model)
        record = written(model, compilation_of(call, FxBackend(), Settings()), "cpu", {})
        versions = {name: version_of(name) for name in ("aotdist", "torch")}
        manifest = Manifest(FORMAT, "compiled", "Sequential", "cpu", "fx", 1, versions, {})
        save_archive(path, manifest, merged([{"calls": [record]}]), {})


def outcome(run: Callable[[Path], Found], path: Path, wanted: Found, how: str) -> str:
    """What becomes of a file, in a word; `how` it was changed.

    What the trace found out of tensors and of the order of gradients is in no text of the program.
    """
    try:
        found, program = run(path)
    except aotdist.AotdistError:
        return "refused"
    except Exception as error:
        if is_of_reading(error):
            raise
        return "fails where it runs"
    if are_equal(found, wanted[0]):
        return "equal"
    is_told = any(part in how for part in (".facts.", ".shapes."))
    assert program != wanted[1] or is_told, "the program is the same, and its results are others"
    return "another program"


def is_of_reading(error: Exception) -> bool:
    """Whether it was raised while the file was read, and not by what was made of it."""
    frames = [Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)]
    return any("artifacts" in parts and "tests" not in parts or parts[-1] == "stored.py" for parts in frames)


def are_equal(found: list[Any], wanted: list[Any]) -> bool:
    return len(found) == len(wanted) and all(
        all(torch.equal(x, y) for x, y in zip(plain_tensors(a), plain_tensors(b), strict=True))
        if isinstance(a, torch.Tensor) and type(a) is type(b)
        else type(a) is type(b) and a == b
        for a, b in zip(found, wanted, strict=True)
    )


def run_mutations(
    save: Callable[[Path], Any], run: Callable[[Path], Found], seeds: range, folder: Path
) -> Counter[str]:
    """What became of so many files, each changed in one place; nothing of any was executed."""
    whole, changed, outcomes = folder / "whole.aot", folder / "changed.aot", Counter[str]()
    save(whole)
    wanted = run(whole)
    manifest, members = read(whole)
    known = list(places(members))
    for seed in seeds:
        other, how = mutated(members, known, random.Random(seed))
        write(changed, other, manifest)
        try:
            with watched() as done:
                word = outcome(run, changed, wanted, how)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {how}: {type(error).__name__}: {error}") from error
        assert not done, f"seed {seed}, {how}: {done}"
        outcomes[word] += 1
    return outcomes


def test_a_changed_file_is_refused_or_the_program_that_it_shows(tmp_path: Path) -> None:
    outcomes = Counter[str]()
    for name in ("buffers and views", "a function", "an exported graph"):
        outcomes += run_mutations(*CASES[name], range(50), tmp_path)
    assert outcomes["refused"] > 100
    assert outcomes["equal"] > 20, "a comment, say, may be another"


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_ten_thousand_changed_files(name: str, tmp_path: Path) -> None:
    number = 500 if name == "a decoder" else 1500
    outcomes = run_mutations(*CASES[name], range(1000, 1000 + number), tmp_path)
    assert outcomes["refused"] > number / 2


# The last ones: from here on there is a process group.
def test_a_changed_file_with_dtensors(mesh: DeviceMesh, tmp_path: Path) -> None:
    case = Sharded(mesh)
    outcomes = run_mutations(case.save, partial(step_of, case.make), range(40), tmp_path)
    assert outcomes["refused"] > 20


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_a_thousand_changed_files_with_dtensors(mesh: DeviceMesh, tmp_path: Path) -> None:
    case = Sharded(mesh)
    outcomes = run_mutations(case.save, partial(step_of, case.make), range(1000, 2500), tmp_path)
    assert outcomes["refused"] > 750
