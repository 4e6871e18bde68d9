"""Names and words that do not stand in this tree."""

import ast
import re
from collections.abc import Iterator

from tests.house.tree import LINKS, ROOT, committed_files, package_files, parse, python_files

VAGUE = {"utils", "util", "misc", "meta", "info", "common", "helpers", "helper", "stuff", "base", "core"}
"""Stems that say nothing of what lives in a module."""
TEXT_SUFFIXES = {"", ".cfg", ".ini", ".json", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
PUBLIC_HOSTS = (
    "arxiv.org",
    "docs.pytorch.org",
    "github.com",
    "keepachangelog.com",
    "pytorch.org",
    "semver.org",
)
"""Where a link may go."""

MODULE_NAME = re.compile(r"[a-z][a-z0-9_]*|__init__|__main__")
NOTE_TO_SELF = re.compile(r"\b(TO[D]O|FIX[M]E|X[X]X|HA[C]K)\b")
MACHINE_PATH = re.compile(r"(?<![\w./<{$])/(home|root|work|tmp|opt|mnt|scratch|Users)/\w")
INDEX_OPTION = re.compile(r"-[-](extra-)?index-url|-[-]find-links|-[-]trusted-host")
FOREIGN_LINK = re.compile(rf"https?:/[/](?!({'|'.join(map(re.escape, PUBLIC_HOSTS))})\b)\S+")

TEXTS = [path for path in committed_files() if path.suffix in TEXT_SUFFIXES]


def test_modules_have_names_that_say_something():
    assert [str(path) for path in package_files() if path.stem in VAGUE] == []
    assert [str(path) for path in package_files() if not MODULE_NAME.fullmatch(path.stem)] == []


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    """`file:line   match` for every match in a committed text."""
    return [
        f"{path}:{number}   {match[0]}"
        for path in TEXTS
        for number, line in enumerate((ROOT / path).read_text().splitlines(), start=1)
        for match in pattern.finditer(line)
    ]


def test_no_notes_to_self():
    assert lines_matching(NOTE_TO_SELF) == [], "do it, or say in the docs that it is left out"


def test_nothing_names_the_machine_it_was_written_on():
    assert lines_matching(MACHINE_PATH) == []
    assert lines_matching(INDEX_OPTION) == []


def test_links_go_to_documents_for_people():
    assert lines_matching(FOREIGN_LINK) == []


def test_every_folder_of_the_package_is_a_package_but_the_linked_ones():
    """Import checks skip a folder without `__init__.py`; the linked ones are named to them as roots."""
    folders = {path.parent for path in python_files("aotdist")}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()] == []
    assert [str(path) for path in python_files(*LINKS) if path.name == "__init__.py"] == []


def test_no_test_passes_by_returning_early():
    functions = [
        (path, node)
        for path in python_files("tests")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    returning = [
        f"{path}:{node.lineno}   {node.name}" for path, node in functions if list(_own_returns(node))
    ]
    assert not returning, "skip with a reason instead"


def _own_returns(function: ast.AST) -> Iterator[ast.Return]:
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield from _own_returns(child)
