"""Run all checks that need a GPU, in a few processes, and write what they found into a page.

usage: python -m tests.gpu.run [--device cuda|cpu] [--report FILE] [--results FILE] [-k WORDS]
                               [--at-once N]

Those of a folder that GPU_CHECKS names are run first, by default eight processes at once on a GPU.
If a GPU error ends a process, only the current check is lost: another process runs the rest. The
page and the results are written after each process, and the next command continues after the last
one that finished, if device, versions and code are the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import packages, report
from .report import Result

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MOST_RESTARTS = 20
# In one process; so a session ends within five minutes.
STRATEGIES_AT_ONCE = 4
# Processes that share a GPU.
AT_ONCE = {"cuda": 8, "cpu": 1}
# It measures how soon ranks end, so nothing else is to run beside it.
ALONE = "test_failures.py"
# Exit codes of pytest that say that it ran to its end: all well, failures, stopped, no test.
ENDED = (0, 1, 2, 5)
FACTS = """
import importlib.metadata, json, platform, sys, torch
facts = {"Python": platform.python_version(), "torch": torch.__version__}
name = f"{platform.machine()} CPU"
if sys.argv[1] == "cuda":
    properties = torch.cuda.get_device_properties(0)
    name = f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
    facts["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        import pynvml
        pynvml.nvmlInit()
        facts["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        facts["driver"] = "unknown"
for engine in sys.argv[2:]:
    try:
        facts[engine] = importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps({"device": name, **facts}))
"""


COLLECT = """
import contextlib, io, json, sys, pytest
codes = []
for *files, words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        more = ["-m", "gpu", "-p", "no:cacheprovider", "-q", "--collect-only"]
        codes.append(int(pytest.main([*files, "-k", words, *more])))
print("@" + json.dumps(codes))
"""


@dataclass(frozen=True)
class Session:
    """What one process runs: files, and which of their tests."""

    files: tuple[str, ...]
    words: str = ""

    @property
    def selection(self) -> str:
        """What ``-k`` selects it by."""
        return self.words or " or ".join(Path(name).stem for name in self.files)


def sessions() -> list[Session]:
    """Return them in their order: another folder's first, then strategies, each engine alone."""
    # After `main` has looked which packages are missing.
    from .strategies import ROWS, engine, engines

    strategies = "tests/gpu/test_strategies.py"
    of_torch = [name for name in sorted(ROWS) if engine(name) is None]
    files = sorted(f"tests/gpu/{path.name}" for path in HERE.glob("test_*.py"))
    others = os.environ.get("GPU_CHECKS")
    more = sorted(map(str, Path(others).glob("test_*.py"))) if others else []
    return [
        *(Session((name,)) for name in sorted(more, key=lambda name: not name.endswith(ALONE))),
        Session((strategies,), "test_strategies and not ["),
        *(
            Session((strategies,), _words(of_torch[first : first + STRATEGIES_AT_ONCE]))
            for first in range(0, len(of_torch), STRATEGIES_AT_ONCE)
        ),
        *(Session((name,)) for name in files if name != strategies),
        *(Session((strategies,), _words(names)) for names in engines().values() if names),
    ]


def _words(strategies: Iterable[str]) -> str:
    """Select the tests of these strategies, and not those of a name that contains one of them."""
    chosen = " or ".join(f"[{name}- or [{name}]" for name in strategies)
    return f"test_strategies and ({chosen})"


def selected(wanted: list[Session], words: str) -> list[Session]:
    """Leave out sessions of which ``words`` select no test; all are collected in one process."""
    selections = [(*session.files, _chosen(session, words)) for session in wanted]
    command = [sys.executable, "-c", COLLECT, json.dumps(selections)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    # Files that cannot be imported are seen where the session runs.
    if done.returncode != 0:
        return wanted
    codes = json.loads(done.stdout.rpartition("@")[2])
    return [session for session, code in zip(wanted, codes, strict=True) if code != 5]


def _chosen(session: Session, words: str) -> str:
    return " and ".join(f"({selection})" for selection in (session.words, words) if selection)


def run_session(session: Session, device: str, words: str) -> Iterator[Result]:
    """Run a session, in another process where one has not come to its end."""
    finished: dict[str, Result] = {}
    for _ in range(MOST_RESTARTS):
        code, entries, output = _pytest(session, device, words, list(finished))
        collected = [name for entry in entries for name in entry.get("collected", ())]
        new = {entry["test"]: Result(**entry) for entry in entries if "test" in entry}
        begun = [entry["begins"] for entry in entries if "begins" in entry]
        if code not in ENDED and begun and begun[-1] not in new:
            how = f"the process ended with {code}: {output.strip().splitlines()[-1:]}"
            new[begun[-1]] = Result(begun[-1], "crashed", message=how)
        elif code not in ENDED or (code == 2 and not new):
            new[" ".join(session.files)] = Result(
                " ".join(session.files), "crashed", message=output.strip()[-300:]
            )
        yield from (result for name, result in new.items() if name not in finished)
        finished.update(new)
        if not new or not set(collected) - set(finished):
            return


def _pytest(
    session: Session, device: str, words: str, finished: Sequence[str]
) -> tuple[int, list[dict[str, object]], str]:
    """Return the exit code of pytest, what it wrote down, and what it printed."""
    chosen = _chosen(session, words)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        command = [sys.executable, "-m", "pytest", *session.files, "-m", "gpu", "-k", chosen]
        command += ["-p", "tests.gpu.recording", "-p", "no:cacheprovider", "-q"]
        # A main thread that waits for a GPU hears no signal.
        command += ["--timeout-method", "thread"]
        command += [word for name in finished for word in ("--deselect", name)]
        variables = {"GPU_TESTS_ON": device, "GPU_RESULTS": str(results)}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        entries = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
    if done.returncode not in (0, 5):
        print(done.stdout, file=sys.stderr, flush=True)
    return done.returncode, entries, done.stdout


def facts(device: str, engines: Iterable[str]) -> dict[str, str]:
    """Return what the report begins with: when, on what, and the versions."""
    done = subprocess.run(
        [sys.executable, "-c", FACTS, device, *engines], capture_output=True, text=True, check=True
    )
    now = datetime.datetime.now(datetime.UTC)
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return {"date": f"{now:%Y-%m-%d %H:%M} UTC", **versions}


def code() -> str:
    """Hash the files that decide a result."""
    folders = [ROOT / "src", ROOT / "tests", Path(os.environ.get("GPU_CHECKS") or HERE)]
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kept(path: Path | None, of: Mapping[str, str]) -> dict[str, list[Result]]:
    """Read the results of sessions that an interrupted command finished; none of another run."""
    if path is None or not path.exists():
        return {}
    saved_run = json.loads(path.read_text("utf-8"))
    if saved_run["of"] != of:
        return {}
    saved = saved_run["sessions"].items()
    return {name: [Result(**result) for result in results] for name, results in saved}


def keep(path: Path, of: Mapping[str, str], finished: Mapping[str, Sequence[Result]]) -> None:
    """Write what :func:`kept` reads."""
    saved = {name: list(map(dataclasses.asdict, results)) for name, results in finished.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps({"of": of, "sessions": saved}), encoding="utf-8")
    beside.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--report", type=Path, help="the page; a dry run on the CPU writes none")
    parser.add_argument(
        "--results", type=Path, help="results of sessions, from which the next run continues"
    )
    parser.add_argument("-k", dest="words", default="", help="as pytest's")
    parser.add_argument("--at-once", type=int, help="processes; default: 8 on a GPU, 1 on the CPU")
    options = parser.parse_args()
    lacking = packages.missing()
    if lacking is not None:
        print(lacking, file=sys.stderr)
        return 2
    from ..conformance.matrix import ENGINES

    known = facts(options.device, (package.name for package in ENGINES))
    of = {name: value for name, value in known.items() if name != "date"}
    of |= {"code": code(), "-k": options.words}
    finished = kept(options.results, of)
    began, lock = time.monotonic(), threading.Lock()
    wanted = selected(sessions(), options.words) if options.words else sessions()

    def all_results() -> list[Result]:
        return [result for one in wanted for result in finished.get(one.selection, ())]

    def work(session: Session) -> None:
        is_kept = session.selection in finished
        new = finished.get(session.selection)
        new = new or list(run_session(session, options.device, options.words))
        what = "kept from an interrupted run" if is_kept else f"{len(new)} results"
        with lock:
            finished[session.selection] = new
            took = time.monotonic() - began
            print(f"{took:4.0f} s  {what}: ARGS='-k \"{session.selection}\"'", flush=True)
            if options.results is not None:
                keep(options.results, of, finished)
            if options.report is not None and options.device == "cuda":
                report.write(options.report, report.markdown(known, all_results(), took))

    alone = [session for session in wanted if session.files[0].endswith(ALONE)]
    for alone_session in alone:
        work(alone_session)
    pool = ThreadPoolExecutor(options.at_once or AT_ONCE[options.device])
    try:
        for future in [pool.submit(work, session) for session in wanted if session not in alone]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
    results = all_results()
    text = report.markdown(known, results, time.monotonic() - began)
    if options.results is not None:
        options.results.unlink()
    print(text)
    passed = any(result.outcome == "passed" for result in results)
    bad = any(result.outcome in ("failed", "crashed") for result in results)
    return int(bad or not passed)


if __name__ == "__main__":
    sys.exit(main())
