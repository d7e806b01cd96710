"""Fork servers: test processes that start in milliseconds.

Starting Python and importing torch takes seconds, and a test of several processes pays for each of
them. A fork server has imported torch, the trainer (and an engine) once; it forks a process for
each request, in the requested environment, directory and process group, with the caller's pipes.
The process then runs what ``python -m module``, ``python -c code`` or ``python script`` would run.
When it exits, it runs the handlers of Python's ``atexit`` and tears down its own modules, but not
what was imported before the fork.

There are two servers for each set of imports, with hash seeds of their own: ranks alternate between
them, so that an order that depends on hashes differs between ranks here as it does elsewhere.

Linux only. What a test says about the start or the end itself (a launcher, an import, a limit on
memory, a library's destructors) needs a fresh interpreter: ``project.run(…, fresh=True)``.
"""

import array
import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance.rows import Engine

# In a process that was forked, subprocess.Popen is another.
_Popen = subprocess.Popen
DIRECTORY = "TEST_FORK_SERVERS"
ROOT = Path(__file__).parent.parent
MAIN = "tests.fork_server_main"
SEEDS = 2


def is_serving() -> bool:
    """Whether there are servers, here or where this process was started."""
    return DIRECTORY in os.environ


@contextlib.contextmanager
def serving(engines: "Sequence[Engine]" = ()) -> Iterator[None]:
    """Servers for this process and all that it starts; each imports at its first request.

    Args:
        engines: each that is installed gets servers of its own, which import its modules.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="fork-") as directory:
        imports: dict[str, Sequence[str]] = {"torch": ()}
        variables = {"OMP_NUM_THREADS": "1"}
        for engine in engines:
            if engine.imports and importlib.util.find_spec(engine.name) is not None:
                imports[engine.name] = engine.imports
                variables |= engine.variables
        # What a process finds by PYTHONPATH, its request says.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        # A server ends when it is told so, or all that have its standard input open are gone.
        servers = [
            subprocess.Popen(
                [sys.executable, "-m", MAIN, f"{directory}/{name}-{seed}", *modules],
                cwd=ROOT,
                env={**environment, **variables},
                stdin=subprocess.PIPE,
                process_group=0,  # a Ctrl-C is for the tests
            )
            for name, modules in imports.items()
            for seed in range(SEEDS)
        ]
        os.environ[DIRECTORY] = directory
        try:
            yield
        finally:
            del os.environ[DIRECTORY]
            for server in servers:
                # Its standard input does not end while a process that was forked here, such as
                # a loader's worker of a failed test, has it open too.
                server.communicate(b"end")


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
        self, args: Sequence[str], *, engine: str = "torch", seed: int | None = None, **options: Any
    ) -> None:
        self._engine, self._seed = engine, seed
        super().__init__(args, **options)

    def print_stacks(self) -> None:
        """Have it, its ranks and their own forks write their stacks to its standard error."""
        for seed in range(SEEDS):
            with _connect(f"{self._engine}-{seed}") as server:
                _send(server, self.pid)

    # The private methods in which Popen starts a process and waits for it: all else is its own.
    def _execute_child(self, args: Any, *positional: Any) -> None:
        names = _Popen._execute_child.__code__.co_varnames[2 : 2 + len(positional)]
        arguments = dict(zip(names, positional, strict=True))
        environment = os.environ if arguments["env"] is None else arguments["env"]
        request = {
            "arguments": list(args[1:]),
            "environment": dict(environment),
            "directory": str(arguments["cwd"] or Path.cwd()),
            "engine": self._engine,
            "parent": os.getpid(),
            "group": arguments["process_group"] == 0 or arguments["start_new_session"],
            "numbers": [0, 1, 2, *arguments["pass_fds"]],
        }
        ends = [arguments["p2cread"], arguments["c2pwrite"], arguments["errwrite"]]
        files = [number if end == -1 else end for number, end in enumerate(ends)]
        rank = int(environment.get("RANK", "0")) if self._seed is None else self._seed
        self._server = _connect(f"{self._engine}-{rank % SEEDS}")
        # The next rank's server imports meanwhile: one that starts much later is taken for lost.
        _connect(f"{self._engine}-{(rank + 1) % SEEDS}").close()
        _send(self._server, request, [*files, *arguments["pass_fds"]])
        self.pid = int.from_bytes(receive(self._server, 4), "little")
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(arguments[pipe] for pipe in pipes))

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags & os.WNOHANG and not select.select([self._server], [], [], 0)[0]:
            return 0, 0
        status = receive(self._server, 4)
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


def _send(
    connection: socket.socket, request: Mapping[str, Any] | int, files: Sequence[int] = ()
) -> None:
    data = json.dumps(request).encode()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    connection.sendmsg([len(data).to_bytes(4, "little")], [rights] if files else [])
    connection.sendall(data)


def receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or none where the other side has closed."""
    data = b""
    while len(data) < size:
        try:
            chunk = connection.recv(size - len(data))
        except ConnectionResetError:
            return b""
        if not chunk:
            return b""
        data += chunk
    return data
