"""Fill ``page.html`` with what is known of the runs; the page holds all that it needs."""

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader

from ...errors import shorten
from . import checks
from .reading import CATEGORIES, Run, Series

_FOLDER = Path(__file__).parent
# Of run.json; the rest stays there.
_COMPARED = ("git.commit", "image.", "locks.", "packages.", "versions.", "hosts")
_LONGEST = 400
# They keep the page below 2 MB: curves, bytes of all points, points of a curve, rows of tables.
_MOST_CURVES, _MOST_BYTES, _MOST_OF_ONE, _MOST_ROWS = 400, 600_000, 1_000, 2_000

# Which values are better, by words of their names.
_LOWER = re.compile(r"(?i)loss|perplexity|error|\bm[as]e\b|rmse")
_HIGHER = re.compile(r"(?i)acc|f1|auc|recall|iou|bleu|rouge|score|\br2\b")
_FACTS = {  # names of run.json, and those that the page has
    **dict.fromkeys(("strategy", "precision", "device")),
    **{"layout.world_size": "processes", "samples_per_step": "samples per step"},
}

Plot = dict[str, Any]
"""Drawn by ``page.js`` with Vega-Lite, shown as a table by ``page.html``: ``title``; ``kind``: a
key of ``specs`` in ``page.js``; ``domain``: what colors tell apart; ``values``."""


def written(runs: Sequence[Run]) -> str:
    """The page of runs, as HTML; all values are escaped."""
    logs = {"Metrics": {run.name: run.metrics for run in runs}}
    logs["Speed, memory and use"] = {run.name: run.speed for run in runs}
    drawn = {title: curves(log) for title, log in logs.items()}
    left = {title: len({*chain(*logs[title].values())}) - len(drawn[title]) for title in logs}
    drawn["Where the time goes"] = _times(runs)
    # In strings, the escape means the same, and a script may not contain the end of its element.
    ends, file = re.compile(r"<(?=/script|!--)", re.IGNORECASE), _FOLDER / "page.js"
    scripts = [ends.sub(r"\\x3c", text) for text in (_library(), file.read_text("utf-8"))]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()) for script in scripts]
    # Jinja's usual braces would be filled when the project is made from its template.
    signs, loader = ("<%", "%>", "[[", "]]", "[#", "#]"), FileSystemLoader(_FOLDER)
    made = Environment(*signs, autoescape=True, trim_blocks=True, loader=loader)
    made.filters["duration"] = lambda seconds: timedelta(seconds=round(min(max(0, seconds), 1e13)))
    made.filters["best"] = best
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return made.get_template("page.html").render(
        runs=[(run, run.spent, checks.check(run)) for run in runs],
        differences=_differences(runs),
        facts=_FACTS,
        units={run.name: [1, _count(run, "steps"), _count(run, "samples")] for run in runs},
        drawn=drawn,
        left=left,
        rows=min(36, _MOST_ROWS // max(1, sum(map(len, drawn.values())))),
        scripts=scripts,
        hashes=hashes,
    )


def best(run: Run, metric: str) -> str:
    """The best value of a metric with its step and epoch; empty where no direction is known."""
    sign = 1 if _LOWER.search(metric) else -1 if _HIGHER.search(metric) else 0
    points = [point for point in run.metrics.get(metric, []) if math.isfinite(point[1])]
    if not sign or not points:
        return ""
    step, value = min(points, key=lambda point: sign * point[1])
    length = _count(run, "steps")
    return f"{value:.4g} at step {step}" + (f", epoch {(step - 1) // length}" if length else "")


def _count(run: Run, kind: str) -> int:
    """Steps of an epoch, or samples of a step, as ``run.json`` has them; 0: unknown."""
    text = run.facts.get({"steps": "steps_per_epoch", "samples": "samples_per_step"}[kind], "")
    return int(text) if text.isdecimal() and len(text) < 16 else 0


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which takes two seconds to make."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def curves(logs: Mapping[str, Series]) -> list[Plot]:
    """One plot for each name of a value, with a curve for each run; of many names the first."""
    names = list(dict.fromkeys(chain(*logs.values())))[: max(20, _MOST_CURVES // len(logs))]
    total = sum(name in log for log in logs.values() for name in names)
    points = _MOST_BYTES // (50 + max(map(len, logs)))
    most = min(_MOST_OF_ONE, max(4, points // max(1, total)))
    made = []
    for metric in names:
        values = [
            # JSON has neither infinity nor NaN.
            {"name": run, "step": step, "value": value if math.isfinite(value) else None}
            for run, log in logs.items()
            for step, value in thinned(log.get(metric, []), most)
        ]
        made.append({"title": metric, "kind": "curve", "domain": [*logs], "values": values})
    return made


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most so many of the points, unchanged: the ends, and the extremes of each range."""
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // (most - 2))
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        kept |= {min(chunk, key=itemgetter(1)), max(chunk, key=itemgetter(1))}
    return sorted(kept)


def _times(runs: Sequence[Run]) -> list[Plot]:
    """Stacked bars: one for each run, and one for each rank that has a profile."""
    walls = {run.name: run.spent._asdict() for run in runs if run.spent.wall}
    ranks = {
        f"rank {trace.rank}{f' of {run.name}' * (len(runs) > 1)}": {
            name: fmean(step.seconds[name] for step in trace.steps) * 1e3 for name in CATEGORIES
        }
        for run in runs
        for trace in run.traces
    }
    bars = {"Wall time in seconds": walls, "A recorded step in milliseconds": ranks}
    return [_bars(title, rows) for title, rows in bars.items() if rows]


def _bars(title: str, rows: Mapping[str, Mapping[str, float]]) -> Plot:
    """A stacked bar for each name, of its categories that are above zero in one of the bars."""
    kinds = [kind for kind in next(iter(rows.values())) if any(row[kind] for row in rows.values())]
    values = [
        {"name": name, "part": kind, "order": order, "value": row[kind], "all": sum(row.values())}
        for name, row in rows.items()
        for order, kind in enumerate(kinds)
    ]
    return {"title": title, "kind": "bars", "domain": kinds, "values": values}


def _differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Options, versions and hosts that are not equal in all runs, by name."""
    known = [
        run.config | {name: run.facts[name] for name in run.facts if name.startswith(_COMPARED)}
        for run in runs
    ]
    columns = {
        name: [shorten(facts.get(name, "not set"), _LONGEST) for facts in known]
        for name in sorted(set().union(*known))
    }
    return {name: values for name, values in columns.items() if len(set(values)) > 1}
