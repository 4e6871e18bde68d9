"""How large the package is: lines, classes, files, floors. `make house` prints it, `make check` holds it."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.house.tree import ROOT, parse, python_files

CORE = ("capture", "aliasing", "convention", "trace", "partition", "runtime")
"""The rooms that do the job of PyTorch's AOTAutograd, with the modules at the top of the package."""

PYTORCHS = ("aot_function", "aot_module_simplified", "_cross_entropy", "_jagged_attention")
"""Functions that take the place of PyTorch's, and so have its parameters."""

LONG_FUNCTION, LONG_FILE = 60, 400
"""Lines from which a function and a file are long."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of the table.

    Args:
        name: what is counted.
        count: how many there are.
        limit: how many there may be; it goes down with the count, and up by what a feature cannot do without.
        goal: how many there are to be.
    """

    name: str
    count: int
    limit: int
    goal: int


LIMITS: Mapping[str, tuple[int, int]] = {
    "lines of aotdist/": (54_421, 42_000),
    "lines of its core": (30_610, 23_500),
    "classes of its core": (250, 200),
    "files of aotdist/": (257, 235),
    "import floors": (15, 15),
    "most parameters of a function": (8, 8),
    "most fields of a class": (14, 14),
    "functions over 60 lines": (1, 4),
    "files over 400 lines": (7, 8),
    "modules in circles of imports": (0, 0),
}
"""What there may be of each, and what there is to be."""


def measures() -> list[Measure]:
    """Every number of the table, of the committed files; linked rooms are left out."""
    trees = {path: parse(path) for path in python_files("aotdist")}
    core = {path: tree for path, tree in trees.items() if len(path.parts) == 2 or path.parts[1] in CORE}
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in trees}
    functions = [function for tree in trees.values() for function in _functions(tree)]
    counts = {
        "lines of aotdist/": sum(lines.values()),
        "lines of its core": sum(lines[path] for path in core),
        "classes of its core": sum(isinstance(n, ast.ClassDef) for t in core.values() for n in ast.walk(t)),
        "files of aotdist/": len(trees),
        "import floors": _num_floors(),
        "most parameters of a function": max(_num_parameters(f) for f in functions if f.name not in PYTORCHS),
        "most fields of a class": max(map(_num_fields, _classes(trees))),
        "functions over 60 lines": sum(_num_lines(function) > LONG_FUNCTION for function in functions),
        "files over 400 lines": sum(number > LONG_FILE for number in lines.values()),
        "modules in circles of imports": len(_circle(trees)),
    }
    return [Measure(name, count, *LIMITS[name]) for name, count in counts.items()]


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _classes(trees: Mapping[Path, ast.Module]) -> Iterator[ast.ClassDef]:
    return (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    args = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(arg.arg not in ("self", "cls") for arg in args)


def _num_fields(cls: ast.ClassDef) -> int:
    return sum(isinstance(node, ast.AnnAssign) for node in cls.body)


def _num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _num_floors() -> int:
    """Of the contract that says which room may import which."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return max(len(contract.get("layers", ())) for contract in contracts)


def _circle(trees: Mapping[Path, ast.Module]) -> set[str]:
    """Modules that import each other when they are loaded, of one circle if there are several."""
    names = {
        _module(path): tree for path, tree in trees.items() if len(path.parts) > 2 or path.stem != "__init__"
    }
    graph = {name: set(_imported(tree)) & names.keys() - {name} for name, tree in names.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def main() -> int:
    """Print the table; how many of its numbers are over their limits."""
    table = measures()
    width = max(len(each.name) for each in table)
    print(f"{'':{width}}  {'is':>7}  {'limit':>7}  {'goal':>7}")
    for each in table:
        over = "  over the limit" if each.count > each.limit else ""
        print(f"{each.name:{width}}  {each.count:>7,}  {each.limit:>7,}  {each.goal:>7,}{over}")
    return sum(each.count > each.limit for each in table)


if __name__ == "__main__":
    sys.exit(main())
