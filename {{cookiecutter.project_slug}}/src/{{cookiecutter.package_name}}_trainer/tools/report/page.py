"""The page: sections of tables and plots, with everything that they need inside."""

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from string import Template

from ...errors import shorten
from . import checks, costs, plots
from .plots import Plot
from .reading import Run
from .traces import CATEGORIES

_FACTS = ("strategy", "precision", "device", "samples_per_step", "steps_per_epoch", "seed")
_HOST = ("name", "cpu", "gpus", "driver", "cuda", "nccl")
_LONGEST = 400
_ABOUT_TIME = (
    "Effective training time is the share of the wall time, since the first start, in which steps "
    "were trained that no restart has lost; with their waits for data. “other” of the wall time is "
    "start-up, and what follows the last logged step."
)
_NO_PROFILE = (
    "Without a profile, computation, copies, communication and the optimizer are not told apart: "
    "train with the callback Profile, for example with ranks: null."
)


def written(runs: Sequence[Run]) -> str:
    """The page of runs, as HTML."""
    names = [run.name for run in runs]
    times = [costs.spent(run) for run in runs]
    drawn: list[Plot] = []
    sections = {
        "Summary": _summary(runs, times),
        "What would make it faster": _advice(runs, times),
        "Metrics": _plots(plots.curves(names, [run.metrics for run in runs]), drawn),
        "Speed, memory and use": _plots(plots.curves(names, [run.speed for run in runs]), drawn),
        "Where the time goes": _time(runs, times, drawn),
        "Attempts and restarts": _attempts(runs),
        "Differences of configurations": _differences(runs),
        "Environment": _environment(runs),
        "Remarks": _remarks(runs),
    }
    sections = {title: content for title, content in sections.items() if content}
    parts = {title: f"section-{number}" for number, title in enumerate(sections)}
    library, script = _inline(_library()), _inline(_file("page.js"))
    return Template(_file("page.html")).substitute(
        title=escape(f"Report of {', '.join(names)}"),
        style=_file("style.css"),
        nav=" ".join(f'<a href="#{part}">{escape(title)}</a>' for title, part in parts.items()),
        body="\n".join(
            f'<section aria-labelledby="{parts[title]}"><h2 id="{parts[title]}">{escape(title)}'
            f"</h2>\n{content}</section>"
            for title, content in sections.items()
        ),
        plots=_json([each.data for each in drawn]),
        library=library,
        script=script,
        hashes=" ".join(f"'sha256-{_hash(each)}'" for each in (library, script)),
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


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# --- sections ------------------------------------------------------------------------------------


def _summary(runs: Sequence[Run], times: Sequence[costs.Spent]) -> str:
    columns = []
    for run, time in zip(runs, times, strict=True):
        last = max((row[-1][0] for row in run.metrics.values()), default=None)
        steps = time.training + time.data
        columns.append(
            {
                "ended": run.attempts[-1].outcome if run.attempts else "unknown",
                "steps": "none logged" if last is None else str(last),
                "wall time": _seconds(time.wall) if time.wall else "unknown",
                "effective training time": f"{time.effective:.1%}" if steps else "unknown",
                **{f"last {name}": repr(row[-1][1]) for name, row in run.metrics.items()},
            }
        )
    return _table(["", *(run.name for run in runs)], _rows(columns, "not logged"))


def _advice(runs: Sequence[Run], times: Sequence[costs.Spent]) -> str:
    found, rows = [], []
    for run, time in zip(runs, times, strict=True):
        before = f"{run.name}: " if len(runs) > 1 else ""
        for each in checks.check(run, time):
            rows.append([f"{before}{each.cause}", each.measured, each.threshold])
            if each.advice is not None:
                found.append(f"<li><strong>{escape(before + each.cause)}.</strong> ")
                found[-1] += f"{escape(each.advice)}</li>"
    text = f'<ul class="advice">{"".join(found)}</ul>' if found else "<p>No cause was found.</p>"
    table = _table(["cause", "measured", "reported from"], rows)
    return f"{text}<details><summary>What was examined, and thresholds</summary>{table}</details>"


def _time(runs: Sequence[Run], times: Sequence[costs.Spent], drawn: list[Plot]) -> str:
    walls = {run.name: asdict(time) for run, time in zip(runs, times, strict=True) if time.wall}
    ranks = {
        f"{run.name} rank {trace.rank}" if len(runs) > 1 else f"rank {trace.rank}": {
            name: trace.mean(name) * 1e3 for name in CATEGORIES
        }
        for run in runs
        for trace in run.traces
    }
    found = []
    if walls:
        found.append(plots.bars("Wall time by what it was spent on, in seconds", walls))
    if ranks:
        found.append(plots.bars("A recorded step of each rank, in milliseconds", ranks))
    text = f"<p>{_ABOUT_TIME}</p>" if ranks else f"<p>{_ABOUT_TIME} {_NO_PROFILE}</p>"
    return text + _plots(found, drawn)


def _attempts(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        costs_of = [(None, None), *costs.restarts(run)]  # of the first, none
        for index, (each, (gap, lost)) in enumerate(zip(run.attempts, costs_of, strict=False)):
            known = "unknown" if index else ""
            rows.append([run.name, str(each.facts.get("started", "unknown")), each.outcome])
            rows[-1] += ["unknown" if each.first_step is None else str(each.first_step)]
            rows[-1] += [known if gap is None else _seconds(gap)]
            rows[-1] += [known if lost is None else str(lost)]
    heads = ["run", "started", "ended", "from step", "time since the attempt before"]
    return _table([*heads, "steps that were lost"], rows) if rows else ""


def _differences(runs: Sequence[Run]) -> str:
    rows = [row for row in _rows([run.config for run in runs], "not set") if len(set(row[1:])) > 1]
    if len(runs) < 2 or not rows:
        return "" if len(runs) < 2 else "<p>The configurations are equal.</p>"
    return _table(["option", *(run.name for run in runs)], sorted(rows))


def _environment(runs: Sequence[Run]) -> str:
    rows = _rows([_environment_of(run) for run in runs], "unknown")
    return _table(["", *(run.name for run in runs)], rows) if rows else ""


def _rows(columns: Sequence[Mapping[str, str]], missing: str) -> list[list[str]]:
    """Rows of a table whose columns are runs, from their values by name."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, missing) for column in columns)] for name in names]


def _environment_of(run: Run) -> dict[str, str]:
    facts = run.facts
    found = {name: facts[name] for name in _FACTS if facts.get(name) is not None}
    for section in ("versions", "git", "image"):
        if isinstance(given := facts.get(section), Mapping):
            kept = {key: value for key, value in given.items() if key != "diff"}
            found |= {f"{section} {key}": value for key, value in kept.items()}
    if isinstance(layout := facts.get("layout"), Mapping):
        found |= {key: layout.get(key) for key in ("world_size", "num_nodes")}
    hosts, command = facts.get("hosts"), facts.get("command")
    for index, host in enumerate(hosts if isinstance(hosts, list) else []):
        if isinstance(host, Mapping):
            found |= {f"host {index} {key}": host[key] for key in _HOST if host.get(key)}
    if isinstance(command, list):
        found["command"] = " ".join(map(str, command))
    return {name: shorten(str(value), _LONGEST) for name, value in found.items()}


def _remarks(runs: Sequence[Run]) -> str:
    items = [f"<li>{escape(f'{run.name}: {note}')}</li>" for run in runs for note in run.notes]
    return f"<ul>{''.join(items)}</ul>" if items else ""


# --- parts of a section --------------------------------------------------------------------------


def _plots(found: Iterable[Plot], drawn: list[Plot]) -> str:
    figures = []
    for each in found:
        wide = ' class="wide"' if each.data["kind"] == "bars" else ""
        table = _table(each.heads, each.rows)
        figures.append(
            f"<figure{wide}><figcaption>{escape(each.title)}</figcaption>"
            f'<div class="plot" id="plot-{len(drawn)}"></div>'
            f"<details><summary>Numbers</summary>{table}</details></figure>"
        )
        drawn.append(each)
    return f'<div class="plots">{"".join(figures)}</div>' if figures else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that can be scrolled by keyboard; the first cell of a row is its head."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        f"{''.join(f'<td>{escape(each)}</td>' for each in row[1:])}</tr>"
        for row in rows
    )
    label = escape(f"Table: {', '.join(filter(None, heads))}")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="table" role="region" tabindex="0" aria-label="{label}">{table}</div>'


def _seconds(value: float) -> str:
    """A duration in words."""
    if value < 60:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
