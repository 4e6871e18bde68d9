"""`aotdist.load`: runs what `aotdist.build` wrote; nothing is traced or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from aotdist.artifacts.archive import Archive, check_versions, open_archive
from aotdist.artifacts.record import read, settings_of
from aotdist.artifacts.typed import only_ours
from aotdist.artifacts.values import Json
from aotdist.capture.captured import UserCall
from aotdist.errors import BadArtifact, SignatureMismatch
from aotdist.pipeline import loaded_together, printed
from aotdist.runtime.artifact import Artifact, Artifacts
from aotdist.torch_seam.modes import class_functions_off


def loading(path: str | Path) -> Callable[[UserCall, Artifacts], Artifact]:
    """A function that loads the artifact in a file for a call.

    It takes the call, and the artifacts of earlier calls. It raises `SignatureMismatch` for a call that
    nothing was built for, with what differs; `BadArtifact` if the file contains something unknown;
    `RankDivergence` and `RankLost` where other ranks load other sequences of collectives, or fail.

    Raises:
        BadArtifact: the file is damaged, or was built by other versions, for another target, or for another
            number of ranks.
    """
    archive = open_archive(Path(path))
    _check_process(Path(path), archive)
    manifest = archive.manifest

    def artifact_for(call: UserCall, artifacts: Artifacts) -> Artifact:
        with only_ours():
            rank = dist.get_rank() if manifest.world_size > 1 else 0
            built: list[Json] = archive.record_of(rank)["calls"]
            settings = settings_of(built[0])
        with class_functions_off():
            return loaded_together(manifest.name, settings, lambda: _fitting(archive, built, call), artifacts)

    return artifact_for


def _fitting(archive: Archive, built: Sequence[Json], call: UserCall) -> Artifact:
    """The artifact for a call, from the first record that fits it."""
    device_type, binaries = archive.manifest.device_type, dict(archive.binaries)
    mismatches: list[SignatureMismatch] = []
    for record in built:
        try:
            compilation = read(record, call, settings_of(record), device_type, binaries)
            with only_ours():
                return printed(compilation)
        except SignatureMismatch as mismatch:
            mismatches.append(mismatch)
    first, *others = mismatches
    if not others:
        raise first
    reasons = "\n".join(f"  {number}. {each.what}" for number, each in enumerate(mismatches, 1))
    what = f"the artifact was built for {len(built)} calls, and this is none of them:\n{reasons}"
    raise SignatureMismatch(what, stage="store", fix=first.fix)


def gpu_here() -> str | None:
    """The current GPU's generation, as targets are named: `sm_90`, `gfx942`; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    if torch.version.hip:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _check_process(path: Path, archive: Archive) -> None:
    """Check that versions, GPU and number of ranks are those that an artifact was built for.

    Raises:
        BadArtifact: they are not.
    """
    manifest = archive.manifest
    check_versions(path, manifest)
    gpu = gpu_here()
    if manifest.target != "cpu" and manifest.target != gpu:
        raise BadArtifact(
            f"{path} was built for {manifest.target}, and here is {gpu or 'no GPU'}",
            stage="store",
            fix=f"build it for what is here: `--target {gpu or 'cpu'}`",
        )
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if manifest.world_size not in (1, num_ranks):  # what was built for one rank communicates with none
        raise BadArtifact(
            f"{path} was built for {manifest.world_size} ranks, and here are {num_ranks}",
            stage="store",
            fix=f"build it for {num_ranks} (`--world-size {num_ranks}`), or call `init_process_group` first",
        )
