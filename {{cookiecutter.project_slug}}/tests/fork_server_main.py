"""A fork server's own process: it imports torch, forks, and each fork becomes what was asked for.

``python -m tests.fork_server_main SOCKET MODULE …``; :mod:`tests.fork_server` starts it.
"""

import array
import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import importlib.machinery
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import popen_spawn_posix, process, util
from pathlib import Path
from typing import Any, cast

from .fork_server import ForkedProcess, receive

# In a process that was forked, subprocess.Popen is another.
_Popen = subprocess.Popen
# Where torchrun's agent starts its ranks, and what it and our launcher say of them.
_TORCHRUN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_OF_A_RANK = {"env", "cwd", "process_group", "start_new_session", "stdout", "stderr"}
PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.distributed.nn.functional"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"),
    *("torch.distributed.optim", "torch.nn.parallel", "torch.utils.tensorboard"),
    *("torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "safetensors.torch"),
    *("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "torchmetrics"),
    _TORCHRUN,
    *("sklearn.datasets", "pytest", "jsonargparse", "rich.progress", "numpy"),
)
# Imported from this project; a process that finds another one in its path imports that instead.
PACKAGE = "my_project"
TRAINER = f"{PACKAGE}_trainer"
OURS = f"{TRAINER}.cli"
SOURCES = Path(__file__).parent.parent / "src"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SECONDS_TO_PRINT = 0.1  # stacks, which are written in pieces


@dataclass(frozen=True)
class _Request:
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    engine: str
    parent: int
    group: bool
    numbers: list[int]


class _Server:
    """Forks a process for each connection, and tells its exit status there."""

    def __init__(self, path: str, modules: Sequence[str]) -> None:
        self._modules = [*PRELOADED, *modules]
        self._children: dict[int, socket.socket] = {}
        self._parents: dict[int, int] = {}  # who asked for each child
        self._asking: list[socket.socket] = []  # have connected, and may be stopped before they ask
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{path}.new")
        self._listener.listen(128)
        Path(f"{path}.new").rename(path)  # from here on a caller may connect
        self._path = list(sys.path[1:])
        self._woken, self._wakes = os.pipe()

    def serve(self) -> Callable[[], None]:
        """Serve; returns in a child alone, what it is to run."""
        os.set_blocking(self._wakes, False)
        signal.set_wakeup_fd(self._wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            watched = [0, self._woken, self._listener, *self._asking, *self._children.values()]
            ready, _, _ = select.select(watched, [], [])
            if 0 in ready:
                self._end()
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._reap()
            self._kill_forsaken(ready)
            if self._listener in ready:
                self._asking.append(self._listener.accept()[0])
                self._preload()
            for connection in [endpoint for endpoint in self._asking if endpoint in ready]:
                self._asking.remove(connection)
                run = self._fork(connection)
                if run is not None:
                    return run

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._children.pop(pid)
            del self._parents[pid]
            with connection, contextlib.suppress(OSError):
                connection.sendall(status.to_bytes(4, "little"))

    def _kill_forsaken(self, ready: Sequence[Any]) -> None:
        """A caller sends nothing more: what can be read is that it has gone."""
        for pid, connection in self._children.items():
            if connection in ready:
                _kill(pid)

    def _print_stacks(self, process: int) -> None:
        asked = [pid for pid, parent in self._parents.items() if process in (pid, parent)]
        for number in asked:
            _print_stack(number)

    def _end(self) -> None:
        for pid in self._children:
            _kill(pid)
        os._exit(0)

    def _fork(self, connection: socket.socket) -> Callable[[], None] | None:
        size, rights, _, _ = connection.recvmsg(4, socket.CMSG_LEN(64 * 4))
        if not size:  # it has only had this server import
            connection.close()
            return None
        asked = json.loads(receive(connection, int.from_bytes(size, "little")))
        if isinstance(asked, int):
            connection.close()
            self._print_stacks(asked)
            return None
        files = array.array("i")
        files.frombytes(rights[0][2])
        request = _Request(**asked)
        pid = os.fork()
        if pid == 0:
            for endpoint in (connection, self._listener, *self._asking, *self._children.values()):
                endpoint.close()
            for number in (self._woken, self._wakes):
                os.close(number)
            return lambda: _become(request, list(files), self._path)
        for file in files:
            os.close(file)
        self._children[pid], self._parents[pid] = connection, request.parent
        with contextlib.suppress(OSError):  # the caller has gone: seen in the next round
            connection.sendall(pid.to_bytes(4, "little"))
        return None

    def _preload(self) -> None:
        if not self._modules:
            return
        for name in self._modules:
            importlib.import_module(name)
        self._modules = []
        atexit.register(_spare, [*sys.modules])
        sys.path.insert(0, str(SOURCES))
        importlib.import_module(OURS)
        del sys.path[0]
        sys.modules["torch"].set_num_threads(1)
        gc.collect()
        gc.freeze()
        threads = len(list(Path("/proc/self/task").iterdir()))
        assert threads == 1, f"a fork would lose {threads - 1} threads"


def _spare(names: Sequence[str]) -> None:
    """At Python's exit, leave modules that were imported before the fork as they are.

    Those of the project and of its tests, and all that they hold, are torn down as ever.
    """
    torn_down = {*sys.stdlib_module_names, "tests", "__main__"}
    libraries = [name for name in names if name.partition(".")[0] not in torn_down]
    kept = [sys.modules.pop(name) for name in libraries if name in sys.modules]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _leave_out_destructors() -> None:
    """Have exit() end before the destructors of libraries that were loaded before the fork.

    With the teardown of their modules they take more than half of a short process' time: each page
    that they write to is first copied. glibc calls the last one first: files, then the end.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.on_exit(libc.fcloseall, None)


def _print_stack(process: int) -> None:
    """Have a process, and those below it, print their stacks."""
    with contextlib.suppress(OSError):  # it has ended
        os.kill(process, signal.SIGQUIT)
        time.sleep(_SECONDS_TO_PRINT)
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            for child in path.read_text().split():
                _print_stack(int(child))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _become(request: _Request, files: Sequence[int], path: Sequence[str]) -> None:
    """Take on the request's surroundings, and run its command."""
    if request.group:
        os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _leave_out_destructors()
    os.chdir(request.directory)
    process.ORIGINAL_DIR = request.directory
    os.environ.clear()
    os.environ.update(request.environment)
    # For this process, and not for those that it forks, its parent is who asked for it.
    pid, real = os.getpid(), os.getppid
    os.getppid = lambda: request.parent if os.getpid() == pid else real()
    _take_files(files, request.numbers)
    # A run redirects the output of all ranks but the first.
    faulthandler.register(signal.SIGQUIT, os.dup(2), all_threads=True)
    arguments = list(request.arguments)
    unbuffered = bool(request.environment.get("PYTHONUNBUFFERED"))
    while arguments[0] in ("-u", "-B"):
        unbuffered |= arguments[0] == "-u"
        sys.dont_write_bytecode |= arguments[0] == "-B"
        del arguments[0]
    sys.stdout = sys.__stdout__ = _text(1, unbuffered=unbuffered)
    sys.stderr = sys.__stderr__ = _text(2, unbuffered=unbuffered)
    random.seed()
    sys.modules["numpy"].random.seed()
    subprocess.Popen = _launching(request.engine)  # type: ignore[misc]
    sys.modules[_TORCHRUN].Popen = subprocess.Popen  # type: ignore[attr-defined]
    _fork_what_multiprocessing_spawns(request.engine)
    _run(arguments, request, path)


def _take_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Have each file at its number, as the caller has it."""
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
    for file in files:
        os.close(file)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)


def _text(number: int, *, unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(number, "wb", closefd=False)
    return io.TextIOWrapper(
        cast(Any, raw) if unbuffered else io.BufferedWriter(raw),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=number == 2,
        write_through=unbuffered,
    )


def _launching(engine: str) -> type[_Popen]:
    """What a launcher starts ranks by: its own command, forked as this process was."""

    class Launching(_Popen):
        def __new__(cls, args: Any, **options: Any) -> Any:
            is_rank = {"env"} <= options.keys() <= _OF_A_RANK and args[0] == sys.executable
            if is_rank and args[1] in ("-u", "-m", "-c", sys.argv[0]):
                return ForkedProcess(args, engine=engine, **options)
            return _Popen(args, **options)

    return Launching


def _fork_what_multiprocessing_spawns(engine: str) -> None:
    started: dict[int, ForkedProcess] = {}
    spawn = util.spawnv_passfds

    def launch(path: Any, arguments: Any, files: Any) -> int:
        if "--multiprocessing-fork" not in map(os.fsdecode, arguments):
            return spawn(path, arguments, files)
        command = [os.fsdecode(argument) for argument in arguments]
        forked = ForkedProcess(command, engine=engine, seed=len(started), pass_fds=sorted(files))
        started[forked.pid] = forked
        return forked.pid

    def poll(self: popen_spawn_posix.Popen, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            forked = started[self.pid]
            self.returncode = forked.poll() if flag == os.WNOHANG else forked.wait()
        return self.returncode

    util.spawnv_passfds = launch
    popen_spawn_posix.Popen.poll = poll


def _run(arguments: list[str], request: _Request, path: Sequence[str]) -> None:
    sys.orig_argv = [sys.executable, *request.arguments]
    path_variable = request.environment.get("PYTHONPATH", "")
    paths = [str(Path(word).resolve()) for word in path_variable.split(os.pathsep) if word]
    kind, rest = arguments[0], arguments[1:]
    first = str(Path(kind).resolve().parent) if kind not in ("-m", "-c") else request.directory
    sys.path[:] = [first, *paths, *path]
    sys.path_importer_cache.clear()
    others = {"tests"}  # it may have tests of its own
    ours = sys.modules[TRAINER].__spec__
    spec = importlib.machinery.PathFinder.find_spec(TRAINER, sys.path)
    if spec is None or ours is None or spec.origin != ours.origin:
        others |= {PACKAGE, TRAINER}
    for name in [module for module in sys.modules if module.partition(".")[0] in others]:
        del sys.modules[name]
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)  # noqa: S102
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _Server(sys.argv[1], sys.argv[2:]).serve()()
