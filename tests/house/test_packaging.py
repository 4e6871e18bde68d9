"""What a user installs holds the linked folders, and its public names are documented."""

import dataclasses
import inspect
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import aotdist
from tests.house.tree import LINKS, ROOT, committed_files, package_files

BUILD = "import sys; from setuptools import build_meta as b; print(b.{hook}(sys.argv[1]))"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed files alone: setuptools leaves its work beside the sources."""
    root = tmp_path_factory.mktemp("clone")
    for path in committed_files():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, root / path)
    for name in LINKS:
        (root / "aotdist" / name).symlink_to(f"../{name}")
    return root


PACKAGE_DATA = {"aotdist/py.typed", *(f"aotdist/report/page.{kind}" for kind in ("css", "html", "js"))}


def build(clone: Path, hook: str) -> Path:
    out = clone / "dist"
    out.mkdir(exist_ok=True)
    code = BUILD.format(hook=hook)
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


def installed_names() -> set[str]:
    """Paths that the package's files have once installed."""
    return {str(path if path.parts[0] == "aotdist" else "aotdist" / path) for path in package_files()}


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(clone):
    names = set(zipfile.ZipFile(build(clone, "build_wheel")).namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == installed_names() | PACKAGE_DATA
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(clone, tmp_path):
    with tarfile.open(build(clone, "build_sdist")) as archive:
        # Before Python 3.11.4 there are no filters.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = tmp_path.iterdir()
    names = set(zipfile.ZipFile(build(source, "build_wheel")).namelist())
    assert installed_names() | PACKAGE_DATA <= names


@pytest.mark.parametrize("name", LINKS)
def test_links_are_relative(name):
    assert os.readlink(ROOT / "aotdist" / name) == f"../{name}"


@pytest.mark.parametrize("name", [name for name in aotdist.__all__ if name != "__version__"])
def test_public_names_are_documented(name):
    value = getattr(aotdist, name)
    assert value.__module__.startswith("aotdist.")
    assert inspect.getdoc(value)


def test_every_setting_is_documented():
    doc = inspect.getdoc(aotdist.Settings)
    assert doc is not None
    assert [f.name for f in dataclasses.fields(aotdist.Settings) if f"\n    {f.name}: " not in doc] == []


def test_names_are_imported_when_they_are_used():
    program = """
import sys, aotdist
assert [name for name in sys.modules if name.startswith("aotdist")] == ["aotdist"]
assert aotdist.settings.Settings is aotdist.Settings and aotdist.dynamo.regions
assert not hasattr(aotdist, "no_such_name") and "compile" in dir(aotdist)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
