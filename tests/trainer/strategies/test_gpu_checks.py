"""The checks for GPUs, tried without one: they run on the CPU, and what stands around them."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.conformance.matrix import PORTABLE
from tests.gpu import find_python, packages, report
from tests.gpu import run as gpu_run
from tests.gpu.report import Result
from tests.gpu.run import Session, run_session, sessions
from tests.project import ROOT, succeed

from tests import fork_server

DRY = {"GPU_TESTS_ON": "cpu"}
OWN = "tests/gpu"
HERE = Path(__file__).parents[1] / "gpu"


def checks(folder: str | Path, words: str) -> list[str]:
    """The command that runs some of a folder's checks: the project's own, or the template's."""
    command = ["-m", "pytest", str(folder), "-m", "gpu", "-p", "no:cacheprovider"]
    return [*command, "-q", "-rsfE", "-k", words]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork what is started here instead of importing torch again, where there are servers."""
    if fork_server.is_serving():
        monkeypatch.setattr(subprocess, "Popen", fork_server.ForkedProcess)


@pytest.mark.parametrize(
    ("folder", "words", "counts"),
    [
        (OWN, "not compiled and equals_the_cpu and [fsdp-32-true]", "1 passed"),
        (HERE, "None-fsdp-32-true or activations or single_device-False", "3 skipped"),
    ],
    ids=["own", "template"],
)
@pytest.mark.slow
def test_some_checks_pass_on_the_cpu(folder, words, counts):
    assert counts in succeed(checks(folder, words), extra=DRY).stdout


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.needs("deepspeed", "fairscale", "horovod")
@pytest.mark.parametrize(
    ("folder", "counts"),
    [(OWN, r"\d\d+ passed"), (HERE, r"\d+ passed, \d\d skipped")],
    ids=["own", "template"],
)
def test_all_checks_pass_on_the_cpu(folder, counts):
    """In one precision; compiled steps and the digits have tests of their own.

    Each strategy is compared with the CPU and resumed; what costs most is tried only under those
    that keep their state in a form of their own, of which the others are made.
    """
    words = "not compiled and not digits and not -16-mixed and not -bf16-mixed and not 16-true"
    forms = " or ".join(f"[{name}]" for name in PORTABLE)
    words += f" and (not (fused or dropout or a_checkpoint_of) or {forms})"
    # A new interpreter, from which the fork servers can be asked.
    done = succeed(checks(folder, words), extra=DRY, fresh=True)
    assert re.search(rf"\n{counts}", done.stdout), done.stdout[-3000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("folder", "words", "count"),
    [(OWN, "sharding", 4), (HERE, "waiting", 22)],
    ids=["own", "template"],
)
def test_without_a_gpu_each_check_is_skipped_with_the_reason(folder, words, count):
    done = succeed(checks(folder, words), extra={"GPU_TESTS_ON": "", "CI": "true"})
    assert " passed" not in done.stdout
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    reason = f"torch {torch.__version__} ({build}) sees no GPU here"
    assert re.search(
        rf"SKIPPED \[{count}\] .*tests/gpu/conftest.py:\d+: {re.escape(reason)}\n", done.stdout
    )


def test_every_file_of_checks_is_run_by_make_test_gpu(monkeypatch):
    def files() -> set[Path]:
        return {ROOT / name for session in sessions() for name in session.files}

    def marked(folder: Path) -> set[Path]:
        paths = {
            path for path in folder.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()
        }
        return paths - {Path(__file__), *folder.glob("fake_gpu/*")}  # which has its own command

    ours = marked(ROOT / "tests")
    assert files() == ours
    monkeypatch.setenv("GPU_CHECKS", str(HERE))  # as the template's `make test-gpu` does
    assert files() == ours | marked(HERE)
    assert marked(HERE.parent) == marked(HERE)


BROKEN = """
import os, pytest
pytestmark = pytest.mark.gpu
def test_a(record_property):
    record_property("found", "1.5 s (bound 5 s)")
def test_b():
    os.abort()
def test_c():
    pytest.skip("not today")
