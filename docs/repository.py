"""A hook of mkdocs: the files of the repository that pages link to are pages of the site, too.

A page links to `../launch/examples/train_step.py` as it does for readers of the repository. On the site that
is `repository/launch/examples/train_step.py`: a page that shows the file, so that nothing is missing where
there is no repository to look into. Markdown outside of docs/ becomes a page with links of its own, followed
likewise. Programs of docs/ stand beside the pages. Pictures for light and dark follow the palette
of the site, not that of the system.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img src="(?P<light>[^"]+)" alt="(?P<alt>[^"]*)"[^>]*>\s*</picture>'
)
SECTION = re.compile(r"^# --- (?P<title>.+?) -+\n(?P<text>(?:#.*\n)*)", re.MULTILINE)
"""How a program that is read from top to bottom is divided: a title, and what is to be said."""

LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}
UNLISTED = "---\nsearch: {exclude: true}\n---\n"
IN_NAVIGATION = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/from_scratch.py",
    "benchmarks/RESULTS.md",
)
"""Pages that mkdocs.yml names, whether or not another page links to them."""


def path_on_site(file: str) -> str | None:
    """Where the site has what the repository has as `file`; None for what is no file of it.

    `docs/cache.md` is `cache.md`, `docs/from_scratch.py` a page `from_scratch.py.md`, and `launch/train.py`
    a page `repository/launch/train.py.md`.
    """
    if not (ROOT / file).is_file():
        return None
    place = file.removeprefix("docs/") if file.startswith("docs/") else f"repository/{file}"
    is_shown_as_it_is = file.endswith(".md") or (place != f"repository/{file}" and not file.endswith(".py"))
    return place if is_shown_as_it_is else f"{place}.md"


def path_in_repository(page: str) -> str:
    """The inverse: the file that a page of the site shows."""
    if page.startswith("repository/"):
        page = page.removeprefix("repository/")
        return page if (ROOT / page).is_file() else page.removesuffix(".md")
    return f"docs/{page}" if (ROOT / "docs" / page).is_file() else f"docs/{page.removesuffix('.md')}"


def linked(file: str, text: str) -> set[str]:
    """Files of the repository that a text of `file` links to."""
    folder = posixpath.dirname(file)
    targets = (posixpath.normpath(posixpath.join(folder, link)) for link in LINK.findall(with_images(text)))
    return {target for target in targets if path_on_site(target) is not None}


def with_images(text: str) -> str:
    """The text, its pictures for light and dark as two images of which the theme shows one."""
    return PICTURE.sub(r"![\g<alt>](\g<light>#only-light) ![\g<alt>](\g<dark>#only-dark)", text)


def with_links_of_the_site(file: str, text: str) -> str:
    """The text of `file` as a page of the site."""
    folder, page_folder = posixpath.dirname(file), posixpath.dirname(path_on_site(file) or "")

    def moved(link: re.Match[str]) -> str:
        there = path_on_site(posixpath.normpath(posixpath.join(folder, link[0])))
        return link[0] if there is None else posixpath.relpath(there, page_folder or ".")

    return LINK.sub(moved, with_images(text))


def shown(file: str) -> str:
    """A page that shows a file: Markdown as it is, a program in sections, anything else as one block."""
    text = (ROOT / file).read_text()
    if file.endswith(".md"):
        return text
    language = LANGUAGES.get(posixpath.splitext(file)[1], "text")

    def block(code: str) -> str:
        return f"``````{language}\n{code.strip(chr(10))}\n``````\n" if code.strip() else ""

    title = f"# {posixpath.basename(file)}\n\n`{file}`, as it is.\n\n"
    return title + in_sections(text, block) if SECTION.search(text) else UNLISTED + title + block(text)


def in_sections(text: str, block: Callable[[str], str]) -> str:
    """Titles and comments of sections as text, what is between them as blocks."""
    parts, end = [], 0
    for section in SECTION.finditer(text):
        said = re.sub(r"^# ?", "", section["text"], flags=re.MULTILINE).strip()
        parts += [block(text[end : section.start()]), f"\n## {section['title']}\n\n{said}\n\n"]
        end = section.end()
    return "".join([*parts, block(text[end:])])


def on_startup(command: str, dirty: bool) -> None:
    """Make the copy of the package that docstrings are read from: what reads them sees no linked folders."""
    copy = ROOT / "build" / "package" / "aotdist"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "aotdist", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in {module.parent for module in copy.rglob("*.py")}:
        (folder / "__init__.py").touch()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file of the repository that a page leads to."""
    texts = {path_in_repository(page.src_uri): page.content_string for page in files.documentation_pages()}
    waiting = [*IN_NAVIGATION, *(target for file, text in texts.items() for target in linked(file, text))]
    while waiting:
        file = waiting.pop()
        place = path_on_site(file)
        assert place is not None, f"`{file}` is not in the repository"
        if files.get_file_from_path(place) is None:
            content = shown(file)
            files.append(File.generated(config, place, content=content))
            waiting += linked(file, content) if file.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links and pictures as the site has them."""
    return with_links_of_the_site(path_in_repository(page.file.src_uri), markdown)
