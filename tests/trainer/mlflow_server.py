"""A real MLflow server, from the environment that `make engines` installs."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from tests.project import free_port, require

PYTHON = Path(__file__).resolve().parents[2] / "build" / "mlflow-server" / "bin" / "python"
SECONDS = 600.0


@dataclass(frozen=True)
class Server:
    address: str
    group: int


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server on this machine, with its database in a folder; nothing of it is left behind."""
    require(None if PYTHON.exists() else "MLflow's server is not installed: make engines")
    port = free_port()
    where = ("--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    stored = ("--backend-store-uri", f"sqlite:///{folder}/mlflow.db")
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [PYTHON, "-m", "mlflow", "server", *where, *stored],
            cwd=folder,
            # The environment of the tests has other packages.
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process.pid)
    try:
        _wait_until_it_answers(server, process, folder / "server.log")
        yield server
    finally:
        kill(server)
        process.wait()


def kill(server: Server) -> None:
    with suppress(ProcessLookupError):
        os.killpg(server.group, signal.SIGKILL)


def _wait_until_it_answers(server: Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            # expires
            with urlopen(f"{server.address}/health", timeout=5):  # noqa: S310 - http, see above
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"the server does not answer: {log.read_text()}")
