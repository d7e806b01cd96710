"""The site in a real browser, as wide as a desktop and as a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import template_site
from history import missing
from rendering import render
from test_pages import build
from trainer.browser import Browser, opened

pytestmark = pytest.mark.docs

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
# What may be scrolled by itself, such as a wide table, does not make the page wider.
WIDER = """[...document.querySelectorAll(".md-main *")].filter((each) => {
    for (let at = each; at && at.matches(".md-main *"); at = at.parentElement)
        if (getComputedStyle(at).overflowX !== "visible") return false;
    return each.getBoundingClientRect().right > WIDTH + 1;
}).slice(0, 3).map((each) => each.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site of a project with all parts, with the template's pages."""
    project = render(tmp_path_factory.mktemp("site"), hooks=True)
    template_site.add(project)
    return build(project)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not shutil.which("chromium"):
        missing("there is no chromium")
    with opened(tmp_path_factory.mktemp("browser")) as chromium:
        yield chromium


def wider(browser: Browser, width: int) -> list[str]:
    """Return elements that make the page wider than the window, or the page's own width."""
    elements = browser.run(WIDER.replace("WIDTH", str(width)))
    scrolls = browser.run("document.documentElement.scrollWidth")
    return [*elements, *([f"{scrolls} pixels"] if scrolls > width else [])]


@pytest.mark.parametrize("size", SIZES)
def test_no_page_is_wider_than_the_window(browser: Browser, site: Path, size: str) -> None:
    pages = sorted(page for page in site.rglob("*.html") if page.name != "404.html")
    assert len(pages) > 60
    wide_pages = {}
    for page in pages:
        browser.open(page, *SIZES[size])
        if wide := wider(browser, SIZES[size][0]):
            wide_pages[str(page.relative_to(site))] = wide
        assert browser.requests() == [] or all(
            url.startswith("file:") for url in browser.requests()
        )
    assert wide_pages == {}


def test_a_page_that_is_too_wide_is_found(browser: Browser, site: Path, tmp_path: Path) -> None:
    page = site / "wide.html"
    text = (site / "index.html").read_text(encoding="utf-8")
    page.write_text(text.replace("<h2", '<p style="width: 1500px">wide</p><h2', 1), "utf-8")
    try:
        for width, height in SIZES.values():
            browser.open(page, width, height)
            assert any("1500px" in element for element in wider(browser, width))
    finally:
        page.unlink()
