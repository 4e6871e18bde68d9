"""The commands that the documents promise are there."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.house.tree import ROOT, committed_files

MAKEFILE = (ROOT / "Makefile").read_text()
DOCUMENTS = [path for path in committed_files() if path.suffix == ".md"]


def test_help_lists_every_target():
    phony = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)[0].split()
    shown = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert [target for target in phony if not re.search(rf"^  {target} ", shown, flags=re.MULTILINE)] == []


def named_in_documents(pattern: str) -> list[tuple[Path, str]]:
    """Each document, with each thing that the pattern's group finds in it."""
    return [(path, found) for path in DOCUMENTS for found in re.findall(pattern, (ROOT / path).read_text())]


def test_documents_name_targets_that_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, flags=re.MULTILINE))
    assert [
        (path, name) for path, name in named_in_documents("`make ([a-z0-9-]+)") if name not in targets
    ] == []


def test_links_between_files_lead_somewhere():
    links = named_in_documents(r"\]\((?!https?:|#)([^)#\s]+)")
    assert [(path, link) for path, link in links if not (ROOT / path.parent / link).exists()] == []


@pytest.mark.parametrize("script", [".ci/browser", ".ci/run", ".ci/other-torch"])
def test_ci_scripts_parse_and_may_be_executed(script):
    assert (ROOT / script).stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)
