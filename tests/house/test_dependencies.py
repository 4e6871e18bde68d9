"""What pyproject declares, what the code imports and what docs/dependencies.md explains are the same."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.house.tree import LINKS, ROOT, package_files, parse

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]


def distribution(requirement: str) -> str:
    """The package's name in a requirement: `pyright[nodejs]>=1.1` is `pyright`."""
    found = re.match(r"[A-Za-z0-9-]+", requirement)
    assert found, requirement
    return found[0]


CORE = {distribution(requirement) for requirement in PROJECT["dependencies"]}
EXTRA = {name: {distribution(requirement) for requirement in extra} for name, extra in OPTIONAL.items()}


def imported_packages(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.split(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.split(".")[0]


def undeclared(path: Path) -> set[str]:
    """The trainer may use the `train` extra, the proof of guards Z3, and so on."""
    allowed = CORE | {"aotdist"} | (EXTRA["train"] if path.parts[0] == "launch" else set())
    allowed |= {"z3"} if str(path) == "aotdist/runtime/guards.py" else set()
    allowed |= {"triton"} if str(path) in ("kernels/triton_seam.py", "kernels/interpreter.py") else set()
    allowed |= {"accelerate"} if str(path) in ("launch/accelerate.py", "launch/prepare.py") else set()
    allowed |= {"accelerate", "lightning_fabric", "transformers"} if "examples" in path.parts else set()
    return set(imported_packages(path)) - set(sys.stdlib_module_names) - allowed


def test_imports_are_declared():
    found = {str(path): names for path in package_files() if (names := undeclared(path))}
    assert not found, "declare it in pyproject.toml and say why in docs/dependencies.md"


def test_every_dependency_has_its_reason():
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/dependencies.md").read_text(), flags=re.MULTILINE)
    assert set(rows) == CORE.union(*EXTRA.values())
    assert len(rows) == len(set(rows))


def test_every_dependency_but_torch_and_what_it_brings_is_pinned_for_development():
    pins = re.findall(
        r"^([A-Za-z0-9_-]+)==", (ROOT / "constraints/common.txt").read_text(), flags=re.MULTILINE
    )
    normal = {name.lower().replace("_", "-") for name in pins}
    assert CORE.union(*EXTRA.values()) - normal == {"torch", "triton"}


def test_checkers_are_told_of_every_linked_folder():
    """Neither import-linter nor pyright walks through a link that is not named to it."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert {f"aotdist.{name}" for name in LINKS} <= set(tools["importlinter"]["root_packages"])
    assert {f"aotdist/{name}" for name in LINKS} <= set(tools["pyright"]["include"])
