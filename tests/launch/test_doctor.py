"""`aotdist doctor`: what is wrong is said, with a way out."""

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aotdist.codegen.inductor import InductorBackend
from aotdist.errors import BadSettings
from aotdist.launch.commands import doctor
from aotdist.launch.commands.doctor import Finding, findings
from aotdist.launch.commands.main import main

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: Patch) -> None:
    monkeypatch.setattr(InductorBackend, "check", lambda self: None)


def test_a_machine_that_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for subject in ("python", "torch", "triton", "compiler", "gpus", "ranks", "settings", "cache"):
        assert f"  {subject}" in printed


def no_compiler(patch: Patch, folder: Path) -> None:
    def refuse(self: InductorBackend) -> None:
        raise BadSettings("there is no compiler", fix='install one, or use backend="fx"')

    patch.setattr(InductorBackend, "check", refuse)


def nameless(patch: Patch, folder: Path) -> None:
    def refuse(name: str) -> str:
        raise OSError("unknown")

    patch.setattr(socket, "gethostbyname", refuse)


def open_cache(patch: Patch, folder: Path) -> None:
    (folder / "compiled").mkdir()
    (folder / "compiled").chmod(0o777)


def driver(patch: Patch, folder: Path) -> None:
    patch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    patch.setattr(torch.cuda, "is_available", lambda: False)


def gpus_without_nccl(patch: Patch, folder: Path) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    patch.setattr(dist, "is_nccl_available", lambda: False)


def versions(package: str, version: str) -> Callable[[Patch, Path], None]:
    known = doctor.version_of

    def change(patch: Patch, folder: Path) -> None:
        patch.setattr(doctor, "version_of", lambda name: version if name == package else known(name))

    return change


def torch_is(version: str) -> Callable[[Patch, Path], None]:
    return lambda patch, folder: patch.setattr(torch, "__version__", version)


def old_accelerate(patch: Patch, folder: Path) -> None:
    patch.setattr(
        doctor, "version_of", {"accelerate": "1.15.0", "transformers": "5.23.1", "triton": "3.9"}.get
    )


def full_disk(patch: Patch, folder: Path) -> None:
    patch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))


WRONG: dict[str, tuple[str, str, Callable[[Patch, Path], None], Mapping[str, str]]] = {
    "torch": ("broken", "2.4.1; aotdist is tested with 2.11 to 2.", torch_is("2.4.1"), {}),
    "triton": ("limited", "triton 2.1", versions("triton", "2.1"), {}),
    "compiler": ("limited", "no compiler", no_compiler, {}),
    "gpus": ("broken", "NVIDIA driver", driver, {}),
    "ranks": ("broken", "no NCCL", gpus_without_nccl, {}),
    "network": ("limited", "leads to no address", nameless, {}),
    "settings": ("broken", "AOTDIST_BUCKET", lambda *_: None, {"AOTDIST_BUCKET": "1"}),
    "cache": ("broken", "others than you", open_cache, {}),
}


def found(monkeypatch: Patch, tmp_path: Path, change: Any, environ: Mapping[str, str]) -> list[Finding]:
    change(monkeypatch, tmp_path)
    return list(findings({"AOTDIST_CACHE_FOLDER": str(tmp_path), **environ}))


@pytest.mark.parametrize("subject", WRONG)
def test_what_is_wrong_has_a_way_out(subject: str, monkeypatch: Patch, tmp_path: Path) -> None:
    state, text, change, environ = WRONG[subject]
    (finding,) = [each for each in found(monkeypatch, tmp_path, change, environ) if each.subject == subject]
    assert finding.state == state and text in finding.what and finding.fix


VERSIONS = {"2.11.0": "fine", "2.14.1+cu130": "fine", "2.15.0a0+git12": "limited", "3.0": "limited"}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_torch_is_tested_with_is_said(version: str, monkeypatch: Patch, tmp_path: Path) -> None:
    said = found(monkeypatch, tmp_path, torch_is(version), {})
    (finding,) = [each for each in said if each.subject == "torch"]
    state = VERSIONS[version]
    assert (finding.state, bool(finding.fix)) == (state, state != "fine")
    assert finding.what.startswith(f"torch {version}; aotdist is tested with 2.11 to 2.14")
    assert ("newer" in finding.what) == (state == "limited")


@pytest.mark.parametrize(
    ("change", "environ", "text"),
    [
        (full_disk, {}, "nearly full"),
        (lambda *_: None, {"AOTDIST_CACHE_BYTES": "0"}, "switched off"),
        (lambda *_: None, {"RANK": "0"}, "OMP_NUM_THREADS is not set"),
        (gpus_without_nccl, {"TRITON_INTERPRET": "1"}, "in Python, though there is a GPU"),
        (gpus_without_nccl, {"CUDA_LAUNCH_BLOCKING": "1"}, "waits for every kernel"),
        (old_accelerate, {}, "accelerate 1.15 cannot join"),
    ],
    ids=["full disk", "no cache", "threads", "interpreter", "blocking", "accelerate"],
)
def test_what_does_not_go_together(
    change: Any, environ: Mapping[str, str], text: str, monkeypatch: Patch, tmp_path: Path
) -> None:
    (finding,) = [each for each in found(monkeypatch, tmp_path, change, environ) if text in each.what]
    assert finding.state == "limited" and finding.fix


@pytest.mark.parametrize("place", ["", "compiled"])
def test_a_cache_that_is_a_file(place: str, tmp_path: Path) -> None:
    (tmp_path / "compiled").touch()  # of the folder that the settings name, what programs are kept in
    environ = {"AOTDIST_CACHE_FOLDER": str(tmp_path / place)}
    (finding,) = [each for each in findings(environ) if each.subject == "cache"]
    assert finding.what.endswith("is a file") and "move away" in finding.fix and "chmod" not in finding.fix


def test_a_broken_machine_fails(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AOTDIST_BUCKET", "1")
    assert main(["doctor"]) == 2
    printed = capsys.readouterr()
    assert "!!  settings" in printed.out and "not ready: settings" in printed.err
