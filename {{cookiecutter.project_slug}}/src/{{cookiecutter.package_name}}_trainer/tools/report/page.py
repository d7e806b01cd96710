"""The page: sections of tables and plots, with everything that they need inside."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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
_PROFILE = """'[{"class_path": "Profile", "init_args": {"ranks": null}}]'"""


def written(runs: Sequence[Run]) -> str:
    """The page of runs, as HTML."""
    import vl_convert

    runs = _named_apart(runs)
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
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    library, script = _inline(bundle), _inline(_file("page.js"))
    return Template(_file("page.html")).substitute(
        title=escape(f"Report of {', '.join(names)}"),
        style=_file("style.css"),
        nav=" ".join(f'<a href="#{part}">{escape(title)}</a>' for title, part in parts.items()),
        body="\n".join(
            f'<section aria-labelledby="{parts[title]}"><h2 id="{parts[title]}">{escape(title)}'
            f"</h2>\n{content}</section>"
            for title, content in sections.items()
        ),
        specs=_json({f"plot-{number}": each.spec for number, each in enumerate(drawn)}),
        library=library,
        script=script,
        hashes=" ".join(f"'sha256-{_hash(each)}'" for each in (library, script)),
    )


def _named_apart(runs: Sequence[Run]) -> list[Run]:
    """Runs of the same name in different folders get numbers."""
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({number})") if names.count(run.name) > 1 else run
        for number, run in enumerate(runs, 1)
    ]


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
    rows: dict[str, list[str]] = {"ended": [], "steps": [], "wall time": []}
    rows |= {"effective training time": []}
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    rows |= {f"last {name}": [] for name in names}
    for run, time in zip(runs, times, strict=True):
        last = max((row[-1][0] for row in run.metrics.values()), default=0)
        effective = "unknown" if time.effective is None else f"{time.effective:.1%}"
        wall = "unknown" if time.wall is None else _seconds(time.wall)
        rows["ended"].append(run.attempts[-1].outcome if run.attempts else "unknown")
        rows["steps"].append(str(last) if last else "none logged")
        rows["wall time"].append(wall)
        rows["effective training time"].append(effective)
        for name in names:
            rows[f"last {name}"].append(plots.number(run.metrics.get(name)))
    return _table(["", *(run.name for run in runs)], [[name, *row] for name, row in rows.items()])


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
    walls = [(run.name, time.parts()) for run, time in zip(runs, times, strict=True) if time.wall]
    ranks = [
        (
            f"{run.name} rank {trace.rank}" if len(runs) > 1 else f"rank {trace.rank}",
            {name: trace.mean(name) * 1e3 for name in CATEGORIES},
        )
        for run in runs
        for trace in run.traces
    ]
    found = []
    if walls:
        found.append(plots.bars("Wall time by what it was spent on, in seconds", walls))
    if ranks:
        found.append(plots.bars("A recorded step of each rank, in milliseconds", ranks))
    text = (
        "<p>Effective training time is the share of the wall time, since the first start, in which "
        "steps were trained that count: not lost by a restart. Steps include their waits for data. "
        "“other” of the wall time is start-up, and what follows the last logged step.</p>"
    )
    if not ranks:
        text += (
            "<p>There is no profile, so that computation, copies, communication and the optimizer "
            "are not told apart: train some steps with <code>--trainer.callbacks "
            f"{escape(_PROFILE)}</code>.</p>"
        )
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
    if len(runs) < 2:
        return ""
    keys = sorted({key for run in runs for key in run.config})
    values = {key: [run.config.get(key, "not set") for run in runs] for key in keys}
    rows = [[key, *found] for key, found in values.items() if len(set(found)) > 1]
    heads = ["option", *(run.name for run in runs)]
    return _table(heads, rows) if rows else "<p>The configurations are equal.</p>"


def _environment(runs: Sequence[Run]) -> str:
    columns = [_environment_of(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "unknown") for column in columns)] for name in names]
    return _table(["", *(run.name for run in runs)], rows) if rows else ""


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
    lines = [f"{run.name}: {note}" for run in runs for note in run.notes]
    items = "".join(f"<li>{escape(each)}</li>" for each in lines)
    return f"<ul>{items}</ul>" if items else ""


# --- parts of a section --------------------------------------------------------------------------


def _plots(found: Iterable[Plot], drawn: list[Plot]) -> str:
    figures = []
    for each in found:
        wide = ' class="wide"' if each.is_wide else ""
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
