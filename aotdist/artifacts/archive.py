"""The file of an artifact: a zip of JSON records and kernel binaries, with a manifest of all members.

The manifest has what the artifact was built with and for, and the SHA-256 of each member. Everything is
checked before anything is used. Checksums find damage, not malice: load what you would run.

Ranks that differ only in sizes, offsets and coordinates have records of the same form, which are stored as
one (a *variant*) with a table of the differences by rank. Ranks whose graphs differ otherwise (a shard that
has to be padded) have variants of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

from aotdist.artifacts.typed import ERRORS_OF_READING, made
from aotdist.artifacts.values import Json
from aotdist.errors import AotdistError, BadArtifact
from aotdist.files import AS_USUAL, write_whole
from aotdist.torch_seam.trees import pytree

FORMAT = 20
"""Increased with every change of what is written; artifacts of other formats have to be built again."""

Kind: TypeAlias = Literal["compiled", "exported"]
"""What a file holds: programs that were compiled, or a graph that was exported."""

_MADE_BY: Mapping[Kind, str] = {"compiled": "build", "exported": "save"}
_READ_BY: Mapping[Kind, str] = {"compiled": "`aotdist.load`", "exported": "`aotdist.export.load`"}

_MANIFEST = "manifest.json"
_UNREADABLE = (*ERRORS_OF_READING, OSError, EOFError, zlib.error, zipfile.BadZipFile)
"""What `zipfile` and `json` raise for a file that is damaged."""

_ALWAYS_BYTES, _MAX_RATIO = 64 * 2**20, 100
"""Limits on the bytes of an unpacked file: the larger of this size and this multiple of the file's (ours have
9 to 15 times)."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an artifact was built with and for.

    Args:
        format: of the file.
        kind: what it holds.
        name: of the function or module.
        target: `cpu`, or a generation of GPUs: `sm_90`.
        backend: what emitted the graphs.
        world_size: how many ranks there are.
        versions: of aotdist, torch and (where it has kernels) triton.
        members: SHA-256 of each other member of the file, by name.
    """

    format: int
    kind: Kind
    name: str
    target: str
    backend: str
    world_size: int
    versions: Mapping[str, str]
    members: Mapping[str, str]

    @property
    def device_type(self) -> str:
        """What PyTorch calls the devices of the target."""
        return "cpu" if self.target == "cpu" else "cuda"


@dataclass(frozen=True, slots=True)
class Variant:
    """One record for several ranks.

    Args:
        record: that of the first of them.
        ranks: the ranks.
        tables: the differences: each a position among the leaves of `record` (its numbers and texts, in
            order), and the value of each rank there.
    """

    record: Json
    ranks: Sequence[int]
    tables: Sequence[tuple[int, Sequence[Json]]]

    def of(self, rank: int) -> Json:
        """The record of one rank."""
        if not self.tables:
            return self.record
        leaves, form = pytree.tree_flatten(self.record)
        for position, table in self.tables:
            leaves[position] = table[self.ranks.index(rank)]
        return pytree.tree_unflatten(leaves, form)


@dataclass(frozen=True, slots=True)
class Archive:
    """The contents of a file.

    Args:
        manifest: what it was built with and for.
        variants: records of the ranks.
        binaries: machine code of kernels, by name.
    """

    manifest: Manifest
    variants: tuple[Variant, ...]
    binaries: Mapping[str, bytes]

    def record_of(self, rank: int) -> Any:
        """The record of one rank."""
        return next(variant.of(rank) for variant in self.variants if rank in variant.ranks)


def version_of(package: str) -> str:
    """The version of an installed package, without its local part (`+cpu`); empty if it is not installed."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def save(
    path: Path, described: Manifest, variants: tuple[Variant, ...], binaries: Mapping[str, bytes]
) -> Manifest:
    """Write an artifact; an existing file is replaced once everything is written.

    Args:
        path: of the file.
        described: what it was built with and for, without members.
        variants: records of the ranks.
        binaries: of kernels, by name.

    Returns:
        the manifest with its members.
    """
    contents = {f"variants/{at}.json": _bytes(dataclasses.asdict(one)) for at, one in enumerate(variants)}
    contents |= {f"kernels/{name}": data for name, data in binaries.items()}
    members = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    manifest = dataclasses.replace(described, members=members)
    whole = {_MANIFEST: _bytes(dataclasses.asdict(manifest)), **contents}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in whole.items():
            file.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)  # no date: same bytes each time
    write_whole(path, [packed.getvalue()], mode=AS_USUAL)
    return manifest


