"""The page in a real browser: what is drawn, asked for and reached by keyboard; sizes and modes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from my_project_trainer.tools import report
from test_report import EVIL, made

from browser import Browser, opened
from report_subject import Model, fit

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

DESKTOP, PHONE = (1280, 1600), (390, 844)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("browser")) as opened_browser:
        yield opened_browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two runs with profiles; one has a hostile name and saves too often, by its log."""
    folder = tmp_path_factory.mktemp("runs")
    for name, width in (("wide", 64), ("narrow", 8)):
        fit(folder / name, Model(width=width), 4, log_every_n_steps=1)
        (folder / name / "config.yaml").write_text(f"model: {{width: {width}, evil: '{EVIL}'}}")
    with (folder / "narrow" / "speed.csv").open("a") as file:
        file.write("8,0,speed/checkpoint_seconds,70.0\n")
    hostile = made(folder / EVIL.replace("/", ""), {}, metrics=f'1,0,"{EVIL}",1\n2,0,loss,2\n')
    (hostile / "config.yaml").write_text("model: {width: 1}")
    report.run("my-project", [*map(str, (folder / "wide", folder / "narrow", hostile))])
    return folder / "wide" / "report.html"


def test_the_browser_itself_reports_what_it_must_not_find(browser: Browser, tmp_path: Path) -> None:
    """So that none of the tests below passes because nothing is seen."""
    bad = tmp_path / "bad.html"
    script = "console.error('said'); setTimeout(() => { throw new Error('thrown'); })"
    bad.write_text(f"<script>{script}</script><img src=missing.png>")
    browser.open(bad, *DESKTOP)
    browser.run("new Promise((done) => setTimeout(done, 100))")
    assert "said" in str(browser.problems())
    assert "thrown" in str(browser.problems())
    assert [Path(url).name for url in browser.requests()] == ["missing.png"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_curves_are_drawn_without_an_error_or_a_request(browser, page, size, scheme):
    browser.open(page, *size, scheme)
    assert browser.problems() == []
    assert browser.requests() == []
    plots = browser.run("JSON.parse(document.all.plots.textContent).length")
    assert browser.run("document.querySelectorAll('.plot svg').length") == plots
    # One line for each run that has the value: of the loss, three.
    of_loss = "[...document.querySelectorAll('figure')].find((e) => /^loss/.test(e.textContent))"
    assert browser.run(f"{of_loss}.querySelectorAll('.mark-line path').length") == 3
    assert browser.run(f"{of_loss}.querySelectorAll('.mark-symbol path[aria-label]').length") >= 17
    assert browser.run("document.querySelectorAll('.mark-rect path').length") > 10
    # As wide as their place, and the page as wide as the window.
    assert browser.run("document.documentElement.scrollWidth") == size[0]
    widths = "[...document.querySelectorAll('.plot')].map((each) => "
    widths += "each.querySelector('svg').getBoundingClientRect().width / each.clientWidth)"
    assert all(0.9 < ratio <= 1.01 for ratio in browser.run(widths))
    # Text is seen on what is behind it.
    colors = browser.run(
        "[getComputedStyle(document.body).backgroundColor, "
        "getComputedStyle(document.querySelector('.plot text')).fill]"
    )
    page_color, text_color = (sum(map(int, color[4:-1].split(","))) for color in colors)
    assert (page_color > 600 > 200 > text_color) is (scheme == "light")
    assert (page_color < 200 < 600 < text_color) is (scheme == "dark")
    # What runs are named stays text.
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.body.textContent.includes('onerror=alert(1)')")


def test_curves_are_drawn_by_epochs_and_on_a_logarithmic_scale(browser, page):
    browser.open(page, *DESKTOP)
    titles = "[...document.querySelectorAll('.role-axis-title')].map((each) => each.textContent)"
    form = "document.getElementById('axes')"
    assert set(browser.run(titles)) == {"steps"}
    browser.run(f"{form}.elements.unit.value = 'epochs'; {form}.elements.log.checked = true")
    browser.run(f"{form}.dispatchEvent(new Event('change'))")
    browser.run("new Promise((done) => setTimeout(done, 2000))")
    # The run whose epochs are not known stays as it was.
    assert browser.run(titles).count("epochs") > 2 > browser.run(titles).count("steps") > 0
    assert browser.problems() == []


def test_everything_is_reached_by_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP)
    reached = []
    focus = "((each) => each.getAttribute('href') ?? each.className ?? '')(document.activeElement)"
    tag = "document.activeElement.tagName"
    browser.press("Tab")
    assert browser.run(focus) == "#content"
    browser.press("Enter")
    assert browser.run("document.activeElement.id") == "content"
    browser.run("document.activeElement.blur(); scrollTo(0, 0)")
    browser.open(page, *DESKTOP)
    for _ in range(200):
        browser.press("Tab")
        if browser.run(tag) == "BODY":
            break
        reached.append(f"{browser.run(tag)} {browser.run(focus)}")
    # In the order of the page: the links to its sections, then tables and summaries.
    sections = browser.run("document.querySelectorAll('h2').length")
    links = [f"A #section-{number}" for number in range(sections)]
    assert reached[: sections + 1] == ["A #content", *links]
    assert reached.count("SUMMARY ") == browser.run("document.querySelectorAll('summary').length")
    shown = "[...document.querySelectorAll('.table')].filter((each) => each.checkVisibility())"
    assert reached.count("DIV table") == browser.run(f"{shown}.length")
    # A plot's numbers open by keyboard.
    browser.run("document.querySelector('figure summary').focus()")
    browser.press("Enter")
    assert browser.run("document.querySelector('figure details').open")


def test_it_is_printed_on_white_in_dark_mode_too(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP, "dark")
    assert browser.pdf().startswith(b"%PDF")
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.send("Emulation.setEmulatedMedia", media="print", features=[dark])
    look = "getComputedStyle(document.querySelector('{}')).{}"
    assert browser.run(look.format("body", "backgroundColor")) == "rgb(255, 255, 255)"
    assert browser.run(look.format(".plot text", "fill")) == "rgb(0, 0, 0)"
    assert browser.run(look.format("nav", "display")) == "none"
    assert browser.problems() == []
    browser.send("Emulation.setEmulatedMedia", media="")


def test_a_plot_that_cannot_be_drawn_says_where_its_numbers_are(browser, page, tmp_path):
    broken = tmp_path / "broken.html"
    text = page.read_text()
    assert '"domain":[' in text
    broken.write_text(text.replace('"domain":[', '"domain":[{"signal":"("},'))
    browser.open(broken, *DESKTOP)
    assert "its numbers are in the table" in browser.run("document.body.innerText")
