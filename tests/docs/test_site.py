"""The site of the documentation holds every page, and builds without a warning from what is on disk."""

import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import aotdist
from tests.house.tree import ROOT, committed_files
from tests.report.browser import Browser, browsing, find

PAGES = {
    str(path.relative_to("docs"))
    for path in committed_files()
    if path.suffix == ".md" and path.parts[0] == "docs"
}
REFERENCE = {page: (ROOT / "docs" / page).read_text() for page in PAGES if page.startswith("reference/")}
CONFIGURATION: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def in_navigation(entries: Any) -> Iterator[str]:
    """Every page that a part of the navigation names."""
    match entries:
        case str():
            yield entries
        case list():
            for entry in entries:
                yield from in_navigation(entry)
        case dict():
            yield from in_navigation(list(entries.values()))


NAVIGATION = list(in_navigation(CONFIGURATION["nav"]))


def test_navigation_names_every_page_once() -> None:
    assert PAGES - set(NAVIGATION) == set()
    assert len(NAVIGATION) == len(set(NAVIGATION))


def test_what_is_no_page_of_docs_is_a_file_of_the_repository() -> None:
    shown = [page.removesuffix(".md") for page in NAVIGATION if page not in PAGES]
    places = [
        page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}"
        for page in shown
    ]
    assert [
        place for place in places if not (ROOT / place).exists() and not (ROOT / f"{place}.md").exists()
    ] == []


def test_every_page_with_programs_has_a_test() -> None:
    """A generated page is one: `tests/house/test_written_pages.py` writes it anew."""
    tests = "\n".join(
        (ROOT / path).read_text() for path in committed_files() if path.name.startswith("test_")
    )
    with_programs = [Path(page).stem for page in PAGES if "```python" in (ROOT / "docs" / page).read_text()]
    assert [stem for stem in with_programs if not re.search(rf'"{stem}(\.md)?"', tests)] == []


IDENTIFIERS = [name for text in REFERENCE.values() for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]


def test_the_reference_names_what_there_is_once() -> None:
    for identifier in IDENTIFIERS:
        pkgutil.resolve_name(identifier)  # raises if there is none
    assert len(IDENTIFIERS) == len(set(IDENTIFIERS))


def test_the_reference_has_every_public_name() -> None:
    whole = [found for found in map(pkgutil.resolve_name, IDENTIFIERS) if inspect.ismodule(found)]
    shown = [value for module in whole for value in vars(module).values() if inspect.isclass(value)]
    public = [name for name in aotdist.__all__ if name != "__version__"]
    assert [n for n in public if f"aotdist.{n}" not in IDENTIFIERS and getattr(aotdist, n) not in shown] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs and its theme are not installed: extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


def test_every_page_is_built(site: Path) -> None:
    missing = [page for page in NAVIGATION if not (site / page).with_name(html_name(page)).exists()]
    assert missing == []


def html_name(page: str) -> str:
    return "index.html" if Path(page).stem == "README" else f"{Path(page).stem}.html"


def test_where_the_site_has_a_file() -> None:
    pytest.importorskip("mkdocs", reason="extra `docs`")
    spec = importlib.util.spec_from_file_location("repository", ROOT / "docs" / "repository.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    places = {
        "docs/cache.md": "cache.md",
        "docs/float8.svg": "float8.svg",
        "docs/from_scratch.py": "from_scratch.py.md",
        "README.md": "repository/README.md",
        "launch/examples/hf_trainer.py": "repository/launch/examples/hf_trainer.py.md",
    }
    assert {file: hook.path_on_site(file) for file in places} == places
    assert hook.path_on_site("docs/missing.md") is None and hook.path_on_site("launch") is None
    assert [hook.path_in_repository(page) for page in places.values() if page.endswith(".md")] == [
        file for file in places if not file.endswith(".svg")
    ]
    moved = hook.with_links_of_the_site
    assert moved("docs/cache.md", "[x](../README.md#a) [y](artifacts.md)") == (
        "[x](repository/README.md#a) [y](artifacts.md)"
    )
    assert moved("README.md", "[x](docs/cache.md) `f[i](x)`") == "[x](../cache.md) `f[i](x)`"


LOADED = re.compile(
    r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|srcset|href)=[\"']?(https?:|//)[^>]*>"
)


@pytest.mark.sweep
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    found = [
        f"{page.name}: {match[0]}"
        for page in site.rglob("*.html")
        for match in LOADED.finditer(page.read_text())
    ]
    styles = [
        str(style) for style in site.rglob("*.css") if re.search(r"url\(.?(https?:|//)", style.read_text())
    ]
    assert found + styles == []


@pytest.mark.sweep
def test_files_of_the_repository_are_shown(site: Path) -> None:
    shown = (site / "repository/launch/examples/hf_trainer.py.html").read_text()
    assert "make_model" in shown
    guide = (site / "trainer_fabric.html").read_text()
    assert 'href="repository/launch/examples/hf_trainer.py.html"' in guide
    idea = (site / "from_scratch.py.html").read_text()
    assert 'id="1-trace"' in idea and idea.count("<h2") == 6


@pytest.fixture
def browser(tmp_path: Path) -> Generator[Browser]:
    executable = find()
    if executable is None:
        pytest.skip("there is no Chromium; `make browser` installs one where npm can fetch it")
    with browsing(executable, tmp_path) as browser:
        browser.resize(1280, 900)
        yield browser


@pytest.mark.sweep
@pytest.mark.xdist_group("browser")
def test_pages_open_from_disk_ask_nobody_and_are_searched(site: Path, browser: Browser) -> None:
    browser.open(site / "quick_start.html")
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    browser.type("neftun")
    browser.press("e")  # the theme looks when a key is let go
    found = browser.run("""new Promise((found, failed) => {
      const started = Date.now();
      const look = () => {
        const links = [...document.querySelectorAll('.md-search-result__link')].map((link) => link.href);
        if (links.length) found(links);
        else if (Date.now() - started > 20000) failed(new Error('nothing was found'));
        else setTimeout(look, 50);
      };
      look();
    })""")
    assert any("trainer_fabric.html" in link for link in found), found
    assert browser.errors == []
    assert [url for url in browser.requested if not url.startswith(("file:", "data:"))] == []
