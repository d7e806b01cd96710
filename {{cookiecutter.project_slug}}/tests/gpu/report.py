"""The results of the checks as Markdown, and their place in a page: between two markers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NAME = "test-gpu"
# From so many numbers on, the summary has the largest alone.
_MANY = 5
_CELLS = {"passed": "", "failed": "**failed**", "skipped": "skipped", "crashed": "**crashed**"}


@dataclass(frozen=True)
class Result:
    """Of one test. ``found``: what it measured; ``message``: why it did not pass."""

    test: str
    outcome: str
    found: str = ""
    message: str = ""
    seconds: float = 0.0

    @property
    def function(self) -> str:
        """Its file and name, without parameters."""
        path, _, name = self.test.partition("::")
        return f"{Path(path).stem.removeprefix('test_')}: {_words(name.partition('[')[0])}"

    @property
    def parameters(self) -> str:
        return self.test.partition("[")[2].rstrip("]")


def markdown(facts: Mapping[str, str], results: Sequence[Result], seconds: float) -> str:
    """Return the page's section: what ran where, a line a check, numbers, and what did not pass."""
    counts = {name: sum(result.outcome == name for result in results) for name in _CELLS}
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing ran"
    lines = [
        f"{facts['date']}, {facts['device']}: {told}, in {seconds / 60:.1f} minutes.",
        "",
        *(f"- {name}: {value}" for name, value in facts.items() if name not in ("date", "device")),
        *_summary(results),
        *_numbers(results),
        *_others(results),
    ]
    return "\n".join(lines) + "\n"


def _summary(results: Sequence[Result]) -> list[str]:
    lines = ["", "| check | passed | failed | skipped | found |", "|---|---|---|---|---|"]
    for name, of_it in _by_function(results).items():
        passed, skipped = (
            sum(result.outcome == outcome for result in of_it) for outcome in ("passed", "skipped")
        )
        failed = len(of_it) - passed - skipped
        lines.append(f"| {name} | {passed} | {failed} | {skipped} | {_found(of_it)} |")
    return lines


def _found(of_one: Sequence[Result]) -> str:
    """Return what a check measured: each number, or of many the largest."""
    measured = [result for result in of_one if result.found]
    if len(measured) > _MANY:
        return f"at most {max((result.found for result in measured), key=_number)}"
    return "; ".join(f"{result.parameters} {result.found}".strip() for result in measured)


def _number(text: str) -> float:
    number = re.match(r"[-+]?[\d.]+(e[-+]?\d+)?", text)
    return float(number[0]) if number else 0.0


def _numbers(results: Sequence[Result]) -> list[str]:
    """Return a table for each check of many strategies and precisions: its numbers."""
    lines: list[str] = []
    for name, of_it in _by_function(results).items():
        if not _is_matrix(of_it):
            continue
        rows: dict[str, dict[str, str]] = {}
        for result in of_it:
            row, _, column = result.parameters.partition("-")
            number = result.found.partition(" (")[0]
            cell = " ".join(filter(None, [number, _CELLS[result.outcome]]))
            rows.setdefault(row, {})[column] = cell
        columns = sorted({column for row in rows.values() for column in row})
        lines += ["", f"{name}:", "", f"| | {' | '.join(columns)} |"]
        lines += ["|---" * (len(columns) + 1) + "|"]
        for row, cells in rows.items():
            lines.append(f"| {row} | {' | '.join(cells.get(head, '') for head in columns)} |")
    return lines


def _others(results: Sequence[Result]) -> list[str]:
    lines: list[str] = []
    reasons: dict[str, int] = {}
    for result in results:
        if result.outcome in ("failed", "crashed"):
            shown = " ".join(result.message.split())[:300]
            lines.append(f"- `{result.test.rpartition('/')[2]}` {result.outcome}: {shown}")
        elif result.outcome == "skipped":
            reasons[result.message] = reasons.get(result.message, 0) + 1
    lines += [f"- {count} skipped: {reason}" for reason, count in reasons.items()]
    return ["", *lines] if lines else []


def _by_function(results: Sequence[Result]) -> dict[str, list[Result]]:
    results_of: dict[str, list[Result]] = {}
    for result in results:
        results_of.setdefault(result.function, []).append(result)
    return results_of


def _is_matrix(of_one: Sequence[Result]) -> bool:
    is_measured = any(result.found for result in of_one)
    return is_measured and len(of_one) > _MANY and "-" in of_one[0].parameters


def _words(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def marks(name: str) -> tuple[str, str]:
    """Return the lines between which a page has the output of a command."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def write(page: Path, text: str, name: str = NAME) -> None:
    """Put a text between its markers in a page; a page that does not exist begins with them.

    Raises:
        ValueError: the page has not both markers, once each.
    """
    begin, end = marks(name)
    old = page.read_text(encoding="utf-8") if page.exists() else f"# On a GPU\n\n{begin}\n{end}\n"
    before, opening, rest = old.partition(f"{begin}\n")
    _, ended, after = rest.partition(end)
    if not opening or not ended:
        raise ValueError(f"{page} has no lines {begin} and {end} to put the output between")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")
