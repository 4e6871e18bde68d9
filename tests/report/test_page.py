"""The page in a real browser: 20,000 nodes, keys alone, light and dark, no network."""

import itertools
import re
from collections.abc import Generator
from pathlib import Path

import pytest

from aotdist.report.explain import render_page
from tests.report.big_report import big_report
from tests.report.browser import Browser, browsing, find

FEW_NODES, MANY_NODES = 2_000, 20_000
MOST_ELEMENTS = 6_000
"""On the whole page, whatever is open: the rest is built when it comes into sight."""

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser]:
    executable = find()
    if executable is None:
        pytest.skip("there is no Chromium; `make browser` installs one where npm can fetch it")
    with browsing(executable, tmp_path_factory.mktemp("profile")) as browser:
        browser.resize(1280, 900)
        yield browser


def opened(browser: Browser, file: Path, num_nodes: int) -> Browser:
    """A page of so many nodes. It must not fail, and asks for nothing but itself."""
    if not file.exists():
        file.write_text(render_page([big_report(num_nodes)]))
    browser.errors.clear()
    browser.requested.clear()
    browser.open(file)
    assert browser.errors == []
    assert browser.requested == [file.as_uri()]
    return browser


@pytest.fixture
def page(browser: Browser, folder: Path) -> Browser:
    """A page of a small program, just opened."""
    return opened(browser, folder / "few.html", FEW_NODES)


