"""`aotdist doctor`: checks whether this machine has what aotdist needs, and says how to fix what it lacks."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from aotdist.artifacts.archive import version_of
from aotdist.artifacts.cache.backend import folder_of
from aotdist.codegen.backend import resolve
from aotdist.codegen.inductor import InductorBackend
from aotdist.errors import BadSettings
from aotdist.settings import Settings
from aotdist.torch_seam.versions import TESTED_TORCH, minor_of

State = Literal["fine", "limited", "broken"]

_TESTED_TRITON = ((3, 6), (3, 9))
"""As `TESTED_TORCH`."""

_ROOM = 10**9

_MARKS = {"fine": "ok", "limited": "--", "broken": "!!"}


def add_to(subparsers: Any) -> None:
    """Add the subcommand to the parser of `aotdist`."""
    description = "See what this machine has for aotdist, and what to do about what it lacks."
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="check this machine", description=description
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    found = list(findings())
    for finding in found:
        print(_line(finding))
    broken = [finding.subject for finding in found if finding.state == "broken"]
    if broken:
        raise BadSettings(f"this machine is not ready: {', '.join(broken)}", fix="see what is marked with !!")


def _line(finding: Finding) -> str:
    line = f"{_MARKS[finding.state]}  {finding.subject:<12}{finding.what}"
    return f"{line}\n{'':<16}fix: {finding.fix}" if finding.fix else line


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Args:
        state: `limited` if something is missing that not everybody needs.
        fix: empty if nothing is missing.
    """

    subject: str
    state: State
    what: str
    fix: str = ""


