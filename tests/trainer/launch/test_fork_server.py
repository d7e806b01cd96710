"""A forked process is what a started one would be, and does not outlive who asked for it."""

import json
import os
import signal
import subprocess
import time

import psutil
import pytest
from tests.fork_server import is_serving
from tests.project import PACKAGE, PATIENCE, run, stacks_of, start, succeed

pytestmark = pytest.mark.skipif(
    not is_serving(), reason="processes are started, not forked, on this system"
)

REPORT = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0], "name": __name__,
    "variables": {key: os.environ.get(key) for key in ("ONLY_HERE", "OMP_NUM_THREADS")},
    "group": os.getpgid(0) == os.getpid(), "torch": "torch" in sys.modules,
}))
"""


@pytest.mark.parametrize("kind", ["module", "script", "code"])
def test_it_is_what_a_fresh_interpreter_would_be(tmp_path, kind):
    (tmp_path / "report.py").write_text(REPORT)
    command = {"module": ["-m", "report"], "script": ["report.py"], "code": ["-c", REPORT]}[kind]
    options = {"cwd": tmp_path, "extra": {"ONLY_HERE": "yes"}}
    done = [run([*command, "1"], fresh=fresh, **options) for fresh in (True, False)]
    reports = [json.loads(result.stdout) for result in done]
    assert [report.pop("torch") for report in reports] == [False, True]
    assert reports[0] == reports[1]
    assert reports[1]["variables"] == {"ONLY_HERE": "yes", "OMP_NUM_THREADS": "1"}
    assert "ONLY_HERE" not in os.environ


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import threading as t, sys; t.Thread(target=sys.stderr.write, args='a').start()", 0, "a"),
    ],
)
def test_how_it_ends_is_told(code, status, error):
    done = run(["-c", code])
    assert (done.returncode, done.stderr) == (status, error)


ENDS = """
import atexit, ctypes, multiprocessing, sys
class Last:
    def __del__(self): print("object", flush=True)
atexit.register(print, "handler")
ctypes.CDLL(None).puts(b"library")
last, lock = Last(), multiprocessing.get_context("spawn").Lock()
print("printed", end=" ")
sys.exit(3)
"""


def test_what_is_done_and_written_at_its_exit_is_the_same():
    fresh, forked = (run(["-c", ENDS], fresh=is_fresh) for is_fresh in (True, False))
    assert fresh.returncode == forked.returncode == 3
    assert fresh.stderr == forked.stderr == ""
    for process in (fresh, forked):
        assert sorted(process.stdout.split()) == ["handler", "library", "object", "printed"]


def test_a_project_elsewhere_is_imported_from_there(tmp_path):
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").write_text("name = 'the other'\n")
    ask = f"import {PACKAGE}; print(getattr({PACKAGE}, 'name', 'this'))"
    assert run(["-c", ask], extra={"PYTHONPATH": str(tmp_path)}).stdout == "the other\n"
    assert run(["-c", ask]).stdout == "this\n"


def test_ranks_hash_differently():
    ask = ["-c", "print(hash('a'))"]
    hashes = [run(ask, extra={"RANK": str(rank)}).stdout for rank in range(4)]
    assert hashes[0] == hashes[2]
    assert hashes[1] == hashes[3]
    assert hashes[0] != hashes[1]


def test_numbers_drawn_without_a_seed_differ():
    draw = "import random, numpy; print(random.random(), numpy.random.rand())"
    assert len({number for _ in range(2) for number in run(["-c", draw]).stdout.split()}) == 4


LAUNCHER = """
import os, subprocess, sys, time
if len(sys.argv) == 1:
    command = [sys.executable, "launcher.py", "rank"]
    print(subprocess.Popen(command, env={**os.environ}, process_group=0).pid, flush=True)
time.sleep(100)
"""


def test_a_process_ends_with_the_one_that_started_it(tmp_path):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    with start(["launcher.py"], cwd=tmp_path) as process:
        rank = psutil.Process(int(process.stdout.readline()))
        assert rank.ppid() != process.pid  # forked by the server
        os.kill(process.pid, signal.SIGKILL)
        assert psutil.wait_procs([rank], timeout=PATIENCE)[1] == []


def test_a_wait_is_bounded():
    with start(["-c", "import time; time.sleep(100)"]) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=0.1)  # expires
        process.kill()
        assert process.wait(PATIENCE) == -signal.SIGKILL


HANGS = """
import multiprocessing, os, subprocess, sys, threading, time

def hang():
    os.write(1, b"here ")
    time.sleep(1000)

def rank(): hang()
def worker(): hang()
def thread(): hang()
def launcher(): hang()
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, "hangs.py", "rank"], env={**os.environ}, process_group=0)
    launcher()
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
multiprocessing.get_context("fork").Process(target=worker).start()
threading.Thread(target=thread, daemon=True).start()
rank()
"""


@pytest.mark.slow
def test_a_timeout_tells_where_each_process_stands(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text(HANGS)
    with start(["hangs.py"], cwd=tmp_path) as process:
        assert process.stdout.read(4 * len("here ")) == 4 * "here "
        missing = {"launcher", "rank", "worker", "thread"}
        for _ in range(20):  # they write to one pipe, on a busy machine at once
            stacks = stacks_of(process)
            missing -= {name for name in missing if f"in {name}\n" in stacks}
            if not missing:
                break
        process.kill()
    assert not missing, stacks
    monkeypatch.setattr("tests.project._SECONDS_TO_PRINT", 0.1)
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        run(["-c", "import time; time.sleep(1000)"], timeout=0.1)  # expires
    assert len(raised.value.__notes__) == 1


KILLED = """
import os, sys
from tests import fork_server
with fork_server.serving():
    process = fork_server.ForkedProcess([sys.executable, "-c", "import time; time.sleep(100)"])
    print(process.pid, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_nothing_outlives_the_tests():
    done = run(["-c", KILLED], fresh=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + PATIENCE
    while psutil.pid_exists(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


FORKED = """
import os, time
from tests import fork_server
with fork_server.serving():
    pid = os.fork()
    if pid == 0:
        time.sleep(100)
        os._exit(1)
os.kill(pid, 9)
"""


def test_servers_end_before_what_was_forked_beside_them():
    succeed(["-c", FORKED], fresh=True)