@pytest.fixture
def long_page(browser: Browser, folder: Path) -> Browser:
    """A page of a large one."""
    return opened(browser, folder / "many.html", MANY_NODES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


def active_row(page: Browser) -> str:
    """The text of the row that the tree says is meant."""
    return page.run(
        "document.getElementById(document.querySelector('.tree').getAttribute('aria-activedescendant'))"
        ".querySelector('.name').textContent"
    )


def focused(page: Browser) -> str:
    """What has the focus: an id, a label or a text."""
    return page.run(
        "(e => e.id || e.getAttribute('aria-label') || e.textContent.trim())(document.activeElement)"
    )


def open_all(page: Browser) -> None:
    page.run("[...document.querySelectorAll('button')].find(b => b.textContent === 'Open all').click()")


def num_rows(page: Browser) -> int:
    """Rows of the tree, built or not."""
    return page.run("parseInt(document.querySelector('.tree .all').style.height) / 24")


def test_twenty_thousand_nodes_are_open_at_once(long_page: Browser) -> None:
    open_all(long_page)
    layers = MANY_NODES // 20
    assert num_rows(long_page) == MANY_NODES + 3 * layers + 1
    long_page.run("document.querySelector('.tree').focus()")
    long_page.press("End")
    assert active_row(long_page) == f"backward_{layers - 1}_9"
    assert long_page.run("document.querySelectorAll('*').length") < MOST_ELEMENTS
    assert long_page.run("document.querySelectorAll('.row').length") < 100


def test_scrolling_brings_rows_into_being(long_page: Browser) -> None:
    open_all(long_page)
    top = 24 * 10_000
    long_page.run(f"document.querySelector('.tree').scrollTop = {top}")
    long_page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    seen = long_page.run("[...document.querySelectorAll('.row')].map(row => parseInt(row.style.top))")
    assert min(abs(place - top) for place in seen) < 24


def test_hostile_text_stays_text(page: Browser) -> None:
    assert page.run("document.title").startswith("aotdist: </script>")
    assert page.run("document.querySelectorAll('script').length") == 2
    page.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    page.run("new Promise(requestAnimationFrame)")
    assert "<script>" in page.run("document.querySelector('#kernels pre').textContent")
    assert page.run("document.querySelectorAll('script').length") == 2


def test_search_finds_nodes_by_keys_alone(page: Browser) -> None:
    page.press("/")
    assert focused(page) == "search"
    page.type("backward_7_ mm")
    assert page.run("document.querySelector('[role=status]').textContent") == "5 of 2,000 nodes"
    page.press("Enter")
    assert focused(page) == "Nodes by module"
    assert active_row(page) == "backward_7_1"
    page.press("/")
    page.press("Escape")
    assert page.run("document.getElementById('search').value") == ""
    assert active_row(page) == "backward_7_1"
    page.type("no such node")
    assert num_rows(page) == 0
    assert "No node matches" in page.run("document.querySelector('.facts').textContent")


def test_the_tree_is_walked_with_arrows(page: Browser) -> None:
    page.run("document.querySelector('.tree').focus()")
    assert active_row(page) == "layers"
    page.press("ArrowRight")  # opens
    page.press("ArrowRight")  # goes in
    page.press("ArrowDown")
    assert active_row(page) == "1"
    for _ in range(4):
        page.press("ArrowRight")
    assert active_row(page) == "forward_1_0"
    page.press("ArrowLeft")
    assert active_row(page) == "attention"
    page.press("Enter")
    assert page.run("document.querySelector('[aria-selected=true]').getAttribute('aria-expanded')") == "false"
    page.press("Home")
    assert active_row(page) == "layers"


def test_a_node_leads_to_its_backward_and_back(page: Browser) -> None:
    page.press("/")
    page.type("forward_3_4")
    page.press("Enter")
    follow = "[...document.querySelectorAll('.facts dd button')].find(b => b.textContent === '{}').click()"
    page.run(follow.format("backward_3_4"))
    assert active_row(page) == "backward_3_4"
    assert "its forward" in page.run("document.querySelector('.facts').textContent")
    page.run(follow.format("forward_3_4"))
    assert active_row(page) == "forward_3_4"


def test_tables_lead_to_nodes(page: Browser) -> None:
    page.run("document.querySelector('#saved tbody button').click()")
    assert active_row(page) == "forward_0_9"
    assert focused(page) == "Nodes by module"
    page.run("document.querySelector('#collectives tbody button').click()")
    assert active_row(page) == "forward_0_0"
    assert page.run("document.querySelector('.tools select').value") == "forward"


def test_tables_are_short_until_asked_for_more(long_page: Browser) -> None:
    rows = "document.querySelectorAll('#saved tbody tr').length"
    assert long_page.run(rows) == 200
    long_page.run("document.querySelector('#saved .wide > button').click()")
    assert long_page.run(rows) == MANY_NODES // 20


def test_columns_sort(page: Browser) -> None:
    heading = "document.querySelector('#stages th:nth-child(2) button')"
    first = "document.querySelector('#stages tbody td').textContent"
    page.run(f"{heading}.click()")
    assert page.run(first) == "codegen"
    assert page.run(f"{heading}.parentNode.getAttribute('aria-sort')") == "descending"
    page.run(f"{heading}.click()")
    assert page.run(first) == "partition"


def test_ranks_that_differ_are_named(page: Browser) -> None:
    text = page.run("document.getElementById('ranks').textContent")
    assert "f32[8, 64]" in text and "f32[7, 64]" in text and "Not told by rank 2" in text


def test_tab_reaches_everything_in_order_and_shows_where_it_is(page: Browser) -> None:
    page.run("document.activeElement.blur()")
    order = []
    for _ in range(60):
        page.press("Tab")
        order.append(focused(page))
        visible = page.run("getComputedStyle(document.activeElement).outlineStyle")
        assert visible != "none", order[-1]
        if order[-1].startswith("The chosen"):
            break
    assert order[:3] == ["Skip to the graph", "program", "stages"]
    assert order[-6:] == ["Graph", "search", "Open all", "Close all", "Nodes by module", "The chosen node"]


def test_rows_tell_a_screen_reader_where_they_are(page: Browser) -> None:
    open_all(page)
    attributes = ["role", "aria-level", "aria-setsize", "aria-posinset", "aria-selected"]
    rows = page.run(
        f"[...document.querySelectorAll('.row')].map(row => {attributes}.map(name => row.getAttribute(name)))"
    )
    assert all(row[0] == "treeitem" and None not in row for row in rows)
    assert rows[1][1:4] == ["2", "100", "1"]
    assert [row[4] for row in rows].count("true") == 1
    controls = "[...document.querySelectorAll('input, select, [tabindex]')]"
    assert page.run(f"{controls}.filter(one => !one.labels?.length && !one.ariaLabel).length") == 0


def luminance(colour: str) -> float:
    """WCAG's, of a colour as the browser computes it: `rgb(1, 2, 3)`."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return sum(share * each for share, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(page: Browser, scheme: str) -> None:
    page.prefer(scheme)
    probe = (
        "(names => {const e = document.body.appendChild(document.createElement('i'));"
        "return names.map(name => {e.style.color = `var(--${name})`; return getComputedStyle(e).color})})"
    )
    grounds = page.run(f"{probe}(['paper', 'panel', 'chosen'])")
    inks = page.run(f"{probe}(['ink', 'faint', 'accent', 'forward', 'backward', 'saved', 'collective'])")
    assert (luminance(grounds[0]) > 0.5) == (scheme == "light")
    for ground, ink in itertools.product(grounds, inks):
        darker, lighter = sorted((luminance(ground), luminance(ink)))
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (ground, ink)


def test_the_button_turns_light_into_dark(page: Browser) -> None:
    page.prefer("light")
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.run(paper)
    page.run("document.getElementById('scheme').click()")
    assert page.run(paper) != before
    assert page.run("document.getElementById('scheme').textContent") == "Light"
