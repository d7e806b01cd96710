"""Reads Markdown pages: their headings, links, commands and sentences.

usage: pages.py [FILE ...]
  prints the average length of a sentence, and the longest ones; default: the pages of a project
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parent.parent / "{{cookiecutter.project_slug}}"
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# Conditions of pages that were not rendered, and comments.
NO_TEXT = re.compile(r"\{%.*?%\}|<!--.*?-->", re.DOTALL)


class Sentence(NamedTuple):
    """A sentence of prose: the number of its words, and its text."""

    words: int
    text: str


def blocks(text: str, language: str = "") -> list[str]:
    """Return the code blocks of a language; those without one hold commands."""
    return [content for _, kind, content in FENCED.findall(text) if kind == language]


def prose(text: str) -> str:
    """Return a page without code blocks, conditions and comments."""
    return NO_TEXT.sub("", FENCED.sub("", text))


def anchors(text: str, github: bool) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them, or MkDocs."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {title.replace(" ", "-") if github else re.sub(r"[- ]+", "-", title) for title in plain}


def links(text: str) -> list[str]:
    """Return the targets of a page's links and pictures to other files of the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", text))
    return [target for target in targets if not re.match(r"https?://|mailto:", target)]


def commands(text: str) -> list[str]:
    """Return the commands of a page: lines of blocks without a language, and code in the text."""
    lines: list[str] = []
    for block in blocks(text):
        joined = re.sub(r"\\\n *", "", block)
        lines += [re.sub(r"(^|\s+)#.*$", "", line) for line in joined.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", prose(text))
    started = re.compile(r"(\w+=\S+ )*(make|python|bash|sbatch|torchrun|cruft|pip) \S")
    return [line for line in lines if line] + [span for span in spans if started.match(span)]


def long_lines(text: str, longest: int = 120) -> list[str]:
    """Return the lines of prose that are longer; tables, code and conditions may be."""
    lines = FENCED.sub("", text).splitlines()
    return [
        line for line in lines if len(line) > longest and not re.match(r" *(\||<!--|\{%)", line)
    ]


def _paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs and items of lists, each in one line, without tables and headings."""
    kept = [
        "" if re.match(r" *(\||#|:::)|    (options|members|show_|inherited)", line) else line
        for line in prose(text).splitlines()
    ]
    for paragraph in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", "\n".join(kept)):
        if paragraph.strip():
            yield " ".join(paragraph.split())


def sentences(text: str) -> list[Sentence]:
    """Return the sentences of a page's prose; a list's item is one at least."""
    measured = []
    for paragraph in _paragraphs(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"^(?:[-*]|\d+\.) ", "", paragraph))
        plain = re.sub(r"`[^`]*`", "CODE", plain)
        for word in re.split(r"(?<=[.!?])(?:\*\*)? +(?=[A-Z*(`])|(?<=:) *$", plain):
            if words := len(re.findall(r"[\w'/-]+", word)):
                measured.append(Sentence(words, word))
    return measured


def average(measured: list[Sentence]) -> float:
    """Return the mean number of words of sentences."""
    return sum(sentence.words for sentence in measured) / len(measured)


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]]
    files = files or [*sorted(PROJECT.glob("docs/**/*.md")), PROJECT / "README.md"]
    every = [(sentence, file) for file in files for sentence in sentences(file.read_text("utf-8"))]
    print(f"{len(every)} sentences, {average([text for text, _ in every]):.1f} words on average")
    for longest, file in sorted(every, key=lambda pair: -pair[0].words)[:25]:
        print(f"{longest.words:4} {file.relative_to(PROJECT)}: {longest.text}")