def findings(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """All checks; they take a second or two, and start no ranks."""
    yield Finding("python", "fine", f"Python {platform.python_version()}")
    yield _version("torch", torch.__version__, TESTED_TORCH, older="broken")
    yield _triton()
    yield _compiler()
    yield _gpus()
    yield from _communication()
    yield _settings(environ)
    yield from _cache(environ)
    yield from _combinations(environ)


def _version(
    package: str, version: str, tested: tuple[tuple[int, int], tuple[int, int]], *, older: State
) -> Finding:
    """Whether a package's version is tested, older, or newer."""
    oldest, newest = (".".join(map(str, each)) for each in tested)
    found, known = minor_of(version), f"{package} {version}; aotdist is tested with {oldest} to {newest}"
    if found < tested[0]:
        return Finding(package, older, known, f"install {package} {oldest} to {newest}")
    if found > tested[1]:
        return Finding(
            package, "limited", f"{known}: this is newer, and may do", f"or install {package} {newest}"
        )
    return Finding(package, "fine", known)


def _triton() -> Finding:
    if find_spec("triton") is None:
        return Finding(
            "triton",
            "broken" if torch.cuda.is_available() else "limited",
            'Triton is not installed: no backend="triton", and no inductor on GPUs',
            "pip install 'aotdist[triton]'",
        )
    return _version("triton", version_of("triton"), _TESTED_TRITON, older="limited")


def _compiler() -> Finding:
    try:
        InductorBackend().check()
    except BadSettings as error:
        fix = (error.fix or "").removesuffix(', or use backend="fx"')
        return Finding("compiler", "limited", f'{error.what}: backend="auto" is fx here', fix)
    return Finding("compiler", "fine", f'it builds kernels; backend="auto" is {resolve("auto").name}')


def _gpus() -> Finding:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return Finding("gpus", "fine", f"{len(names)}: {', '.join(dict.fromkeys(names))}")
    if shutil.which("nvidia-smi") is not None:
        built = "was built without CUDA" if torch.version.cuda is None else "finds no GPU"
        fix = "install the build of torch that fits the driver (`nvidia-smi` names its CUDA version)"
        return Finding("gpus", "broken", f"there is an NVIDIA driver, and torch {built}", fix)
    return Finding("gpus", "fine", "none: programs run on the CPU")


def _communication() -> Iterator[Finding]:
    if not dist.is_available():
        what, fix = "torch was built without distributed", "install a build of torch that has it"
        yield Finding("ranks", "broken", what, fix)
        return
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    names = [name for name, there in available.items() if there]
    if torch.cuda.is_available() and not available["nccl"]:
        what, fix = "there are GPUs, and torch has no NCCL", "install the build of torch for CUDA"
        yield Finding("ranks", "broken", what, fix)
    else:
        yield Finding("ranks", "fine", f"process groups: {', '.join(names)}")
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        what = f"the name of this machine, {socket.gethostname()}, leads to no address: gloo may not connect"
        yield Finding("network", "limited", what, "set GLOO_SOCKET_IFNAME=lo, or add the name to /etc/hosts")


def _settings(environ: Mapping[str, str]) -> Finding:
    try:
        Settings.from_environment(environ)
    except BadSettings as error:
        return Finding("settings", "broken", error.what, error.fix or "unset the variable")
    names = sorted(name for name in environ if name.startswith("AOTDIST_"))
    return Finding("settings", "fine", f"from the environment: {', '.join(names) or 'none'}")


def _cache(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        settings = Settings.from_environment(environ)
    except BadSettings:
        return
    folder = folder_of(settings)
    complaint = folder.complaint()
    entries = folder.listed()
    if settings.cache_bytes == 0:
        what, fix = "it is switched off: every process compiles", "unset AOTDIST_CACHE_BYTES"
        yield Finding("cache", "limited", what, fix)
    elif complaint is not None:
        way = "`chmod 700` it" if "chmod" in complaint else "move away what is there"
        yield Finding("cache", "broken", complaint, f"{way}, or set AOTDIST_CACHE_FOLDER to another")
    elif not os.access(_there(folder.path), os.W_OK):
        what, fix = f"{folder.path} cannot be written", "set AOTDIST_CACHE_FOLDER to a folder that can be"
        yield Finding("cache", "broken", what, fix)
    elif shutil.disk_usage(_there(folder.path)).free < _ROOM:
        what, fix = f"the disk of {folder.path} is nearly full", "free a gigabyte, or `aotdist cache clear`"
        yield Finding("cache", "limited", what, fix)
    else:
        size = sum(each.num_bytes for each in entries) / 1e6
        yield Finding("cache", "fine", f"{len(entries)} entries, {size:.1f} MB, in {folder.path}")


def _there(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


_COMBINATIONS: Sequence[tuple[Callable[[Mapping[str, str]], bool], str, str]] = (
    (
        lambda environ: environ.get("TRITON_INTERPRET") == "1" and torch.cuda.is_available(),
        "TRITON_INTERPRET=1 runs kernels in Python, though there is a GPU",
        "unset TRITON_INTERPRET",
    ),
    (
        lambda environ: environ.get("CUDA_LAUNCH_BLOCKING") == "1" and torch.cuda.is_available(),
        "CUDA_LAUNCH_BLOCKING=1 waits for every kernel: no collective overlaps with anything",
        "unset CUDA_LAUNCH_BLOCKING",
    ),
    (
        lambda environ: "RANK" in environ and "OMP_NUM_THREADS" not in environ,
        "this is a rank, and OMP_NUM_THREADS is not set: each rank starts a thread for every core",
        "set OMP_NUM_THREADS to cores divided by ranks",
    ),
    (
        lambda _: (_minor("accelerate"), _minor("transformers")) == ("1.15", "5.23"),
        "accelerate 1.15 cannot join FSDP2 and tensor parallelism for models of transformers 5.23",
        "install another version of one of them, or shard without accelerate",
    ),
)
"""Combinations that cause trouble: whether this machine has one, its effect, and the fix."""


def _minor(package: str) -> str:
    return ".".join(version_of(package).split(".")[:2])


def _combinations(environ: Mapping[str, str]) -> Iterator[Finding]:
    for is_here, what, fix in _COMBINATIONS:
        if is_here(environ):
            yield Finding("combination", "limited", what, fix)
