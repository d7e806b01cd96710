"""The page that ``report`` writes: its numbers are the logs', and what is missing is said."""

import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
from my_project_trainer.cli import command as cli
from my_project_trainer.tools import report
from my_project_trainer.tools.report import page as pages
from my_project_trainer.tools.report import reading
from tests.project import ROOT

from fitting import logged, rows
from report_subject import Model, fit

EVIL = "</script><img src=x onerror=alert(1)><!--{{7*7}}${x}"


class Page(HTMLParser):
    """A page: how many elements of each kind it has, its text, its tables and its plots."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.size = file.stat().st_size
        self.tags: Counter[str] = Counter()
        self.rows: list[list[str]] = []
        self.text, self._script, self.addresses = "", "", list[str]()
        self._in_cell = False
        self._specs = ""
        self.feed(file.read_text(encoding="utf-8"))
        self.values = [point for load in json.loads(self._specs) for point in load["values"]]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.tags[tag] += 1
        self._script = values.get("id") or "code" if tag in ("script", "style") else ""
        self.addresses += [values[name] or "" for name in ("src", "href") if name in values]
        assert not any(name.startswith("on") for name in values)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._script = "" if tag in ("script", "style") else self._script
        self._in_cell &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._script == "plots":
            self._specs += data
        if not self._script:
            self.text += data
            if self._in_cell:
                self.rows[-1][-1] += data

    def row(self, head: str) -> list[str]:
        """Cells of the only row with this head."""
        (cells,) = [row[1:] for row in self.rows if row[0] == head]
        return cells


def written(*runs: Path, out: Path | None = None) -> Page:
    report.run("my-project", [*map(str, runs), *(["--out", str(out)] if out else [])])
    return Page(out or runs[0] / "report.html")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a profile, each step of which is logged."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    fit(folder, Model(width=8), 4, log_every_n_steps=1)
    return folder


def made(folder: Path, *attempts: dict[str, Any], metrics: str = "", speed: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"attempts": attempts}))
    for name, text in (("metrics", metrics), ("speed", speed)):
        if text:
            (folder / f"{name}.csv").write_text(f"step,epoch,name,value\n{text}")
    return folder


def test_the_numbers_are_those_of_the_logs(run: Path) -> None:
    page = written(run)
    written_rows = rows(run) + rows(run, "speed.csv")
    points = sorted((point["step"], point["value"]) for point in page.values if "step" in point)
    assert points == sorted((step, value) for step, _, _, value in written_rows)
    losses = logged(run, "loss")
    assert page.row("last loss") == [f"{losses[-1]:.4g}"]
    step = 1 + losses.index(min(losses))
    assert page.row("best loss") == [f"{min(losses):.4g} at step {step}, epoch 0"]
    assert (page.row("processes"), page.row("samples per step")) == (["1"], ["4"])
    assert not any(row[0] == "best lr" for row in page.rows if row)
    shown = [
        row for row in page.rows if row[:1] == [run.name] and len(row) == 3 and row[1].isdecimal()
    ]
    assert sorted((int(step), float(value)) for _, step, value in shown) == points
    assert page.row("steps") == ["8"]
    assert page.row("ended") == ["finished step 8"]
    spent = reading.read(run).spent
    bar = [segment for segment in page.values if segment["name"] == run.name and "part" in segment]
    parts = {segment["part"]: segment["value"] for segment in bar}
    assert parts == {name: value for name, value in spent._asdict().items() if value > 0}
    assert page.row("effective training time") == [f"{spent.effective:.1%}"]


def test_the_page_needs_nothing_else(run: Path) -> None:
    page = written(run)
    assert page.size < 2_000_000
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert page.tags["script"] == 3
    text = (run / "report.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]


def test_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "two", {}, metrics="1,0,loss,0.5\n2,0,acc,1\n")
    for folder, rate in ((run, "0.1"), (other, "0.2")):
        text = f"model: {{init_args: {{rate: {rate}, key: s3cret{rate}}}}}\n"
        (folder / "config.yaml").write_text(f"trainer: {{max_steps: 8}}\n{text}")
    page = written(other, run, out=tmp_path / "both.html")
    assert page.row("last loss")[0] == "0.5"
    assert page.row("last acc") == ["1", "not logged"]
    assert {value["name"] for value in page.values if "step" in value} == {run.name, other.name}
    assert page.row("model.init_args.rate") == ["0.2", "0.1"]
    assert not any(row[0] in ("trainer.max_steps", "model.init_args.key") for row in page.rows)
    assert "s3cret" not in (tmp_path / "both.html").read_text()
    (run / "config.yaml").unlink()


def test_nothing_that_a_run_contains_is_executed(tmp_path: Path) -> None:
    name = EVIL.replace("/", "")
    facts = {"ended": EVIL, "command": [EVIL], "versions": {EVIL: EVIL}, "git": EVIL, "hosts": 3}
    run = made(tmp_path / name, facts, metrics=f'1,0,"{EVIL}",0.5\n2,0,"{EVIL}",0.25\n')
    other = made(tmp_path / "other")
    (run / "config.yaml").write_text(json.dumps({"model": {EVIL: EVIL}}))
    page = written(run, other)
    assert page.tags["img"] == 0
    assert page.tags["script"] == 3
    assert page.row(f"last {EVIL}") == ["0.25", "not logged"]
    assert page.row(f"model.{EVIL}") == [EVIL, "not set"]
    assert {value["name"] for value in page.values if "step" in value} == {run.name}


def test_what_is_missing_or_damaged_is_said(tmp_path: Path) -> None:
    page = written(made(tmp_path / "empty"))
    assert page.row("ended") == ["unknown"]
    assert page.row("steps") == ["none logged"]
    assert page.row("effective training time") == ["unknown"]
    assert not page.values
    assert "Without a profile" in page.text
    damaged = tmp_path / "damaged"
    (damaged / "profile").mkdir(parents=True)
    (damaged / "run.json").write_text('{"attempts": [3]}')
    (damaged / "config.yaml").write_text("a: [")
    lines = b"1,0,loss,0.5\n2,0,lo\n\0\0\n3,0,loss,nan\n4,0,loss,x\n5,0,\xff,1\n"
    (damaged / "metrics.csv").write_bytes(b"step,epoch,name,value\n" + lines)
    (damaged / "profile" / "rank-00000.1.pt.trace.json").write_text('{"traceEvents": [')
    (damaged / "profile" / "rank-00001.1.pt.trace.json").write_text('{"traceEvents": []}')
    (damaged / "speed.csv").mkdir()
    page = written(damaged)
    for line in (
        "damaged: metrics.csv: 3 damaged rows left out, first in line 3",
        "damaged: speed.csv: cannot be read to its end (Is a directory",
        "damaged: run.json: damaged",
        "damaged: config.yaml: not YAML (",
        "damaged: profile/rank-00000.1.pt.trace.json: cannot be read (Expecting value",
        "damaged: profile/rank-00001.1.pt.trace.json: no step was recorded",
    ):
        assert line in page.text
    losses = [(value["step"], value["value"]) for value in page.values if "step" in value]
    assert losses == [(1, 0.5), (3, None), (5, 1.0)]
    assert page.row("last loss") == ["nan"]


def test_mistakes_are_refused_in_a_line_each(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_PACKAGE", "not_installed")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(trainer.ConfigurationError) as caught:
        report.run("my-project", [".", "gone", "--out", "away/page.html"])
    assert caught.value.problems == [
        "report needs vl-convert-python: pip install vl-convert-python",
        "RUN='.': is no run directory; name one such as runs/RUN",
        "RUN='gone': does not exist; name one such as runs/RUN",
        "--out='away/page.html': the directory away does not exist",
    ]
    with pytest.raises(trainer.ConfigurationError, match=r"--out='x.pdf': name a file that ends"):
        report.run("my-project", [".", "--out", "x.pdf"])
    monkeypatch.setattr(report, "_check", lambda *_: None)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(trainer.UserError, match=r"^report.html: .*y\); name another by --out"):
        report.run("my-project", ["."])
    with pytest.raises(trainer.ConfigurationError, match="report: the following arguments are"):
        report.run("my-project", [])


def test_what_restarts_cost(tmp_path: Path) -> None:
    """Forty steps of two seconds, of which a quarter waits; attempts of ten, twenty and fifteen."""
    speed = "".join(
        f"{step},0,speed/seconds_per_step,2.0\n{step},0,speed/data_wait,0.25\n"
        f"{step},0,speed/checkpoint_seconds,3.0\n"
        for step in (1, 10, 20, 30, 40)
    )
    day = "2026-01-01T00:"
    attempts = [
        {
            **{"started": f"{day}00:00+0000", "ended_at": f"{day}01:00+0000"},
            **{"ended": "preempted SIGUSR1 step 10", "first_step": 0, "last_step": 10},
        },
        {
            **{"started": f"{day}03:00+0000", "ended_at": f"{day}04:00+0000", "last_step": 30},
            **{"ended": "failed ValueError", "first_step": 10},
        },
        {
            **{"started": f"{day}04:30+0000", "ended_at": f"{day}05:00+0000"},
            **{"ended": "finished step 40", "first_step": 25},
        },
    ]
    run = made(tmp_path / "restarted", *attempts, speed=speed)
    spent = reading.read(run).spent
    assert (spent.wall, spent.effective) == (300.0, 80 / 300)
    assert spent._asdict() == {
        **{"training": 60.0, "data": 20.0, "checkpoint": 15.0, "validation": 0.0},
        **{"repeated": 10.0, "between": 150.0, "other": 45.0},
    }
    ends = [row[2:] for row in written(run).rows if row[0] == run.name and len(row) == 6]
    assert ends == [
        ["preempted SIGUSR1 step 10", "0", "", ""],
        ["failed ValueError", "10", "0:02:00", "0"],
        ["finished step 40", "25", "0:00:30", "5"],
    ]
    del attempts[1]["ended_at"], attempts[1]["last_step"]
    killed = made(tmp_path / "killed", *attempts[:2], {}, speed=speed)
    ends = [row[2:] for row in written(killed).rows if row[0] == killed.name and len(row) == 6]
    assert ends[2] == ["no end recorded: running, or killed", "unknown", "unknown", "unknown"]


def test_a_resumed_run_has_its_steps_once(tmp_path: Path) -> None:
    options = {"log_every_n_steps": 1, "checkpoint_every_n_steps": 2, "callbacks": []}
    fit(tmp_path / "run", Model(width=8), 4, max_steps=5, **options)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    fit(tmp_path / "run", Model(width=8), 4, resume=str(checkpoint), **options)
    record = reading.read(tmp_path / "run")
    assert record.restarts[0][1] == 1
    seconds = [value for _, value in record.speed["speed/seconds_per_step"]]
    spent = record.spent
    assert len(seconds) == 8
    assert spent.training + spent.data == pytest.approx(math.fsum(seconds))


def test_long_logs_are_thinned_to_values_that_were_logged() -> None:
    points = [(step, math.sin(step)) for step in range(10_000)] + [(10_000, 7.0)]
    points[5_000] = (5_000, -5.0)
    kept = pages.thinned(points, 1000)
    assert 900 < len(kept) <= 1000
    assert set(kept) <= set(points)
    assert {points[0], points[-1], points[5_000]} <= set(kept)
    assert pages.thinned(points[:7], 7) == points[:7]


@pytest.mark.parametrize(
    ("runs", "names", "steps", "length"),
    [(2, 10, 5_000, 5), (2, 10, 5_000, 80), (1, 1_500, 20, 41), (30, 20, 500, 20)],
)
def test_a_page_of_much_is_below_two_megabytes(tmp_path, runs, names, steps, length):
    logged = "".join(
        f"{step},0,layers.0.attention/metric-{name},{math.sin(step) / 3!r}\n"
        for step in range(steps)
        for name in range(names)
    )
    folders = [tmp_path / f"{number:0{length}}" for number in range(runs)]
    for folder in folders:
        made(folder, metrics=logged)
    page = written(*folders)
    assert page.size < 2_000_000
    shown = len([row for row in page.rows if row[0].startswith("last ")])
    drawn = {(value["name"], value["step"]) for value in page.values}
    assert {name for name, _ in drawn} == {folder.name for folder in folders}
    assert {0, steps - 1} <= {step for _, step in drawn}
    if shown < names:
        assert f"{names - shown} more values are in the runs' CSV files." in page.text


def test_fit_names_the_command_that_makes_it(tmp_path, monkeypatch, capsys):
    if not (config := ROOT / "configs" / "digits.yaml").exists():
        pytest.skip("the example was deleted")
    monkeypatch.chdir(tmp_path)
    quick = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.max_steps", "2"]
    words = ["fit", "--config", str(config), *quick, "--trainer.default_root_dir", "my runs"]
    cli.main([*words, "--trainer.run_name", "one"])
    assert capsys.readouterr().out.splitlines()[-1] == "report: my-project report 'my runs/one'"
    cli.main(["report", "my runs/one"])
    assert capsys.readouterr().out == "report written to my runs/one/report.html\n"
    page = Page(Path("my runs/one/report.html"))
    assert page.row("strategy") == ["single_device"]
    assert page.row("steps") == ["2"]
    monkeypatch.setattr(cli, "_TOOLS", tmp_path)
    cli.main([*words, "--trainer.run_name", "two"])
    assert capsys.readouterr().out.splitlines()[-1] == "run directory: my runs/two"
