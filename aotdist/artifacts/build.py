"""`aotdist.build`: compiles calls for other processes and machines, and writes them to a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import torch
from torch import nn

from aotdist.artifacts.archive import FORMAT, Manifest, merged, save, version_of
from aotdist.artifacts.record import written
from aotdist.artifacts.values import Json
from aotdist.capture.captured import UserCall
from aotdist.codegen.ahead import TargetBackend
from aotdist.codegen.backend import resolve
from aotdist.codegen.contract import Backend
from aotdist.codegen.fx import FxBackend
from aotdist.codegen.triton import TARGETS
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.files import path_of, refuse_unwritable
from aotdist.pipeline import compilation_of
from aotdist.report.profile import refuse_arguments
from aotdist.runtime.artifact import Artifact, load
from aotdist.runtime.compilation import Compilation
from aotdist.runtime.guards import fit_of
from aotdist.settings import Settings, settings_of
from aotdist.subclasses.protocol import communicates_around, module_rules
from aotdist.torch_seam.groups import fake_world
from aotdist.torch_seam.modules import uncompiled_call
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.patches import intercept_autocast
from aotdist.trace.failures import AccumulatesInside

T = TypeVar("T")

Example: TypeAlias = "tuple[Any, tuple[Any, ...]] | tuple[Any, tuple[Any, ...], Mapping[str, Any]]"
"""A module or function, arguments to call it with, and keyword arguments if there are any."""

KNOWN_TARGETS = ("cpu", *TARGETS)
"""What artifacts can be built for."""


@dataclass(frozen=True, slots=True)
class Built:
    """What `build` wrote.

    Args:
        path: of the file.
        manifest: what it was built with and for.
        variants: the ranks of each record.
        num_bytes: of the file.
    """

    path: Path
    manifest: Manifest
    variants: tuple[tuple[int, ...], ...]
    num_bytes: int

    def __str__(self) -> str:
        manifest = self.manifest
        ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
        records = "one record" if len(self.variants) == 1 else f"{len(self.variants)} records"
        kernels = sum(name.startswith("kernels/") for name in manifest.members)
        return (
            f"{self.path}: `{manifest.name}` for {manifest.target} and {ranks}: "
            f"{records}, {kernels} kernels, {self.num_bytes / 1000:.0f} kB"
        )


Made: TypeAlias = "Example | Generator[Example]"
"""One call to build, or several, each under the modes that are on when it is yielded."""


def build(
    make: Callable[[], Made],
    path: str | Path,
    *,
    target: str = "cpu",
    world_size: int = 1,
    backend: str | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
) -> Built:
    """Compile a call, or several, ahead of time and write them to a file, for `aotdist.load`.

    Calls are traced on the CPU, once for each rank, in a process group without other ranks; devices in the
    graphs are replaced by the target's.

    Args:
        make: returns, on the CPU, what to compile and what to call it with; a generator yields several. It is
            called once for each rank, and may ask `torch.distributed` for its rank.
        path: of the file.
        target: what it is to run on: `cpu`, or a generation of GPUs: `sm_80`, `sm_90`, `sm_100`, `gfx942`.
        world_size: number of ranks that will run it.
        backend: `fx` for CPUs, `triton` for GPUs; None or `auto` for the one of the target.
        settings: as for `aotdist.compile`.

    Returns:
        what was written, to be printed.

    Raises:
        BadSettings: the target or a setting is unknown, no file holds the code of this backend, the file
            cannot be written, `make` needs arguments, or this process is in a process group already.
        UnsupportedProgram: the program cannot be compiled ahead of time, or has something that cannot be
            written to a file.
    """
    file, binaries = path_of(path), dict[str, bytes]()
    refuse_unwritable(file)

    def record(target_of_call: Any, compilation: Compilation) -> Json:
        return written(target_of_call, compilation, "cpu" if target == "cpu" else "cuda", binaries)

    stored = _backend(target)
    _require_storable(backend, stored, target)
    ranks = _on_each_rank(make, stored, world_size, settings, record)
    records: list[Json] = [{"calls": calls} for calls in ranks]
    variants = merged(records)
    packages = ("aotdist", "torch", "triton") if binaries else ("aotdist", "torch")
    manifest = Manifest(
        format=FORMAT,
        kind="compiled",
        name=records[0]["calls"][0]["name"],
        target=target,
        backend=stored.name,
        world_size=world_size,
        versions={name: version_of(name) for name in packages},
        members={},
    )
    manifest = save(file, manifest, variants, binaries)
    return Built(file, manifest, tuple(tuple(one.ranks) for one in variants), file.stat().st_size)


def compiled_ahead(
    make: Callable[[], Made],
    *,
    target: str = "cpu",
    world_size: int = 1,
    backend: str | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
) -> list[list[Artifact]]:
    """The artifacts that `build` would write for each rank, for reports; they cannot be called here.

    Args:
        make: as for `build`, like the other arguments.
        target: what it is to run on.
        world_size: number of ranks.
        backend: as for `build`, and for CPUs any that `aotdist.compile` knows by name.
        settings: how to compile.

    Raises:
        BadSettings: the target, the backend or a setting is unknown, or this process is in a process group
            already.
        UnsupportedProgram: the program cannot be compiled ahead of time.
    """
    chosen = _backend(target)
    if backend is not None and target == "cpu":
        chosen = resolve(backend)
    else:
        _require_storable(backend, chosen, target)

    def loaded(_: Any, compilation: Compilation) -> Artifact:
        return load(compilation, fit_of(compilation))

    return _on_each_rank(make, chosen, world_size, settings, loaded)


def refuse_maker(make: Callable[..., Any]) -> None:
    """Refuse a `make` that is no function, or needs arguments.

    Raises:
        BadSettings: naming the reason.
    """
    if not callable(make) or isinstance(make, nn.Module):
        raise _nothing(f"`make` is a {type(make).__name__}, and not a function that returns what to compile")
    fix = "name a function that makes what to compile, and what to call it with, by itself"
    refuse_arguments(make, fix, stage="store")


def _on_each_rank(
    make: Callable[[], Made],
    backend: Backend,
    world_size: int,
    settings: Settings | Mapping[str, Any] | None,
    then: Callable[[Any, Compilation], T],
) -> list[list[T]]:
    """Compile each call as each rank; returns `then(target, compilation)` of each, by rank."""
    if torch.distributed.is_initialized():
        raise BadSettings(
            "this process is in a process group already",
            stage="store",
            fix="build in a process of its own: each rank is traced in a process group without others",
        )
    if type(world_size) is not int or world_size < 1:
        raise BadSettings(f"a world has no {world_size!r} ranks", stage="store", fix="give 1 or more")
    refuse_maker(make)
    chosen = settings_of(settings)
    ranks = list[list[T]]()
    for rank in range(world_size):
        with fake_world(rank, world_size):
            made = make()
            examples = made if isinstance(made, Generator) else [made]
            calls = [then(*_compiled(example, backend, chosen)) for example in examples]
            if not calls:
                raise _nothing("`make` yielded nothing")
            ranks.append(calls)
    return ranks


def _backend(target: str) -> Backend:
    for known in TARGETS:
        if target == known:
            return TargetBackend(target=known)
    if target == "cpu":
        return FxBackend()
    raise BadSettings(
        f"there is no target {target!r}", stage="store", fix=f"name one of {', '.join(KNOWN_TARGETS)}"
    )


def _require_storable(asked: str | None, stored: Backend, target: str) -> None:
    """Raise `BadSettings` for a backend whose code no file holds for a target."""
    if asked not in (None, "auto", stored.name):
        raise BadSettings(
            f"a file cannot hold what {asked!r} makes for {target}",
            stage="store",
            fix=f"leave it out: for {target} it is {stored.name!r} (the compile cache keeps Inductor's)",
        )


def _compiled(example: Any, backend: Backend, settings: Settings) -> tuple[Any, Compilation]:
    """The target of an example, and the compilation of its call."""
    target, args, kwargs = called_by(example)
    run = target
    if isinstance(target, nn.Module):
        if communicates_around(target):
            raise UnsupportedProgram(
                f"a {type(target).__name__} runs its own forward around what is compiled",
                stage="store",
                fix="build what it contains, or compile it where it runs: `aotdist.compile`",
            )
        module_rules(target)
        run = uncompiled_call(target)
    call = UserCall(target, run, args, kwargs)
    try:
        return target, _compilation_for(backend, call, settings)
    except AccumulatesInside as error:
        if isinstance(target, nn.Module):
            raise
        raise _whole_step(target, error) from None


def _compilation_for(backend: Backend, call: UserCall, settings: Settings) -> Compilation:
    if not isinstance(backend, TargetBackend):
        return compilation_of(call, backend, settings)
    with intercept_autocast(_refuse_autocast):
        compilation = compilation_of(call, backend, settings)
    _refuse_on_gpus(compilation)
    return compilation


def _whole_step(target: Any, error: AccumulatesInside) -> UnsupportedProgram:
    name = getattr(target, "__name__", type(target).__name__)
    return UnsupportedProgram(
        f"`{name}` is a whole training step: it calls `backward()`, or lets an optimizer step",
        where=error.where,
        stage="store",
        fix="make the model instead, whose forward and backward are compiled; a step is compiled where it "
        "runs, by `aotdist.compile`, and shown by its `explain()`",
    )


def called_by(made: Any) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """The target of an example, and its positional and keyword arguments.

    Raises:
        BadSettings: it is no example.
    """
    match made:
        case (target, tuple(args)) if callable(target):
            return target, args, {}
        case (target, tuple(args), dict(kwargs)) if callable(target):
            return target, args, cast("dict[str, Any]", kwargs)
        case _:
            parts = made if isinstance(made, tuple) else (made,)
            raise _nothing(f"`make` returned {', '.join(type(part).__name__ for part in parts)}")


def _nothing(what: str) -> BadSettings:
    return BadSettings(
        what,
        stage="store",
        fix="return a module or function, a tuple of arguments, and (if there are any) a dictionary of those "
        "with a name: `return model, (batch,)`",
    )


_FOR_CPUS = re.compile(r"mkldnn|onednn|_for_cpu|quantized|fbgemm")
"""Matches names of operators that only CPUs have."""


def _refuse_on_gpus(compilation: Compilation) -> None:
    """Refuse programs whose trace on the CPU is not that on a GPU: autocast, operators that only CPUs have.

    Raises:
        UnsupportedProgram: naming the operator or autocast.
    """
    if compilation.captured.ambient.autocast:
        _refuse_autocast()
    for graph in compilation.graphs().values():
        for node in graph.gm.graph.nodes:
            if isinstance(node.target, OpOverload) and _FOR_CPUS.search(str(node.target)):
                raise _for_cpus(f"comes to `{node.target}`, which only CPUs have", node.meta.get("source"))


def _refuse_autocast() -> NoReturn:
    raise _for_cpus("is under autocast, which casts other operators on GPUs", None)


def _for_cpus(what: str, where: str | None) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"the program {what}",
        where=where,
        stage="store",
        fix="compile it where it runs: `aotdist.compile`, or leave that out of the compiled function",
    )
