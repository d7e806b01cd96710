"""Files of a run that are cut, damaged or replaced: a line says so, and nothing is raised."""

import contextlib
import gzip
import json
import math
import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from my_project_trainer.checkpoint import run_directory
from my_project_trainer.cli import config_files
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.logging import loggers
from my_project_trainer.loop import hashes
from my_project_trainer.tools.report import checks, page, reading
from my_project_trainer.tools.reproduce import compare
from tests.project import succeed

ATTEMPT: dict[str, Any] = {
    **{"started": "2026-01-01T00:00:00+0000", "ended_at": "2026-01-01T00:01:00+0000"},
    **{"ended": "finished step 8", "first_step": 0, "last_step": 8, "device": "cpu"},
    "command": ["fit", "--x=1"],
    "git": {"commit": "a", "dirty": True, "diff": "", "untracked": []},
    **{"layout": {"world_size": 2, "num_nodes": 1}, "hosts": [{"cpu": "x", "threads": 2}]},
    **{"variables": {"OMP_NUM_THREADS": "1"}, "packages": {"torch": "2"}, "metrics": {"a": 1.5}},
    **{"data": [{"path": "x", "bytes": 1, "modified": 2, "sha256": None}], "seed": 1},
}
SPANS = (
    *(("user_annotation", "ProfilerStep#1", 0, 100), ("cpu_op", "aten::add", 10, 50)),
    ("user_annotation", "Optimizer.step#SGD", 60, 9.5),
    ("cuda_runtime", "cudaStreamSynchronize", 70, 3),
)
EVENTS = [{"ph": "X", "cat": c, "name": n, "ts": ts, "dur": dur} for c, n, ts, dur in SPANS]
ROWS = "".join(f"{n},0,loss,{1 / n!r}\n{n},0,val_loss,{n}.5\n" for n in range(1, 9))
SPEED = "".join(
    f"{n},0,speed/seconds_per_step,0.{n}\n{n},0,speed/checkpoint_seconds,1\n" for n in range(1, 9)
)
STEPS = "".join(f'{{"step": {n}, "data": "a{n}", "loss": "b"}}\n' for n in range(9))
TRACE = json.dumps({"traceEvents": EVENTS}).encode()
FILES: dict[str, bytes] = {
    "run.json": json.dumps({"attempts": [ATTEMPT, ATTEMPT]}, indent=2).encode(),
    "config.yaml": b"trainer: {seed: 1}\nmodel:\n  class_path: a.B\n  init_args: {w: 1e-3}\n",
    "metrics.csv": f"step,epoch,name,value\n{ROWS}".encode(),
    "speed.csv": f"step,epoch,name,value\n{SPEED}".encode(),
    "restarts.json": b'{"step": 3, "failures": 1}',
    "hashes/rank-00000.jsonl": STEPS.encode(),
    "profile/rank-00000.1.pt.trace.json": TRACE,
    "profile/rank-00001.1.pt.trace.json.gz": gzip.compress(TRACE, mtime=0),
}
ODD = [
    *(b"", b"\0", b"\n", b"\r", b",", b'"', b"{", b"}", b"[", b"]", b":", b"\xff\xfe"),
    b"\xed\xa0\x80",
    *(b"NaN", b"Infinity", b"-inf", b"1e999", b"-1", b"0", b"null", b"true", b'"x"', b"[]", b"{}"),
    *(b'"\\ud800"', b"9" * 30, b"9" * 4400, b"[" * 2000, b'{"a":' * 200, b"&a", b"*a", b"!x"),
    b"{{7*7}}",
    *(b"2026-13-45", b"\xf0\x9f\x98\x80", b"a" * 70_000, b"1" + b"0" * 300, b"\xe2\x80\xa8"),
]
VALUES: list[Any] = [
    *(None, True, -1, 0, 10**30, 1.5, math.nan, math.inf, 1e308, "", "x", "\ud800", "\0", []),
    *({}, [[]]),
    *({"a": None}, [None], ["x", 3], {"class_path": 1}, "9" * 400, "2026-01-01T00:00:00+0000"),
]


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Damage a content in one to three places: bytes, parts, or values that stay well-formed."""
    try:
        parsed = json.loads(content)
    except ValueError:
        parsed = None
    if parsed is not None and draw.random() < 0.5:
        return json.dumps(_replaced(parsed, draw)).encode()
    for _ in range(draw.randint(1, 3)):
        begin = draw.randrange(len(content) + 1)
        end = min(len(content), begin + draw.choice((0, 1, 1, 4, 30)))
        parts = (draw.choice(ODD), bytes([draw.randrange(256)]), content[end : end + 20])
        replacement = draw.choice(parts)
        content = draw.choice((content[:begin] + replacement + content[end:], content[:begin]))
    return content


def _replaced(value: Any, draw: random.Random) -> Any:
    """A value with another one in place of a random part of it."""
    keys: list[Any] = []
    if isinstance(value, dict | list):
        keys = list(value if isinstance(value, dict) else range(len(value)))
    if not keys or draw.random() < 0.15:
        return draw.choice(VALUES)
    key = draw.choice(keys)
    value[key] = _replaced(value[key], draw)
    return value


def use(run: Path, with_page: bool) -> None:
    """Do with a run what report, reproduce, a resume and a configuration do with its files."""
    record = reading.read(run)
    if with_page:
        page.written([record]).encode(errors="replace")
    checks.check(record)
    page.curves({"a": record.metrics})
    page._times([record])
    for attempt in record.attempts[-1:]:
        with contextlib.suppress(TypeError, ValueError, LookupError, AttributeError):
            list(compare.of_run(run, record.attempts))
            list(compare.differences(attempt, ATTEMPT))
            list(compare.data(attempt))
    compare.compare(run, run, 8)
    with contextlib.suppress(ConfigurationError):
        config_files.read_file("x", run / "config.yaml")
    hashes.truncate(run, 4)
    with contextlib.suppress(OSError, ValueError):
        loggers._end_of_step(run / "speed.csv", 4)
    run_directory.was_cut_off(run)
    run_directory.write_record(run, {}, "trainer: {}\n")
    run_directory.record_end(run, "finished", {})
    assert run_directory.attempts(run)[-1]["ended"] == "finished"


def filled(folder: Path) -> Path:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)
    return folder


def damage(name: str, folder: Path, count: int) -> None:
    """Use a run whose file was damaged, so many times."""
    draw = random.Random(name)
    for number in range(count):
        run = filled(folder)
        content = mutated(FILES[name], draw)
        (run / name).write_bytes(content)
        try:
            use(run, with_page=number % 20 == 0)
        except Exception:
            print(f"mutation {number} of {name}: {content[:2000]!r}")
            raise


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scripts in the page, few moments in steps, and disks that are not waited for."""
    monkeypatch.setattr(page, "_library", lambda: "")
    monkeypatch.setattr(reading, "_MOMENTS", 1000)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "count", [40, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.exhaustive])]
)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_no_error(name: str, tmp_path: Path, count: int) -> None:
    damage(name, tmp_path, count)


