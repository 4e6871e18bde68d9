"""Files that the front pages name in code are there; a row of docs/support.md has a test."""

import re

from tests.house.tree import ROOT

PAGES = {page: (ROOT / page).read_text() for page in ("README.md", "docs/support.md", "docs/differences.md")}
NAMED = re.compile(r"`((?:aotdist|kernels|launch|subclasses|tests)/[\w/.]*)`")


def test_they_are_there() -> None:
    named = [(page, path) for page, text in PAGES.items() for path in NAMED.findall(text)]
    assert {page for page, _ in named} == {*PAGES}
    assert [(page, path) for page, path in named if not (ROOT / path).exists()] == []


def test_every_row_has_a_test() -> None:
    rows = [row for row in PAGES["docs/support.md"].splitlines() if row.startswith("| ")]
    without = [row for row in rows if not re.search(r"`tests/[^`]+\.py` \|$", row)]
    assert len(rows) > 100
    assert {row.split("|")[-2].strip() for row in without} == {"test"}
