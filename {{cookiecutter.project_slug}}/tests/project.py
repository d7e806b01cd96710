"""Starts the package's commands for tests, and says what is missing for some."""

import atexit
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "my_project"

# Seconds that a test waits for a process: no limit on a slow machine, but an end where one hangs.
PATIENCE = 600.0
_SECONDS_TO_PRINT = 5.0
# A test is one process of its own, whatever has started it.
_CLUSTER = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("NODE_RANK", "NUM_NODES", "NNODES", "PMI_RANK"),
)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process' variables, without those of a launch, and one thread a process."""
    kept = {name: value for name, value in os.environ.items() if name not in _CLUSTER}
    return kept | {"OMP_NUM_THREADS": "1"} | dict(extra or {})


def run(
    arguments: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    extra: Mapping[str, str] | None = None,
    timeout: float = PATIENCE,
    **how: Any,
) -> "subprocess.CompletedProcess[str]":
    """Run Python with arguments to its end; a process group that takes too long is killed whole.

    Then a note of the ``TimeoutExpired`` gives the stacks of all processes that were forked.
    ``how`` it is started: see :func:`start`.
    """
    with start(arguments, cwd=cwd, extra=extra, **how) as process:
        try:
            output, error = process.communicate(timeout=timeout)
        except BaseException as error:
            if isinstance(error, subprocess.TimeoutExpired):
                error.add_note(stacks_of(process))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    # Said on a machine with GPUs, where torch is a CPU build; test_hidden_gpus.py asks for it.
    error = re.sub("^warning: this run is on the CPU: .*\n", "", error, flags=re.MULTILINE)
    return subprocess.CompletedProcess(process.args, process.returncode, output, error)


def succeed(arguments: Sequence[str | Path], **how: Any) -> "subprocess.CompletedProcess[str]":
    """As :func:`run`, of what ends without an error."""
    done = run(arguments, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def stacks_of(process: "subprocess.Popen[str]") -> str:
    """What a process that takes too long has written to standard error, with its stacks.

    Also those of its ranks and their loader workers, if fork servers have forked them.
    """
    if hasattr(process, "print_stacks"):
        process.print_stacks()
    try:
        return process.communicate(timeout=_SECONDS_TO_PRINT)[1]  # expires
    except subprocess.TimeoutExpired as error:
        return (error.stderr or b"").decode(errors="replace")


def run_nodes(
    arguments: Sequence[str | Path], nodes: int, *, timeout: float = PATIENCE, **how: Any
) -> "list[subprocess.CompletedProcess[str]]":
    """Run Python with arguments on so many made-up nodes: a process each, told that it is one."""
    if nodes == 1:
        return [run(arguments, timeout=timeout, **how)]
    port = free_port()
    with ThreadPoolExecutor(nodes) as executor:
        shared = {"WORLD_SIZE": str(nodes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables = [{"RANK": str(node), **shared} for node in range(nodes)]
        run_node = partial(run, arguments, timeout=timeout, **how)
        return list(executor.map(lambda extra: run_node(extra=extra), variables))


def mpirun(processes: int) -> list[str]:
    """The command that starts so many processes by Open MPI, on however few cores."""
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    # Two that begin at once fail over the folder that they would share.
    folder = tempfile.mkdtemp(prefix="mpi-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = ["env", f"TMPDIR={folder}", "mpirun", *as_root, "--oversubscribe"]
    return [*command, "--bind-to", "none", "-np", str(processes)]


def require(reason: str | None) -> None:
    """Skip a test that cannot run here, with the reason; in CI it fails instead."""
    if reason is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


_PROGRAMS = {
    "mpirun": "apt install openmpi-bin",
    "mpiexec.hydra": "apt install mpich",
    "g++": "apt install g++",
    "chromium": "apt install chromium",
}


def missing(name: str) -> str | None:
    """Why tests that need a program or a package cannot run; ``None`` if they can.

    Args:
        name: ``"mpirun"``, ``"g++"``, or a package that ``make`` installs by its name.
    """
    if name == "g++" and not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "the headers of Python are not installed: apt install python3-dev"
    if name in _PROGRAMS:
        return None if shutil.which(name) else f"{name} is not installed: {_PROGRAMS[name]}"
    return None if importlib.util.find_spec(name) else f"{name} is not installed: make {name}"


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start(
    arguments: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    extra: Mapping[str, str] | None = None,
    by: Sequence[str] = (),
    engine: str = "torch",
    fresh: bool = False,
) -> "subprocess.Popen[str]":
    """Start Python with arguments, as leader of a process group.

    Args:
        arguments: of Python.
        cwd: its working directory.
        extra: variables beside this process' own.
        by: the command that starts it, mpirun's for example.
        engine: package that a fork server has imported besides torch.
        fresh: start a new interpreter. By default a fork server forks the process, if there is one.
    """
    options: Any = {
        "cwd": cwd,
        "env": environment(extra),
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "process_group": 0,
    }
    command = [*by, sys.executable, *map(str, arguments)]
    if fresh or by or "TEST_FORK_SERVERS" not in os.environ:
        return subprocess.Popen(command, **options)
    from . import fork_server  # which a project may lack

    return fork_server.ForkedProcess(command, engine=engine, **options)


def fit(*arguments: str | Path) -> list[str | Path]:
    """Arguments of a ``fit`` on the digits; the test is skipped if this example was deleted."""
    config = ROOT / "configs" / "digits.yaml"
    if not config.exists():
        pytest.skip(f"{config.name} was deleted")
    return ["-m", PACKAGE, "fit", "--config", config, *arguments]


def check_digits(folder: Path, strategy: str, *more: str, **how: Any) -> None:
    """Have two processes learn the digits; ``how`` they are started: see :func:`start`."""
    options = ("--trainer.strategy", strategy, "--trainer.accelerator", "cpu", *more)
    steps = ("--trainer.max_epochs", "4", "--trainer.loggers", "[csv]")
    where = ("--trainer.default_root_dir", folder, "--trainer.run_name", "run")
    done = run(fit(*options, *steps, *where), **how)
    assert done.returncode == 0, done.stderr
    (attempt,) = json.loads((folder / "run" / "run.json").read_text())["attempts"]
    assert attempt["layout"]["world_size"] == 2
    rows = (folder / "run" / "metrics.csv").read_text().splitlines()[1:]
    accuracies = [float(row.split(",")[3]) for row in rows if ",val_accuracy," in row]
    assert accuracies[-1] > 0.8