def test_d():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
@pytest.mark.parametrize("name", ["x-y"])
def test_e(name):
    assert os.environ["GPU_TESTS_ON"] == "cpu"
"""


@pytest.mark.usefixtures("forked")
def test_a_process_that_an_error_ends_costs_one_check(tmp_path, capsys):
    (tmp_path / "test_broken.py").write_text(BROKEN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    results = list(run_session(Session((str(tmp_path / "test_broken.py"),)), "cpu", ""))
    outcomes = ["passed", "crashed", "skipped", "failed", "passed"]
    assert [result.outcome for result in results] == outcomes
    assert results[0].found == "1.5 s (bound 5 s)"
    assert results[1].message.startswith("the process ended with -6")
    assert results[2].message == "not today"
    assert "illegal memory access" in results[3].message
    assert "test_broken.py" in capsys.readouterr().err


@pytest.mark.usefixtures("forked")
def test_sessions_without_a_selected_test_are_not_started(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for name, text in (("one", BROKEN), ("two", BROKEN), ("bad", "import nowhere")):
        (tmp_path / f"test_{name}.py").write_text(text)
    runs = {name: Session((str(tmp_path / f"test_{name}.py"),)) for name in ("one", "two", "bad")}
    assert gpu_run.selected([*runs.values()], "test_two and test_a") == [runs["two"], runs["bad"]]


@pytest.mark.usefixtures("forked")
def test_sessions_run_at_once_and_what_measures_time_before_them(tmp_path, monkeypatch, capsys):
    names = [f"test_{name}.py" for name in ("a", "b", "failures")]
    together, ran = threading.Barrier(2, timeout=600), []

    def run_session(session, device, words):
        if session.files[0] != gpu_run.ALONE:
            assert ran[0] == gpu_run.ALONE
            together.wait()  # a session alone would break it
        ran.append(session.files[0])
        yield Result(f"{session.files[0]}::test_a", "passed")

    monkeypatch.setattr(gpu_run, "sessions", lambda: [Session((name,)) for name in names])
    monkeypatch.setattr(gpu_run, "run_session", run_session)
    monkeypatch.setattr(sys, "argv", ["run", "--device", "cpu", "--at-once", "2"])
    assert gpu_run.main() == 0
    assert sorted(ran) == names
    assert "3 passed" in capsys.readouterr().out


@pytest.mark.usefixtures("forked")
def test_an_interrupted_run_continues_after_its_last_session(tmp_path, monkeypatch, capsys):
    """Whatever ends the first command, each is run once; other code starts from the first."""
    sessions = [Session((name,)) for name in ("one", "two")]
    started = []

    def run_session(session, device, words):
        started.append(session.selection)
        if started == ["one", "two"]:
            raise KeyboardInterrupt
        yield Result(f"{session.selection}::test_a", "passed", seconds=1.0)

    monkeypatch.setattr(gpu_run, "sessions", lambda: sessions)
    monkeypatch.setattr(gpu_run, "run_session", run_session)
    results = tmp_path / "build" / "results.json"
    monkeypatch.setattr(sys, "argv", ["run", "--device", "cpu", "--results", str(results)])
    with pytest.raises(KeyboardInterrupt):
        gpu_run.main()
    assert gpu_run.main() == 0
    assert started == ["one", "two", "two"]
    assert "2 passed, in 0.0 minutes" in capsys.readouterr().out
    assert not results.exists()  # all is done
    gpu_run.keep(results, {"code": "other"}, {"one": [Result("one::test_a", "failed")]})
    assert gpu_run.main() == 0
    assert started == ["one", "two", "two", "one", "two"]


@pytest.mark.usefixtures("forked")
def test_a_file_that_cannot_be_imported_is_no_success(tmp_path):
    (tmp_path / "test_broken.py").write_text("import nowhere")
    (result,) = run_session(Session((str(tmp_path / "test_broken.py"),)), "cpu", "")
    assert result.outcome == "crashed"
    assert "nowhere" in result.message


FACTS = {"date": "2026-11-22 12:00 UTC", "device": "a GPU", "torch": "2.13.0"}
RESULTS = [
    *(Result(f"tests/gpu/test_a.py::test_near[x{i}-p]", "passed", f"{i}e-07") for i in range(6)),
    Result("tests/gpu/test_a.py::test_soon", "failed", "7.0 s (bound 5 s)", "assert 7 < 5", 7),
    Result("tests/gpu/test_a.py::test_not", "skipped", message="no engine"),
]


def test_the_page_has_every_result():
    text = report.markdown(FACTS, RESULTS, 90)
    assert text.startswith(
        "2026-11-22 12:00 UTC, a GPU: 6 passed, 1 failed, 1 skipped, in 1.5 minutes.\n\n"
        "- torch: 2.13.0\n"
    )
    for line in (
        "| a: near | 6 | 0 | 0 | at most 5e-07 |",
        "| a: soon | 0 | 1 | 0 | 7.0 s (bound 5 s) |",
        "| a: not | 0 | 0 | 1 |  |",
        "| x3 | 3e-07 |",
        "- `test_a.py::test_soon` failed: assert 7 < 5",
        "- 1 skipped: no engine",
    ):
        assert line in text.splitlines()


def test_the_output_replaces_what_stands_between_its_marks(tmp_path):
    page = tmp_path / "docs" / "gpu.md"
    report.write(page, "one\n")
    page.write_text("before\n" + page.read_text() + "after\n")
    report.write(page, "two\n")
    begin, end = report.marks("test-gpu")
    assert page.read_text() == f"before\n# On a GPU\n\n{begin}\ntwo\n{end}\nafter\n"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no lines"):
        report.write(page, "three\n")
    assert page.read_text() == "nothing"


def fake(folder: Path, answer: str) -> str:
    """A Python that answers so."""
    path = folder / f"python-{len(list(folder.iterdir()))}"
    path.write_text(f"#!/bin/sh\necho a warning\necho '{answer}'\n")
    path.chmod(0o755)
    return str(path)


def test_the_first_python_whose_torch_sees_a_gpu_is_taken(tmp_path, monkeypatch, capsys):
    without, good = fake(tmp_path, "has no torch"), fake(tmp_path, "ok")
    monkeypatch.setattr(find_python, "candidates", lambda venv: [without, good])
    assert find_python.main([]) == 0
    assert capsys.readouterr().out == f"{good}\n"
    assert find_python.main([without]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"no Python here whose torch sees a GPU: {without} has no torch; name")
    assert error.count("\n") == 1


def test_an_environment_comes_before_what_is_on_the_path(tmp_path, monkeypatch):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    candidates = find_python.candidates(str(tmp_path))
    assert candidates[0] == str(python)
    assert len(candidates) == len(set(candidates)) > 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_make_test_gpu_says_in_one_line_that_there_is_no_gpu():
    done = subprocess.run(
        ["make", "--silent", "test-gpu", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "MAKEFLAGS"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    line, *rest = done.stderr.splitlines()
    reason = f"{sys.executable} has torch {torch.__version__}"
    assert line.startswith(f"no Python here whose torch sees a GPU: {reason}")
    assert not [text for text in rest if not text.startswith("make")]


def test_missing_packages_are_named_in_one_line(monkeypatch, capsys):
    assert packages.main() == 0
    monkeypatch.setattr(packages, "IMPORTED", {"nowhere": "a-package", "os": "os"})
    assert packages.main() == 2
    before, line = capsys.readouterr().err.splitlines()
    assert before == "none is missing"
    assert line.startswith(f"{sys.executable} lacks a-package: run `make gpu-tools`")


def test_what_is_installed_for_the_checks_is_locked_and_holds_no_torch():
    text = packages.locked(packages.INSTALLED)
    names = [line.partition("==")[0] for line in text.splitlines() if line[0] != " "]
    assert names == packages.INSTALLED
    assert not {"torch", "numpy", "triton"} & set(names)
    assert text.count("--hash=sha256:") > len(names)
    line = packages.command("file", "folder", "3.12")
    assert {"--no-deps", "--require-hashes", "--target"} <= set(line)
    assert line[line.index("--python-version") + 1] == "3.12"
