"""Writes the journal's tables into a page: by fault, and by strategy and launcher."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from .journal import GOOD, Entry, Journal, Journey

_BEGIN, _END = "<!-- soak: begin -->", "<!-- soak: end -->"
_OURS = "trainer's launcher"


def write(journal: Journal, page: Path) -> None:
    """Replace what is between the two comments of a page."""
    parts = [_summary(journal), _by_fault(journal.entries), _by_way(journal)]
    tables = "\n\n".join([_BEGIN, *parts, _END])
    text, number = re.subn(f"{_BEGIN}.*{_END}", lambda _: tables, page.read_text(), flags=re.S)
    if number != 1:
        raise SystemExit(f"{page} has no place for the tables: {_BEGIN} … {_END}")
    page.write_text(text)


def _summary(journal: Journal) -> str:
    count = Counter(entry.outcome for entry in journal.entries)
    lines = [
        f"{len(journal.entries)} faults of {len({entry.fault for entry in journal.entries})} kinds "
        f"in {len(journal.journeys)} runs under {len({run.way for run in journal.journeys})} "
        "combinations",
        f"of strategy and launcher: {count['lost']} lost, {count['hung']} hung, "
        f"{count['leftover']} with processes left, {count['differs']} with other results.",
    ]
    return "\n".join(lines)


def _by_fault(entries: Sequence[Entry]) -> str:
    launchers = sorted({_launcher(entry.way) for entry in entries}, key=lambda name: name != _OURS)
    rows = [["fault", *launchers, "steps lost", "median, s", "worst, s", "as expected"]]
    for name in sorted({entry.fault for entry in entries}, key=str.casefold):
        struck = [entry for entry in entries if entry.fault == name]
        count = Counter(_launcher(entry.way) for entry in struck)
        numbers = [str(count[launcher] or "") for launcher in launchers]
        rows.append([name, *numbers, str(max(entry.lost for entry in struck)), *_times(struck)])
    return _table(rows)


def _by_way(journal: Journal) -> str:
    rows = [
        ["strategy", "runs", "faults", "median, s", "worst, s", "as expected", "effective time"]
    ]
    for way in sorted({journey.way for journey in journal.journeys}, key=str.casefold):
        struck = [entry for entry in journal.entries if entry.way == way]
        runs = [journey for journey in journal.journeys if journey.way == way]
        rows.append([way, str(len(runs)), str(len(struck)), *_times(struck), _effective(runs)])
    return _table(rows)


def _effective(runs: Sequence[Journey]) -> str:
    """The part of their time that was not between a fault and the next new step."""
    waited = [(run.waited, run.seconds) for run in runs if run.waited]
    total = sum(seconds for _, seconds in waited)
    return f"{1 - sum(seconds for seconds, _ in waited) / total:.0%}" if total else ""


def _launcher(way: str) -> str:
    return way.partition(" ")[2].removeprefix("by ") or _OURS


def _times(entries: Sequence[Entry]) -> list[str]:
    """Median and worst time to the next step, and how many ended as they should."""
    seconds = [entry.seconds for entry in entries if entry.seconds is not None]
    times = [f"{median(seconds):.1f}", f"{max(seconds):.1f}"] if seconds else ["", ""]
    good = sum(entry.outcome in GOOD for entry in entries)
    return [*times, "all" if good == len(entries) else f"{good} of {len(entries)}"]


def _table(rows: Iterable[Sequence[str]]) -> str:
    head, *others = rows
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *others)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
