"""``plan``: what a run needs on devices that one need not have, and which strategies fit."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

HELP = "Plan a fit for other devices: batch, steps, memory under each strategy."
_BYTES = ("memory", "margin", "available")
_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "buckets", "gathered", "host")
_HEADS = ("strategy", "peak", *_COLUMNS, "fits", "batch", "largest batch", "", "")
_NO_FIT = "no strategy fits: use a smaller batch, activation_checkpointing, or more devices"


def run(program: str, words: Sequence[str]) -> None:
    """Print the plan of a ``fit``; UserError with all errors in the options, as of ``fit``."""
    from ...errors import Problems
    from ...launch import output
    from ..isolated import Child
    from . import planning

    problems = Problems()
    asked = planning.read_request(program, words, problems)
    # Each traced step has a limit of its own; there are a dozen at most.
    planned = Child(lambda: planning.make(asked, problems, program), 12 * asked.seconds).result()
    text = json.dumps(planned, indent=2) if asked.as_json else _table(planned)
    output.print_lines(text, is_result=True)


def _table(planned: dict[str, Any]) -> str:
    simplest = planned["simplest"]
    fits = f"the simplest that fits: --trainer.strategy {simplest}" if simplest else _NO_FIT
    omitted = (f"{', '.join(names)}: {reason}" for reason, names in planned["left_out"].items())
    facts = (_fact(*item) for item in planned["facts"].items() if not isinstance(item[1], dict))
    lines = [*facts, "", *_rows(planned["rows"]), "", fits]
    remarks = {"left out": omitted, "note": planned["notes"], "disagrees": planned["disagreements"]}
    lines += [f"{kind}: {line}" for kind, texts in remarks.items() for line in texts]
    return "\n".join(lines)


def _fact(name: str, value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(f"{number:.4g}" for number in value)
    elif name in _BYTES:
        shown = _size(value)
    else:
        shown = f"{value:,}" if isinstance(value, int) else str(value or "unknown")
    return f"{name.replace('_', ' '):24}{shown}"


def _size(number: int) -> str:
    """Bytes in the largest unit of which there is one."""
    unit = min(max(abs(number).bit_length() - 1, 0) // 10, 3)
    return f"{number / 2 ** (10 * unit):.{max(0, unit - 1)}f} {' KMG'[unit]}".strip()


def _rows(rows: list[dict[str, Any]]) -> Iterator[str]:
    padded = []
    for head, *cells in zip(_HEADS, *map(_cells, rows), strict=True):
        if {*cells} != {"0"}:
            side, width = "<" if head in ("strategy", "") else ">", max(map(len, (head, *cells)))
            padded.append([f"{cell:{side}{width}}" for cell in (head, *cells)])
    for line in zip(*padded, strict=True):
        yield "  ".join(line).rstrip()


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    memory = row["memory"]
    sizes = (_size(memory[name]) for name in ("peak", *_COLUMNS))
    batches = (f"{row[name]:,}" for name in ("batch_size", "largest_batch_size"))
    fits, how = "yes" if row["fits"] else "no", (memory["mark"], memory["note"])
    return row["name"], *sizes, fits, *batches, *how