@cache
def zeros() -> bytes:
    """A quarter of a gigabyte, compressed."""
    return gzip.compress(bytes(2**28), 1)


KINDS: dict[str, Callable[[Path], object]] = {
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a circle of links": lambda path: path.symlink_to(path.name),
    "terabytes": lambda path: (path.touch(), os.truncate(path, 2**40)),
    "compressed zeros": lambda path: path.write_bytes(zeros()),
    "bytes that are no text": lambda path: path.write_bytes(b"\xff\xfe\0"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_files_are_read_within_bounds(kind: str, tmp_path: Path) -> None:
    """Each in place of all of them, in a process that may have no more than 3 GiB more."""
    run = filled(tmp_path / "run")
    for name in FILES:
        (run / name).unlink()
        KINDS[kind](run / name)
    code = "import resource, sys; from pathlib import Path; import test_damaged_files as t\n"
    code += "t.page._library, t.reading._MOMENTS = str, 1000\n"
    code += "now = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
    code += "resource.setrlimit(resource.RLIMIT_AS, (now + 3 * 2**30,) * 2)\n"
    code += "run = Path(sys.argv[1])\n"
    code += "print(*t.reading.read(run).notes, sep='\\n'); t.use(run, True)"
    done = succeed(["-c", code, run])
    for name in FILES:
        if not name.startswith(("restarts", "hashes", "profile/rank-00000")):
            assert f"{name}: " in done.stdout, done.stdout


def test_a_cut_record_keeps_its_whole_attempts_and_itself(tmp_path: Path) -> None:
    run = filled(tmp_path / "run")
    content = (run / "run.json").read_text()
    (run / "run.json").write_text(content[: len(content) - 100])
    said = run_directory.write_record(run, {"seed": 2})
    assert said == "run.json: damaged; 1 attempt of it can be read; kept as run.damaged.json"
    first, second = run_directory.attempts(run)
    assert first == ATTEMPT
    assert second["seed"] == 2
    assert (run / "run.damaged.json").read_text() == content[: len(content) - 100]
    assert run_directory.write_record(run, {}) is None
    # While a run writes to it, facts are not added to another attempt.
    (run / "run.json").write_text(content[: len(content) - 100])
    run_directory.record_end(run, "finished", {})
    assert (run / "run.json").read_text() == content[: len(content) - 100]
    assert (run_directory.write_record(run, {}) or "").endswith("kept as run.damaged-2.json")


def test_a_row_that_was_cut_is_left_out_wherever_it_was_cut(tmp_path: Path) -> None:
    run = filled(tmp_path / "run")
    rows = "step,epoch,name,value\n1,0,loss,0.125\n"
    for length in range(len("2,0,late,0.25") + 1):
        (run / "metrics.csv").write_text(rows + "2,0,late,0.25"[:length])
        record = reading.read(run)
        assert record.metrics == {"loss": [(1, 0.125)]}
        said = ["metrics.csv: 1 damaged row left out, first in line 3"] * (length > 0)
        assert [note for note in record.notes if note.startswith("metrics")] == said