def _bytes(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def open_archive(path: Path, kind: Kind = "compiled") -> Archive:
    """Read an artifact and check that it is whole.

    Args:
        path: of the file.
        kind: what it has to hold.

    Raises:
        BadArtifact: it is no artifact, or of another format, or holds something else; or a member is damaged,
            missing or unknown.
    """
    try:
        contents = _contents(path)
        fields = json.loads(contents.pop(_MANIFEST))
        if fields["format"] != FORMAT:
            raise BadArtifact(
                f"{path} has format {fields['format']}, and this aotdist reads format {FORMAT}",
                stage="store",
                fix=f"{_MADE_BY[kind]} it again with this aotdist",
            )
        manifest: Manifest = made(Manifest, fields)
        if manifest.kind != kind:
            raise BadArtifact(
                f"{path} holds what was {manifest.kind}, and {_READ_BY[kind]} reads what was {kind}",
                stage="store",
                fix=f"read it with {_READ_BY[manifest.kind]}",
            )
        _check_members(path, manifest, contents)
        records = [json.loads(data) for name, data in contents.items() if name.startswith("variants/")]
        variants = tuple(Variant(**record) for record in records)
    except AotdistError:
        raise
    except _UNREADABLE as error:
        raise _corrupt(path, f"it cannot be read ({type(error).__name__}: {error})") from error
    kernels = {
        name.removeprefix("kernels/"): data for name, data in contents.items() if name.startswith("kernels/")
    }
    ranks = [rank for one in variants for rank in one.ranks]
    if len(ranks) != manifest.world_size or set(ranks) != set(range(len(ranks))):
        raise _corrupt(path, "some of its ranks have no record, or several")
    return Archive(manifest, variants, kernels)


def _contents(path: Path) -> dict[str, bytes]:
    """The unpacked members of a file by name.

    `zipfile` unpacks no more of a member than the size that the file states for it, so the stated sizes are
    what is limited.

    Raises:
        BadArtifact: together they are larger than such a file may be.
    """
    limit = max(_ALWAYS_BYTES, _MAX_RATIO * path.stat().st_size)
    with zipfile.ZipFile(path) as file:
        members = file.infolist()
        if sum(one.file_size for one in members) > limit:
            raise _corrupt(path, f"unpacked it would have more than {limit:,} bytes")
        return {one.filename: file.read(one) for one in members}


def check_versions(path: Path, manifest: Manifest) -> None:
    """Check that an artifact was made by the installed versions.

    Raises:
        BadArtifact: it was not.
    """
    for name, made_by in manifest.versions.items():
        here = version_of(name)
        if made_by != here:
            verb = _MADE_BY[manifest.kind]
            raise BadArtifact(
                f"{path} was {'built' if verb == 'build' else 'saved'} with {name} {made_by}, and here is "
                f"{here or 'none'}",
                stage="store",
                fix=f"{verb} it again with what is here, or install what made it",
            )


def _check_members(path: Path, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
    for name in sorted({*manifest.members, *contents}):
        if name not in contents:
            raise _corrupt(path, f"its member {name} is missing")
        if name not in manifest.members:
            raise _corrupt(path, f"its manifest does not know the member {name}")
        if hashlib.sha256(contents[name]).hexdigest() != manifest.members[name]:
            raise _corrupt(path, f"its member {name} is damaged: its checksum is another")


def _corrupt(path: Path, what: str) -> BadArtifact:
    return BadArtifact(f"{path} is no whole artifact: {what}", stage="store", fix="build or copy it again")


def merged(records: Sequence[Json]) -> tuple[Variant, ...]:
    """The fewest variants for these records, one for each rank."""
    ranks_of: dict[str, list[int]] = {}
    leaves_of: list[list[Json]] = []
    for rank, record in enumerate(records):
        leaves, form = pytree.tree_flatten(record)
        leaves_of.append(leaves)
        ranks_of.setdefault(repr(form), []).append(rank)
    return tuple(
        Variant(records[ranks[0]], ranks, list(_tables([leaves_of[rank] for rank in ranks])))
        for ranks in ranks_of.values()
    )


def _tables(leaves_of: Sequence[Sequence[Json]]) -> Iterator[tuple[int, Sequence[Json]]]:
    """The differences between the leaves of records of one form, see `Variant.tables`."""
    for position, leaves in enumerate(zip(*leaves_of, strict=True)):
        if len({(type(leaf), leaf) for leaf in leaves}) > 1:
            yield position, leaves
