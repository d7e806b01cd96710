"""Draws terminals as SVG, of what commands really print: terminal_pictures.py PROJECT FOLDER.

`make docs-screenshots` runs it by the Python of a project. Two processes train the digits in
PROJECT, which is a render. FOLDER gets progress.svg, a moment of the run, and demo.svg, all of it
and the test of its checkpoint. Standard library only.
"""

from __future__ import annotations

import html
import os
import pty
import re
import struct
import subprocess
import sys
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import NamedTuple

COLUMNS = 112
FIT = "python -m my_project fit --config configs/digits.yaml --trainer.devices 2"
TEST = "python -m my_project test --config configs/digits.yaml --checkpoint"
# Of a rewritten line, only this: rich moves its bar by nothing else while it is one line.
REWRITTEN = "\r\x1b[2K"
SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
TEXT, BACKGROUND, PROMPT = "#d4d4d4", "#1e1e1e", "#6cb6ff"
# By the parameters of "select graphic rendition" that rich writes here.
COLORS = {
    "32": "#7ec699",
    "36": "#5fc9d8",
    "38;5;237": "#4a4a4a",
    "38;5;197": "#f92672",
    "38;5;70": "#5faf00",
}
WIDTH, HEIGHT, MARGIN = 7.8, 19, 14


class Run(NamedTuple):
    """Characters of a line in one color, from a column on."""

    column: int
    text: str
    color: str


def record(command: str, project: Path) -> str:
    """Return all that a command prints on a terminal of `COLUMNS`, with its control sequences.

    Raises:
        CalledProcessError: the command failed.
    """
    leader, follower = pty.openpty()
    ioctl(follower, TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": "src"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    words = [sys.executable, *command.split()[1:]]
    process = subprocess.Popen(
        words, cwd=project, env=environment, stdout=follower, stderr=follower, stdin=follower
    )
    os.close(follower)
    said = b""
    while chunk := _read(leader):
        said += chunk
    os.close(leader)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, words, said.decode())
    return said.decode().replace("\r\n", "\n")


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 65536)
    except OSError:  # the command has closed its end
        return b""


def last_frames(said: str) -> list[str]:
    """Return the lines that are left on the screen in the end."""
    return [line.split(REWRITTEN)[-1] for line in said.rstrip().split("\n")]


def at_a_moment(said: str, share: float) -> list[str]:
    """Return the lines on the screen when that share of the bar's frames with results was drawn."""
    lines: list[str] = []
    for line in said.split("\n"):
        frames = line.split(REWRITTEN)
        lines.append(frames[0])
        if len(frames) > 1:
            results = [frame for frame in frames if "val_" in frame]
            return [*lines[:-1], results[int(len(results) * share)]]
    return lines


def runs(line: str) -> list[Run]:
    """Return the colored parts of a line, without control sequences."""
    colored, column, color, start = [], 0, TEXT, 0
    for match in [*SEQUENCE.finditer(line), None]:
        text = line[start : match.start() if match else len(line)].replace("\r", "")
        if text:
            colored.append(Run(column, text, color))
        column += len(text)
        if match:
            start = match.end()
            color = COLORS.get(match[1], TEXT) if match[2] == "m" else color
    return colored


def svg(lines: list[str], says: str) -> str:
    """Return a picture of a terminal; `says` is read by those who do not see it."""
    width, height = COLUMNS * WIDTH + 2 * MARGIN, len(lines) * HEIGHT + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">',
        f"<title>{html.escape(says)}</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
    ]
    for number, line in enumerate(lines):
        y = MARGIN + number * HEIGHT + 14
        for run in runs(line):
            words, x = run.text.rstrip(" "), MARGIN + run.column * WIDTH
            color = PROMPT if line.startswith("$ ") else run.color
            if words:  # the width keeps columns, whatever the font
                parts.append(
                    f'<text x="{x:.1f}" y="{y}" fill="{color}" xml:space="preserve" '
                    f'textLength="{len(words) * WIDTH:.1f}">{html.escape(words)}</text>'
                )
    return "\n".join([*parts, "</svg>", ""])


def main(project: Path, folder: Path) -> None:
    """Train, test and draw."""
    fit = record(FIT, project)
    directory = re.findall(r"run directory: (\S+)", fit)[-1]
    moment = at_a_moment(fit, 0.6)  # without the command, which names this package
    test = [f"$ {TEST} {directory}", *last_frames(record(f"{TEST} {directory}", project))]
    demo = [f"$ {FIT}", *last_frames(fit), "", *test]
    for name, lines, says in (
        ("progress", moment, "The progress bar of a run with two processes: epoch, steps, losses"),
        ("demo", demo, "A run with two processes on the CPU, and the test of its checkpoint"),
    ):
        (folder / f"{name}.svg").write_text(svg(lines, says), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
