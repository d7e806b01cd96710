"""Fill ``page.html`` with what is known of the runs; the page holds all that it needs."""

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from importlib.resources import files

from jinja2 import Environment

from ...errors import shorten
from . import checks, costs, plots
from .reading import Run
from .traces import CATEGORIES

# Of run.json; the rest stays there.
_COMPARED = ("git.commit", "image.", "locks.", "packages.", "versions.", "hosts")
_LONGEST = 400


def written(runs: Sequence[Run]) -> str:
    """The page of runs, as HTML; all values are escaped."""
    times = [costs.spent(run) for run in runs]
    drawn = {
        "Metrics": plots.curves({run.name: run.metrics for run in runs}),
        "Speed, memory and use": plots.curves({run.name: run.speed for run in runs}),
        "Where the time goes": _bars(runs, times),
    }
    scripts = [_inline(_library()), _inline(_file("page.js"))]
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in scripts]
    # Jinja's usual braces would be filled when the project is made from its template.
    signs = ("<%", "%>", "[[", "]]", "[#", "#]")
    made = Environment(*signs, autoescape=True, trim_blocks=True)
    made.filters["duration"] = _duration
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return made.from_string(_file("page.html")).render(
        runs=list(zip(runs, times, map(checks.check, runs, times), strict=True)),
        restarts=costs.restarts,
        differences=_differences(runs),
        drawn=drawn,
        style=_file("style.css"),
        scripts=scripts,
        hashes=[each.decode() for each in hashes],
    )


@functools.cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which takes two seconds to make."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """A script without what would end its element: in strings, the escape means the same."""
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


def _bars(runs: Sequence[Run], times: Sequence[costs.Spent]) -> list[plots.Plot]:
    walls = {run.name: asdict(time) for run, time in zip(runs, times, strict=True) if time.wall}
    ranks = {
        f"rank {trace.rank}{f' of {run.name}' * (len(runs) > 1)}": {
            name: trace.mean(name) * 1e3 for name in CATEGORIES
        }
        for run in runs
        for trace in run.traces
    }
    bars = {"Wall time in seconds": walls, "A recorded step in milliseconds": ranks}
    return [plots.bars(title, parts) for title, parts in bars.items() if parts]


def _differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Options, versions and hosts that are not equal in all runs, by name."""
    facts = [{k: v for k, v in run.facts.items() if k.startswith(_COMPARED)} for run in runs]
    known = [run.config | of_run for run, of_run in zip(runs, facts, strict=True)]
    columns = {
        name: [shorten(each.get(name, "not set"), _LONGEST) for each in known]
        for name in sorted({name for each in known for name in each})
    }
    return {name: values for name, values in columns.items() if len(set(values)) > 1}


def _duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, such as 1:02:03."""
    return "unknown" if seconds is None else str(timedelta(seconds=round(seconds)))
