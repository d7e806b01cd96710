"""Fork servers: test processes that start in milliseconds.

Starting Python and importing torch takes seconds, and a test of several processes pays for each of
them. A fork server has imported torch (and an engine) once; it forks a process for each request, in
the requested environment, directory and process group, with the caller's pipes. The process then
runs what ``python -m module``, ``python -c code`` or ``python script`` would run.

There are two servers for each set of imports, with hash seeds of their own: ranks alternate between
them, so that an order that depends on hashes differs between ranks here as it does elsewhere.

Linux only. What a test says about the start itself (a launcher, an import, a limit on memory) needs
a fresh interpreter: ``project.run(…, fresh=True)``.
"""

import array
import contextlib
import ctypes
import fcntl
import gc
import importlib
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
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import popen_spawn_posix, process, util
from pathlib import Path
from typing import Any, cast

# In a process that was forked, subprocess.Popen is another.
_Popen = subprocess.Popen
DIRECTORY = "TEST_FORK_SERVERS"
SEEDS = 2
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
    *("sklearn.datasets", "psutil", "pytest", "jsonargparse", "rich.progress", "numpy"),
)
# The server of an engine imports a file in this folder, which imports what the engine's tests need.
HERE = Path(__file__).parent
ENGINES = [path.stem.removesuffix("_imports") for path in HERE.glob("*_imports.py")]
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


# --- the caller's side ----------------------------------------------------------------------------


def is_serving() -> bool:
    """Whether there are servers, here or where this process was started."""
    return DIRECTORY in os.environ


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Servers for this process and all that it starts; each imports at its first request."""
    if not sys.platform.startswith("linux"):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="fork-") as directory:
        engines = [name for name in ENGINES if importlib.util.find_spec(name) is not None]
        # What a process finds by PYTHONPATH, its request says.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        # A server ends when its standard input does, which is when this process is gone.
        servers = [
            subprocess.Popen(
                [sys.executable, __file__, f"{directory}/{name}-{seed}", *imports],
                env={**environment, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                process_group=0,  # a Ctrl-C is for the tests
            )
            for name, imports in [("torch", []), *((each, [f"{each}_imports"]) for each in engines)]
            for seed in range(SEEDS)
        ]
        os.environ[DIRECTORY] = directory
        try:
            yield
        finally:
            del os.environ[DIRECTORY]
            for server in servers:
                with server:  # closes its standard input and waits
                    pass


class ForkedProcess(_Popen):
    """As :class:`subprocess.Popen`, for a command of this Python; a server forks the process.

    The process is killed when the caller ends without having waited for it.

    Args:
        args: ``[sys.executable, …]``.
        engine: the server that has imported it.
        seed: which of its two servers; by default that of the rank in ``env``.
        options: as those of ``Popen``.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        engine: str = "torch",
        seed: int | None = None,
        **options: Any,
    ) -> None:
        self._engine, self._seed = engine, seed
        super().__init__(args, **options)

    # The private methods in which Popen starts a process and waits for it: all else is its own.
    def _execute_child(self, args: Any, *positional: Any) -> None:
        names = _Popen._execute_child.__code__.co_varnames[2 : 2 + len(positional)]
        given = dict(zip(names, positional, strict=True))
        environment = os.environ if given["env"] is None else given["env"]
        request = {
            "arguments": list(args[1:]),
            "environment": dict(environment),
            "directory": str(given["cwd"] or Path.cwd()),
            "engine": self._engine,
            "parent": os.getpid(),
            "group": given["process_group"] == 0 or given["start_new_session"],
            "numbers": [0, 1, 2, *given["pass_fds"]],
        }
        ends = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        files = [own if end == -1 else end for own, end in enumerate(ends)]
        rank = int(environment.get("RANK", "0")) if self._seed is None else self._seed
        self._server = _connect(f"{self._engine}-{rank % SEEDS}")
        # The next rank's server imports meanwhile: one that starts much later is taken for lost.
        _connect(f"{self._engine}-{(rank + 1) % SEEDS}").close()
        _send(self._server, request, [*files, *given["pass_fds"]])
        self.pid = int.from_bytes(_receive(self._server, 4), "little")
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[pipe] for pipe in pipes))

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags & os.WNOHANG and not select.select([self._server], [], [], 0)[0]:
            return 0, 0
        status = _receive(self._server, 4)
        self._server.close()
        # A server that is gone has killed what it had forked.
        return self.pid, int.from_bytes(status, "little") if status else signal.SIGKILL

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            with contextlib.ExitStack() as stack:
                stack.callback(self._waitpid_lock.release)
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)
        return self.returncode


