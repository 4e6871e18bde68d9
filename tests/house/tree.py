"""The files of this checkout, as the tests about the tree itself see them."""

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINKS = ("kernels", "launch", "subclasses")
"""Top-level folders that stand inside `aotdist/` as relative links."""


@functools.cache
def committed_files() -> tuple[Path, ...]:
    """Every file that git knows or would add, links left out, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    names = sorted(set(filter(None, listing.stdout.split("\0"))))
    return tuple(Path(name) for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink())


def python_files(*folders: str) -> list[Path]:
    """The committed Python files under these top-level folders, relative to the root."""
    return [path for path in committed_files() if path.suffix == ".py" and path.parts[0] in folders]


def package_files() -> list[Path]:
    """Every Python file that is imported as `aotdist.*`."""
    return python_files("aotdist", *LINKS)


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))
