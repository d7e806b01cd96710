"""The template's README says what other files say, and its pictures are small."""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path

import conformance_tables
import lock
import pages
import pytest
import terminal_pictures
from rendering import ROOT, TEMPLATE

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Compression of gradients, and 16-bit numbers, which are further apart.
COARSE = re.compile(r"hook|PowerSGD|16")


def section(heading: str) -> str:
    return README.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_it_is_short_and_easy_to_read() -> None:
    assert README.count("\n") <= 130
    assert pages.long_lines(README) == []


def test_it_names_each_strategy() -> None:
    named = set(re.findall(r"`(\w+)`", section("Strategies")))
    named |= {f"deepspeed_stage{name}" for name in named if name.startswith("_")}
    measured = {name.partition(",")[0] for name in conformance_tables.measured()}
    assert measured - named == set()


def test_its_numbers_are_those_of_the_evidence() -> None:
    text = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    table = text.split("<!-- conformance: begin -->")[1].split("<!-- conformance: end -->")[0]
    rows = [line.strip("|").split("|") for line in table.strip().splitlines()]
    numbers = [
        float(cell)
        for row in rows[2:]
        for column, cell in zip(rows[0][2:], row[2:], strict=True)
        if re.search(r"e-|e\+", cell) and not COARSE.search(f"{row[0]} {column}")
    ]
    assert f"at most {max(numbers):.1e} apart" in section("Evidence")
    reliability = (TEMPLATE / "docs" / "reliability.md").read_text(encoding="utf-8")
    (inputs,) = re.findall(r"\[(\d+) bad inputs\]", README)
    (refused, tried) = re.findall(r"\[(\d+) of (\d+)\]", README)[0]
    assert f"| **total** | **{inputs}** |" in reliability
    assert f"| **total** | **{tried}** | **0** | **{refused}** |" in reliability
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for number, contestant in (
        (r"\[([\d.]+) ms a step\]", r"\*\*bundled trainer\*\*, its defaults"),
        (r"with its own ([\d.]+);", "Lightning, its defaults"),
        (r"logs nothing, ([\d.]+)", "Accelerate"),
    ):
        (said,) = re.findall(number, README)
        more = re.findall(rf"^\| {contestant} \|[^|]*\| \+([\d.]+) ", benchmarks, re.MULTILINE)[0]
        assert float(said) == pytest.approx(float(more) / 1000, abs=0.005)


def test_its_badges_say_what_the_files_say() -> None:
    badge = r"!\[(\w+): ([^\]]+)\]\(https://img\.shields\.io/badge/(\w+)-([^)-]+)-blue\)"
    badges = re.findall(badge, README)
    assert len(badges) == README.count("shields.io")
    for name, value, drawn_name, drawn in badges:
        assert (name, value) == (drawn_name, urllib.parse.unquote(drawn))
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith("MIT License\n")
    project = (TEMPLATE / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={lock.PYTHONS[0]}"' in project
    (torch,) = re.findall(r'"torch>=([\d.]+)"', project)
    assert [(name, value) for name, value, *_ in badges] == [
        ("License", "MIT"),
        ("Python", f"{lock.PYTHONS[0]} to {lock.PYTHONS[-1]}"),
        ("PyTorch", f"{torch} or newer"),
    ]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", TEMPLATE / "README.md"], ids=["own", "render"]
)
def test_its_pictures_are_there_and_small(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("%7B%7Bcookiecutter.project_slug%7D%7D", "*")
    names = re.findall(r"!\[[^\]]+\]\((?!https:)([^)]+)\)", text)
    names += re.findall(r'<img alt="[^"]+"[^>]*src="([^"]+)"', text)
    assert len(names) == 2
    for name in names:
        (picture,) = page.parent.glob(name)
        assert picture.stat().st_size < 60_000, name


def test_the_picture_is_of_what_make_demo_runs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    demo = makefile.split("\ndemo:")[1].split("\n\n")[0]
    for command in (terminal_pictures.FIT, terminal_pictures.TEST):
        assert command in demo.replace("$(PROJECT_VENV)/bin/python", "python")


def test_a_terminal_is_drawn_as_it_was() -> None:
    bar = "epoch 1/2 \x1b[38;5;197m━━\x1b[0m \x1b[32m1/2\x1b[0m"
    frames = [f"{bar} loss 3", f"{bar} val_loss 2", f"{bar} val_loss <1>"]
    said = "begin\n\x1b[?25l" + terminal_pictures.REWRITTEN.join(frames) + "\n\x1b[?25hend\n"
    last = terminal_pictures.last_frames(said)
    assert [terminal_pictures.SEQUENCE.sub("", line) for line in last] == [
        "begin",
        "epoch 1/2 ━━ 1/2 val_loss <1>",
        "end",
    ]
    assert terminal_pictures.at_a_moment(said, 0.4)[-1] == frames[1]
    assert "val_loss &lt;1&gt;" in terminal_pictures.svg(last, "A run")
    runs = terminal_pictures.runs(bar)
    assert [(run.column, run.text) for run in runs] == [
        (0, "epoch 1/2 "),
        (10, "━━"),
        (12, " "),
        (13, "1/2"),
    ]
    assert runs[1].color == terminal_pictures.COLORS["38;5;197"]