def _connect(server: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    path = f"{os.environ[DIRECTORY]}/{server}"
    while not Path(path).exists():  # it has just been started
        select.select([], [], [], 0.01)
    connection.connect(path)
    return connection


def _send(connection: socket.socket, request: Mapping[str, Any], files: list[int]) -> None:
    data = json.dumps(request).encode()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    connection.sendmsg([len(data).to_bytes(4, "little")], [rights])
    connection.sendall(data)


def _receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or none where the other side has closed."""
    data = b""
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except ConnectionResetError:
            return b""
        if not part:
            return b""
        data += part
    return data


# --- the server -----------------------------------------------------------------------------------


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
            for connection in [each for each in self._asking if each in ready]:
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
            with connection, contextlib.suppress(OSError):
                connection.sendall(status.to_bytes(4, "little"))

    def _kill_forsaken(self, ready: Sequence[Any]) -> None:
        """A caller sends nothing more: what can be read is that it has gone."""
        for pid, connection in self._children.items():
            if connection in ready:
                _kill(pid)

    def _end(self) -> None:
        for pid in self._children:
            _kill(pid)
        os._exit(0)

    def _fork(self, connection: socket.socket) -> Callable[[], None] | None:
        size, rights, _, _ = connection.recvmsg(4, socket.CMSG_LEN(64 * 4))
        if not size:  # it has only had this server import
            connection.close()
            return None
        files = array.array("i")
        files.frombytes(rights[0][2])
        request = _Request(**json.loads(_receive(connection, int.from_bytes(size, "little"))))
        pid = os.fork()
        if pid == 0:
            for each in (connection, self._listener, *self._asking, *self._children.values()):
                each.close()
            for number in (self._woken, self._wakes):
                os.close(number)
            return lambda: _become(request, list(files), self._path)
        for file in files:
            os.close(file)
        self._children[pid] = connection
        with contextlib.suppress(OSError):  # the caller has gone: seen in the next round
            connection.sendall(pid.to_bytes(4, "little"))
        return None

    def _preload(self) -> None:
        while self._modules:
            importlib.import_module(self._modules.pop(0))
            if not self._modules:
                sys.modules["torch"].set_num_threads(1)
                gc.collect()
                gc.freeze()
                threads = len(list(Path("/proc/self/task").iterdir()))
                assert threads == 1, f"a fork would lose {threads - 1} threads"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# --- the process ----------------------------------------------------------------------------------


def _become(request: _Request, files: Sequence[int], path: Sequence[str]) -> None:
    """Take on the request's surroundings, and run its command."""
    if request.group:
        os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(request.directory)
    process.ORIGINAL_DIR = request.directory
    os.environ.clear()
    os.environ.update(request.environment)
    # For this process, and not for those that it forks, its parent is who asked for it.
    own, real = os.getpid(), os.getppid
    os.getppid = lambda: request.parent if os.getpid() == own else real()
    _take_files(files, request.numbers)
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
        command = [os.fsdecode(each) for each in arguments]
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
    given = request.environment.get("PYTHONPATH", "")
    paths = [str(Path(each).resolve()) for each in given.split(os.pathsep) if each]
    kind, rest = arguments[0], arguments[1:]
    first = str(Path(kind).resolve().parent) if kind not in ("-m", "-c") else request.directory
    sys.path[:] = [first, *paths, *path]
    sys.path_importer_cache.clear()
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
